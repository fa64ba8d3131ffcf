"""The checker of H7 sees red: stale output that is stored, fenced output that is gone, frames that got through."""

from __future__ import annotations

import pytest

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.h7_fenced import check
from tests.checkers.pieces import (
    KEY,
    OTHER,
    RUN,
    ending,
    event,
    frame,
    from_start,
    message,
    ready,
    run,
    sent,
    shown,
    stored,
    text_frame,
)
from tests.support.recording import Publish, Reader, Recording

QUARANTINED = history_pb2.APPEND_OUTCOME_QUARANTINED
DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
STARTED = event(1, "execution.started")
NEXT = event(2, "execution.started", execution_id=OTHER, epoch=2)
LATE = message(7)
LOG = stored(STARTED, NEXT)


def test_a_sound_run_passes() -> None:
    appends = [
        sent(LATE, outcome=QUARANTINED, reason="STALE_EPOCH", current_epoch=2),
        sent(LATE, 3, outcome=DUPLICATE, reason="STALE_EPOCH", current_epoch=2),
    ]
    verdict = check(run(appends, LOG, aside=[(LATE, "STALE_EPOCH")]))
    assert verdict.wrong == []
    assert verdict.checked > 6
    ended = stored(STARTED, ending(2))
    assert check(run(log=ended, aside=[(message(3, epoch=9), "EXECUTION_ENDED")])).wrong == []
    taken = message(3, execution_id=OTHER)
    assert check(run(log=stored(STARTED), aside=[(taken, "EPOCH_TAKEN")])).wrong == []


@pytest.mark.parametrize(
    "events", [[STARTED, NEXT, LATE], [STARTED, event(2, "execution.started", execution_id=OTHER)]]
)
def test_output_of_a_superseded_epoch_is_seen(events: list[event_pb2.Event]) -> None:
    assert check(Recording.of_log(stored(*events))).wrong
    shows = [shown(found, sequence) for sequence, found in enumerate(events, 1)]
    assert check(Recording.of_reader([from_start(*shows)])).wrong


@pytest.mark.parametrize(
    ("event_aside", "reason"),
    [
        (LATE, "EXECUTION_ENDED"),
        (message(7, execution_id=OTHER, epoch=2), "STALE_EPOCH"),
        (message(7, execution_id=OTHER, epoch=2), "EPOCH_TAKEN"),
        (LATE, ""),
        (LATE, "BAD_LUCK"),
    ],
)
def test_what_was_put_aside_for_nothing_is_seen(event_aside: event_pb2.Event, reason: str) -> None:
    assert check(run(log=LOG, aside=[(event_aside, reason)])).wrong


def test_what_is_aside_and_in_the_log_or_twice_is_seen() -> None:
    assert check(run(log=LOG, aside=[(STARTED, "STALE_EPOCH")])).wrong
    assert check(run(log=LOG, aside=[(LATE, "STALE_EPOCH")] * 2)).wrong


@pytest.mark.parametrize("outcome", [QUARANTINED, DUPLICATE])
def test_what_was_fenced_and_not_kept_is_seen(outcome: history_pb2.AppendOutcome.ValueType) -> None:
    assert check(run([sent(LATE, outcome=outcome, reason="STALE_EPOCH", current_epoch=2)], LOG)).wrong


def test_an_answer_with_another_reason_or_a_low_epoch_is_seen() -> None:
    aside = [(LATE, "STALE_EPOCH")]
    for reason, epoch in (("EPOCH_TAKEN", 2), ("STALE_EPOCH", 0)):
        append = sent(LATE, outcome=QUARANTINED, reason=reason, current_epoch=epoch)
        assert check(run([append], LOG, aside=aside)).wrong


@pytest.mark.parametrize("known", [NEXT, event(2, "execution.started", execution_id=OTHER), ending(2)])
def test_a_stale_writer_that_a_flush_let_in_is_seen(known: event_pb2.Event) -> None:
    taken = relay_pb2.PublishResult(outcome=relay_pb2.PUBLISH_OUTCOME_ACCEPTED)
    recording = run([sent(known, 1, 2, sequence=2)])
    recording.publishes = [Publish(KEY, RUN, 1, [text_frame(0)], taken, began=5)]
    assert not check(recording).wrong
    recording.flushes = [(1, 2)]
    assert not check(recording).wrong
    recording.flushes = [(3, 4), (7, 8)]
    assert check(recording).wrong
    recording.publishes[0].began = 4
    assert not check(recording).wrong


@pytest.mark.parametrize("taken_before", [False, True])
def test_a_fenced_frame_that_was_delivered_is_seen(taken_before: bool) -> None:
    fenced = relay_pb2.PublishResult(outcome=relay_pb2.PUBLISH_OUTCOME_FENCED)
    recording = Recording(readers=[Reader(KEY, [from_start(ready(0), shown(STARTED, 1), frame(0))])])
    recording.publishes = [Publish(KEY, RUN, 1, [text_frame(0)], fenced)]
    if taken_before:
        recording.publishes.append(Publish(KEY, RUN, 1, [text_frame(0)]))
    assert bool(check(recording).wrong) is not taken_before
