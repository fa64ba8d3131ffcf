"""Observers: a counter counts as dead only after the observer's own readings, on its own clock, without a gap; and what
a living replica leaves out of its beats is missed only after two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from services.pool.observing import Beat, BeatLimits, Driven, Reading, Seen, dead, forgotten, observe
from services.pool.rows import Key

LIMITS = BeatLimits(dead=45.0, absent=15.0, gap=10.0)
KEY = Key("acme", "one")
RUN = Driven(KEY, "e1", 3, "a")


def reading(
    at: float, beats: int | None, *, took: float = 0.0, listed: bool = True, driven: Iterable[Driven] = ()
) -> Reading:
    """A reading of replica `a`; without a row where `beats` is None."""
    rows = {} if beats is None else {"a": Beat(beats, frozenset({KEY}) if listed else frozenset())}
    return Reading(at, at + took, rows, driven)


def after(readings: Sequence[Reading], before: Seen | None = None) -> Seen:
    """What is seen after all of them."""
    seen = before or Seen()
    for one in readings:
        seen = observe(seen, one, LIMITS)
    return seen


def every_two_seconds(until: float, beats: int | None, *, start: float = 0.0) -> list[Reading]:
    """Readings of a counter that stands still."""
    return [reading(start + 2.0 * number, beats) for number in range(int((until - start) // 2) + 1)]


def test_nothing_is_dead_before_anything_was_read() -> None:
    assert dead(Seen(), LIMITS) == {}
    assert forgotten(Seen()) == []


def test_n96_a_counter_that_stands_still_for_the_whole_time_is_dead() -> None:
    assert dead(after(every_two_seconds(44, 7)), LIMITS) == {}
    assert dead(after(every_two_seconds(46, 7)), LIMITS) == {"a": 7}


def test_a_counter_that_moves_begins_anew() -> None:
    seen = after([*every_two_seconds(44, 7), *every_two_seconds(88, 8, start=46)])
    assert dead(seen, LIMITS) == {}
    assert dead(after(every_two_seconds(92, 8, start=90), seen), LIMITS) == {"a": 8}


def test_a_counter_that_goes_back_has_moved() -> None:
    assert dead(after([*every_two_seconds(44, 7), reading(46, 1)]), LIMITS) == {}


@pytest.mark.parametrize(("pause", "found"), [(10.0, True), (10.5, False)])
def test_after_a_gap_in_the_readings_nothing_that_was_seen_counts(pause: float, found: bool) -> None:
    seen = after(every_two_seconds(40, 7))
    seen = after([reading(40 + pause, 7)], seen)
    assert (dead(seen, LIMITS) != {}) is found
    # The same counter, seen long enough after the gap.
    assert dead(after(every_two_seconds(100, 7, start=42 + pause), seen), LIMITS) == {"a": 7}


def test_an_outage_of_the_database_kills_nobody() -> None:
    """Everybody is away for a minute, and beats again within two seconds of its end."""
    seen = after(every_two_seconds(30, 7))
    seen = after([reading(90, 7)], seen)
    assert dead(seen, LIMITS) == {}
    seen = after(every_two_seconds(134, 8, start=92), seen)
    assert dead(seen, LIMITS) == {}


def test_a_reading_that_takes_long_counts_for_less() -> None:
    """It may have been made at any moment of it: standing still is counted from its end, and to its beginning."""
    seen = after([reading(0, 7, took=5.0), *(reading(5.0 + 4.0 * number, 7, took=4.0) for number in range(11))])
    assert seen.read_at == 45.0
    assert dead(seen, LIMITS) == {}
    assert dead(after([reading(50, 7)], seen), LIMITS) == {"a": 7}


def test_a_gap_is_measured_from_the_beginning_of_one_reading_to_the_end_of_the_next() -> None:
    seen = after(every_two_seconds(40, 7))
    assert dead(after([reading(45, 7, took=6.0), reading(52, 7)], seen), LIMITS) == {}


def test_a_driver_that_has_no_row_is_dead_sooner_but_not_at_once() -> None:
    driven = [RUN]
    readings = [reading(2.0 * number, None, driven=driven) for number in range(8)]
    assert dead(after(readings), LIMITS) == {}
    assert dead(after([*readings, reading(16, None, driven=driven)]), LIMITS) == {"a": None}
    # It was there all the time, and says so.
    assert dead(after([*readings, reading(16, 4, driven=driven)]), LIMITS) == {}


def test_who_is_not_seen_any_more_is_forgotten() -> None:
    seen = after(every_two_seconds(60, 7))
    assert dead(after([reading(62, None)], seen), LIMITS) == {}


def test_an_execution_that_is_left_out_of_two_beats_is_forgotten_by_its_driver() -> None:
    beats = [7, 7, 7, 8, 8]
    seen = after([reading(2.0 * at, value, listed=False, driven=[RUN]) for at, value in enumerate(beats)])
    assert forgotten(seen) == []
    assert forgotten(after([reading(12, 9, listed=False, driven=[RUN])], seen)) == [RUN]


def test_an_execution_that_is_listed_once_is_not_forgotten() -> None:
    seen = after(
        [
            reading(0, 7, listed=False, driven=[RUN]),
            reading(2, 8, listed=False, driven=[RUN]),
            reading(4, 9, listed=True, driven=[RUN]),
            reading(6, 10, listed=False, driven=[RUN]),
            reading(8, 11, listed=False, driven=[RUN]),
        ]
    )
    assert forgotten(seen) == []


def test_another_execution_of_the_session_begins_anew() -> None:
    later = RUN._replace(execution_id="e2", epoch=4)
    seen = after(
        [
            reading(0, 7, listed=False, driven=[RUN]),
            reading(2, 8, listed=False, driven=[RUN]),
            reading(4, 9, listed=False, driven=[later]),
            reading(6, 10, listed=False, driven=[later]),
        ]
    )
    assert forgotten(seen) == []


def test_after_a_gap_nothing_is_forgotten_either() -> None:
    seen = after([reading(0, 7, listed=False, driven=[RUN]), reading(2, 8, listed=False, driven=[RUN])])
    assert forgotten(after([reading(20, 9, listed=False, driven=[RUN])], seen)) == []
