"""The checker of H5 sees red: retries with another result, contents that changed, conflicts that were none."""

from __future__ import annotations

import pytest

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.h5_idempotent import check
from tests.checkers.pieces import event, name, run, sent, stored
from tests.support.recording import Append

DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
CONFLICT = history_pb2.APPEND_OUTCOME_CONFLICT
QUARANTINED = history_pb2.APPEND_OUTCOME_QUARANTINED
INVALID = history_pb2.APPEND_OUTCOME_INVALID
LOG = stored(event(1))


def other(number: int = 1) -> event_pb2.Event:
    return event(number, entity_id="other")


def test_a_sound_run_passes() -> None:
    upper = event(1)
    upper.event_id = name(1).upper()
    fenced = event(5, "message.completed")
    appends = [
        sent(event(1), 1, sequence=1),
        sent(upper, 3, outcome=DUPLICATE, sequence=1),
        sent(other(), 5, outcome=CONFLICT),
        # Sent at the same time as the first: any order is right.
        sent(other(), 1, 9, outcome=CONFLICT),
        sent(fenced, 10, outcome=QUARANTINED),
        sent(fenced, 12, outcome=DUPLICATE),
        sent(event(8), 14, outcome=INVALID),
        sent(event(8), 16, outcome=INVALID),
    ]
    verdict = check(run(appends, LOG, aside=[(fenced, "STALE_EPOCH")]))
    assert verdict.wrong == []
    assert verdict.checked > 10


@pytest.mark.parametrize(
    "appends",
    [
        # Another place, as new again, as nothing.
        [sent(event(1), 1, sequence=1), sent(event(1), 3, outcome=DUPLICATE, sequence=2)],
        [sent(event(1), 1, sequence=1), sent(event(1), 3, sequence=1)],
        [sent(event(1), 1, sequence=1), sent(event(1), 3, outcome=QUARANTINED)],
        [sent(event(1), 1, sequence=1), sent(event(1), 3, outcome=CONFLICT)],
        [sent(event(1), 1, sequence=1), sent(event(1), 3, outcome=INVALID)],
        # Another content that was taken, though the first was known.
        [sent(event(1), 1, sequence=1), sent(other(), 3, outcome=DUPLICATE, sequence=1)],
        [sent(event(1), 1, sequence=1), sent(other(), 3, outcome=INVALID)],
        [sent(event(1), 1, 9, sequence=1), sent(other(), 2, 8, sequence=1)],
        # A conflict with nothing, or with what it was itself.
        [sent(event(2), 1, outcome=CONFLICT)],
        [sent(event(1), 1, outcome=CONFLICT)],
        # Taken, and something else is stored.
        [sent(other(), 1, sequence=1)],
        [sent(other(), 1, outcome=QUARANTINED)],
        [sent(event(2), 1, outcome=QUARANTINED)],
    ],
)
def test_answers_that_do_not_agree_are_seen(appends: list[Append]) -> None:
    assert check(run(appends, LOG)).wrong


def test_a_content_that_nobody_sent_is_seen() -> None:
    assert check(run([sent(event(1), sequence=1)], stored(other()))).wrong
