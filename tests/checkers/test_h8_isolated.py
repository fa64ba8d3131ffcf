"""The checker of H8 sees red: a sound event refused, a malformed one taken, an answer that somebody held up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.history.v1 import history_pb2
from tests.checkers.h8_isolated import PATIENCE_SECONDS, check
from tests.checkers.pieces import event, run, sent, stored
from tests.support.recording import Append

APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
INVALID = history_pb2.APPEND_OUTCOME_INVALID


def bad(outcome: history_pb2.AppendOutcome.ValueType = INVALID) -> Append:
    return replace(sent(event(2), outcome=outcome, reason="INVALID_FIELD"), sound=False)


def slow(seconds: float) -> Append:
    return replace(sent(event(1), sequence=1), began_at=100.0, answered_at=100.0 + seconds)


def test_a_sound_run_passes() -> None:
    unknown = sent(event(3, "message.completed"), 5, outcome=INVALID, reason="UNKNOWN_EXECUTION")
    verdict = check(run([slow(1.0), bad(), unknown], stored(event(1))))
    assert verdict.wrong == []
    assert verdict.checked == 7


def test_a_sound_event_that_was_refused_is_seen() -> None:
    assert check(run([sent(event(1), outcome=INVALID, reason="INVALID_FIELD")])).wrong


def test_a_malformed_event_that_was_taken_is_seen() -> None:
    assert check(run([bad(APPENDED)])).wrong
    assert check(run([bad()], stored(event(2)))).wrong


@pytest.mark.parametrize(("begin", "end", "fine"), [(50.0, 60.0, False), (99.0, 101.0, True), (90.0, 98.0, True)])
def test_an_answer_that_was_held_up_is_seen_unless_something_was_away(begin: float, end: float, fine: bool) -> None:
    recording = run([slow(PATIENCE_SECONDS + 1)])
    assert check(recording).wrong
    recording.outages = [(begin, end)]
    assert bool(check(recording).wrong) is not fine
