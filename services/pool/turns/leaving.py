"""What becomes of an agent that is not kept: may it still be at work, and why is its sandbox given back. Pure."""

from __future__ import annotations

from typing import TypeAlias

from hearth.sandbox.v1 import sandbox_pb2
from services.pool.turns.pausing import Why
from services.pool.turns.verdicts import Kind, Verdict

Reason: TypeAlias = "sandbox_pb2.ReleaseReason.ValueType"

# Failures that say nothing about whether the agent stopped.
_STILL_AT_WORK = frozenset(
    {
        "TURN_LIMIT",
        "IDLE_LIMIT",
        "FIRST_RESPONSE_LIMIT",
        "TOOL_LIMIT",
        "HISTORY_UNAVAILABLE",
        "HARNESS_STREAM_LOST",
        "HARNESS_UNREACHABLE",
        "DAEMON_UNREACHABLE",
        # What it said could not be understood, or what understands it failed.
        "AGENT_PROTOCOL",
        "RUN_DEFECT",
    }
)

# Why the sandbox of a paused turn is given back: whatever it is, its disk is kept.
_PAUSED = {
    Why.WINDOW: sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED,
    Why.ROOM: sandbox_pb2.RELEASE_REASON_CAPACITY,
    Why.LEAVING: sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE,
}


def may_still_work(found: Verdict, *, prompted: bool) -> bool:
    """Whether an agent with this ending may go on with what it was asked."""
    if found.answered or not prompted:
        return False
    return found.kind is Kind.STOPPED or found.reason in _STILL_AT_WORK


def release_reason(*, paused: Why | None, shut_down: bool, prompted: bool, kept: bool) -> Reason:
    """Why a sandbox is given back.

    `paused`: why its turn was, if that is its ending; `shut_down`: its process ends; `prompted`: its agent was asked in
    this turn; `kept`: it was kept from a turn before.
    """
    if paused is not None:
        return _PAUSED[paused]
    if shut_down:
        idle = kept and not prompted
        return sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE if idle else sandbox_pb2.RELEASE_REASON_SHUTDOWN_IN_FLIGHT
    if not prompted:
        return sandbox_pb2.RELEASE_REASON_CONTINUITY_INVALID if kept else sandbox_pb2.RELEASE_REASON_ABORTED
    return sandbox_pb2.RELEASE_REASON_FAILED_TURN
