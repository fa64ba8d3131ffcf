"""The checker of H3 sees red: an event applied twice, on one connection, over several, or stored twice."""

from __future__ import annotations

import pytest

from tests.checkers.h3_once import check
from tests.checkers.pieces import event, events_from, name, shown, stored
from tests.support.recording import Connection, Recording


def test_a_sound_run_passes() -> None:
    verdict = check(Recording.of_reader([events_from(0, 1, 2), events_from(2), events_from(2, 3)]))
    assert (verdict.wrong, verdict.checked) == ([], 3)
    assert check(Recording.of_log(stored(event(1), event(2)))).wrong == []


@pytest.mark.parametrize(
    "connections",
    [
        [events_from(0, 1, 1)],
        [events_from(0, 1, 2), events_from(1, 2)],
        [events_from(0, 1, 2), events_from(0, 1)],
        [events_from(0, 2), events_from(0, 1)],
        [Connection(None, [shown(event(1), 1), shown(event(1), 2)])],
    ],
)
def test_an_event_that_comes_twice_is_seen(connections: list[Connection]) -> None:
    assert check(Recording.of_reader(connections)).wrong


def test_an_event_that_stands_twice_is_seen() -> None:
    again = event(2)
    again.event_id = name(1).upper()
    assert check(Recording.of_log(stored(event(1), again))).wrong
