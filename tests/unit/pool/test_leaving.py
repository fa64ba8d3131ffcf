"""What becomes of an agent that is not kept."""

from __future__ import annotations

from itertools import product

import pytest

from hearth.sandbox.v1 import sandbox_pb2
from services.pool.harness.assembler import TurnEnd
from services.pool.turns.leaving import may_still_work, release_reason
from services.pool.turns.pausing import Why
from services.pool.turns.verdicts import Kind, Verdict

BOTH = (False, True)


@pytest.mark.parametrize(
    ("paused", "reason"),
    [(Why.WINDOW, "IDLE_EXPIRED"), (Why.ROOM, "CAPACITY"), (Why.LEAVING, "SHUTDOWN_IDLE")],
)
def test_a_pause_says_why_whatever_else_is(paused: Why, reason: str) -> None:
    for shut_down, prompted, kept in product(BOTH, BOTH, BOTH):
        found = release_reason(paused=paused, shut_down=shut_down, prompted=prompted, kept=kept)
        assert sandbox_pb2.ReleaseReason.Name(found) == f"RELEASE_REASON_{reason}"


@pytest.mark.parametrize(
    ("shut_down", "prompted", "kept", "reason"),
    [
        (True, False, True, "SHUTDOWN_IDLE"),
        (True, False, False, "SHUTDOWN_IN_FLIGHT"),
        (True, True, True, "SHUTDOWN_IN_FLIGHT"),
        (True, True, False, "SHUTDOWN_IN_FLIGHT"),
        (False, False, True, "CONTINUITY_INVALID"),
        (False, False, False, "ABORTED"),
        (False, True, True, "FAILED_TURN"),
        (False, True, False, "FAILED_TURN"),
    ],
)
def test_without_a_pause(shut_down: bool, prompted: bool, kept: bool, reason: str) -> None:
    found = release_reason(paused=None, shut_down=shut_down, prompted=prompted, kept=kept)
    assert sandbox_pb2.ReleaseReason.Name(found) == f"RELEASE_REASON_{reason}"


@pytest.mark.parametrize(
    ("kind", "reason", "answered", "prompted", "expected"),
    [
        (Kind.STOPPED, "user", False, True, True),
        (Kind.FAILED, "AGENT_PROTOCOL", False, True, True),
        (Kind.FAILED, "RUN_DEFECT", False, True, True),
        (Kind.STOPPED, "user", True, True, False),
        (Kind.STOPPED, "user", False, False, False),
        (Kind.FAILED, "TURN_LIMIT", False, True, True),
        (Kind.FAILED, "TURN_LIMIT", False, False, False),
        (Kind.FAILED, "AGENT_EXITED", False, True, False),
        (Kind.COMPLETED, "end_turn", True, True, False),
    ],
)
def test_who_may_still_work(kind: Kind, reason: str, answered: bool, prompted: bool, expected: bool) -> None:
    found = Verdict(kind, reason, TurnEnd.END, answered)
    assert may_still_work(found, prompted=prompted) is expected
