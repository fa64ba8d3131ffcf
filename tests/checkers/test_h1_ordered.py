"""The checker of H1 sees red: holes, steps back, and an order that is not the one of the commits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.history.v1 import history_pb2
from hearth.types.v1 import session_pb2
from tests.checkers.h1_ordered import check
from tests.checkers.pieces import cursor, event, events_from, run, sent, stored
from tests.support.recording import Append, Recording

DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE


def at(number: int, began: int, answered: int, sequence: int, line: str = "") -> Append:
    return replace(sent(event(number), began, answered, sequence=sequence), line=line)


def test_a_sound_run_passes() -> None:
    appends = [
        at(1, 1, 5, 1, "a"),
        at(2, 2, 6, 3, "a"),
        at(3, 3, 4, 2, "b"),
        at(4, 7, 8, 4),
        # A retry keeps the place that the event had before.
        sent(event(1), 9, outcome=DUPLICATE, sequence=1),
    ]
    recording = run(appends, stored(*(event(number) for number in (1, 3, 2, 4))))
    recording.readers += Recording.of_reader([events_from(0, 1, 2), events_from(1, 2, 3)]).readers
    verdict = check(recording)
    assert verdict.wrong == []
    assert verdict.checked > 10


@pytest.mark.parametrize("got", [(1, 3), (2, 1), (1, 1), (4, 5, 7)])
def test_a_reader_with_a_hole_or_a_step_back_is_seen(got: tuple[int, ...]) -> None:
    assert check(Recording.of_reader([events_from(0, *got)])).wrong


def test_a_log_with_a_hole_is_seen() -> None:
    items = stored(event(1), event(2), event(3))
    assert check(Recording.of_log([items[0], items[2]])).wrong


def test_a_head_that_is_not_the_end_is_seen() -> None:
    head = history_pb2.Head(head=cursor(3))
    assert check(run(log=stored(event(1), event(2)), head=head)).wrong
    assert not check(run(log=stored(event(1)), head=history_pb2.Head(head=session_pb2.Cursor(sequence=1)))).wrong


def test_what_was_sent_after_an_answer_and_stands_before_it_is_seen() -> None:
    assert check(run([at(1, 1, 2, 2), at(2, 3, 4, 1)])).wrong
    assert not check(run([at(1, 1, 3, 2), at(2, 2, 4, 1)])).wrong


def test_an_order_on_one_stream_that_was_lost_is_seen() -> None:
    assert check(run([at(1, 1, 9, 2, "a"), at(2, 2, 9, 1, "a")])).wrong
    assert not check(run([at(1, 1, 9, 2, "a"), at(2, 2, 9, 1, "b")])).wrong


def test_an_order_in_one_request_that_was_lost_is_seen() -> None:
    first, second = at(1, 1, 9, 2), at(2, 1, 9, 1)
    assert check(run([first, second])).wrong
