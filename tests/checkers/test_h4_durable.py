"""The checker of H4 sees red: an acknowledged event that is lost, elsewhere, or other than it was sent."""

from __future__ import annotations

import pytest

from hearth.history.v1 import history_pb2
from tests.checkers.h4_durable import check
from tests.checkers.pieces import KEY, event, events_from, run, sent, stored
from tests.support.recording import Append, Reader

DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
LOG = stored(event(1), event(2))


def later(number: int) -> Append:
    """The same content, made at another time."""
    found = event(number)
    found.occurred_at.FromSeconds(5)
    return sent(found, 9, outcome=DUPLICATE, sequence=number)


def test_a_sound_run_passes() -> None:
    unanswered = Append(KEY, event(7), 3, 3)
    conflict = sent(event(1, entity_id="x"), 5, outcome=history_pb2.APPEND_OUTCOME_CONFLICT)
    verdict = check(run([sent(event(1), sequence=1), later(2), unanswered, conflict], LOG))
    assert (verdict.wrong, verdict.checked) == ([], 2)
    # What was trimmed cannot be looked at.
    assert check(run([sent(event(1), sequence=1)], stored(event(2), first=2))).wrong == []


@pytest.mark.parametrize(
    "append",
    [
        sent(event(3), sequence=3),
        sent(event(1), sequence=2),
        sent(event(3), sequence=1),
        sent(event(1, entity_id="x"), sequence=1),
        sent(event(1, entity_id="x"), outcome=DUPLICATE, sequence=1),
        sent(event(1), outcome=DUPLICATE, sequence=2),
        sent(later(1).event, sequence=1),
    ],
)
def test_what_was_acknowledged_and_is_not_there_is_seen(append: Append) -> None:
    assert check(run([append], LOG)).wrong


def test_what_was_shown_and_is_not_there_is_seen() -> None:
    recording = run(log=LOG)
    recording.readers = [Reader(KEY, [events_from(0, 1, 2, 3)])]
    assert check(recording).wrong


def test_a_log_that_is_empty_after_all_is_seen() -> None:
    assert check(run([sent(event(1), sequence=1)])).wrong
