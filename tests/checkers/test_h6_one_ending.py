"""The checker of H6 sees red: a second ending, output behind one, none at all, a false winner, a false manifest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.h6_one_ending import check
from tests.checkers.pieces import (
    ENDED,
    KEY,
    OTHER,
    RUN,
    ending,
    event,
    events_from,
    message,
    name,
    run,
    sent,
    shown,
    stored,
)
from tests.support.recording import Append, Connection, Mark, Recording

ALREADY_ENDED = history_pb2.APPEND_OUTCOME_ALREADY_ENDED
STARTED = event(1, "execution.started")
NEXT = event(4, "execution.started", execution_id=OTHER, epoch=2)


def winner(**fields: object) -> history_pb2.Ending:
    true = history_pb2.Ending(event_id=name(3), type=ENDED, epoch=1, sequence=3)
    true.MergeFrom(history_pb2.Ending(**fields))  # type: ignore[arg-type]
    return true


def test_a_sound_run_passes() -> None:
    log = stored(STARTED, message(2), ending(3, counts=1), event(5), NEXT, ending(6, execution_id=OTHER, epoch=2))
    late = sent(ending(9), 1, outcome=ALREADY_ENDED, winner=winner())
    head = history_pb2.Head(execution_id=OTHER, ended=True)
    verdict = check(run([late], log, head=head, settled=True))
    assert verdict.wrong == []
    assert verdict.checked > 6
    assert check(run(log=stored(STARTED))).wrong == []


@pytest.mark.parametrize(
    "events",
    [
        [STARTED, ending(2), message(3)],
        [STARTED, ending(2), ending(3)],
        [STARTED, ending(2), event(3), event(4, "execution.lost")],
        [STARTED, ending(2), event(3, "execution.started", epoch=2)],
    ],
)
def test_what_follows_an_ending_is_seen(events: list[event_pb2.Event]) -> None:
    assert check(Recording.of_log(stored(*events))).wrong
    shows = [shown(found, sequence) for sequence, found in enumerate(events, 1)]
    assert check(Recording.of_reader([Connection(None, shows[:2]), Connection(None, shows[2:])])).wrong


def test_an_execution_without_an_ending_is_seen_once_all_is_settled() -> None:
    assert check(run(log=stored(STARTED, message(2)), settled=True)).wrong
    assert not check(run(log=stored(STARTED, message(2)))).wrong


@pytest.mark.parametrize("ended", [False, True])
def test_a_head_that_is_wrong_about_the_ending_is_seen(ended: bool) -> None:
    log = stored(STARTED, message(2)) if ended else stored(STARTED, ending(2))
    assert check(run(log=log, head=history_pb2.Head(execution_id=RUN, ended=ended))).wrong


def test_a_manifest_that_counts_what_is_not_there_is_seen() -> None:
    assert check(run(log=stored(STARTED, message(2), ending(3, counts=2)))).wrong
    assert check(run(log=stored(STARTED, message(2), ending(3, counts=1, epoch=2)))).wrong
    assert not check(run(log=stored(STARTED, message(2), ending(3, counts=2, incomplete=True)))).wrong


@pytest.mark.parametrize(
    "told", [winner(sequence=2), winner(event_id=name(8)), winner(type="execution.lost"), winner(epoch=2)]
)
def test_a_winner_that_does_not_stand_there_is_seen(told: history_pb2.Ending) -> None:
    log = stored(STARTED, message(2), ending(3, counts=1))
    assert check(run([sent(ending(9), outcome=ALREADY_ENDED, winner=told)], log)).wrong
    foreign = sent(ending(9, execution_id=OTHER), outcome=ALREADY_ENDED, winner=winner())
    assert check(run([foreign], log)).wrong


def marked(*answers: str, endings: Sequence[Append] = ()) -> list[str]:
    """RUN was marked again and again, from tick 10 on, and these reasons were answered; empty: it is complete."""
    recording = run(endings)
    recording.marks = [
        Mark(
            KEY,
            RUN,
            f"mark {number}",
            began=10 * number,
            answered=10 * number + 5,
            entry=history_pb2.LedgerEntry(execution_id=RUN, incomplete=bool(reason), incomplete_reason=reason),
        )
        for number, reason in enumerate(answers, 1)
    ]
    return check(recording).wrong


def test_a_mark_that_did_not_stick_is_seen() -> None:
    assert marked("mark 1", "mark 1") == []
    assert marked("lost", "lost", "lost") == []
    assert marked("")
    assert marked("mark 1", "mark 2")
    # An ending that was there before, or that says itself that something is missing, clears nothing.
    assert marked("mark 1", "mark 2", endings=[sent(ending(3), 1)])
    assert marked("mark 1", "mark 2", endings=[sent(ending(3, incomplete=True), 17)])
    assert marked("mark 1", "mark 2", endings=[sent(ending(3), 17)]) == []
    assert marked("mark 1", "mark 2", endings=[sent(ending(3, execution_id=OTHER), 17)])


def test_readers_without_runs_are_fine() -> None:
    assert check(Recording.of_reader([events_from(0, 1, 2)])).wrong == []
