"""The life of an execution as tables: which state may follow which, what an ending means, what a takeover does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Final

from services.pool.rows import CommandOutcome, ExecutionState, Finished, Outcome

_PENDING, _RUNNING, _WAITING = ExecutionState.PENDING, ExecutionState.RUNNING, ExecutionState.WAITING
_STOPPING, _TERMINAL = ExecutionState.STOPPING, ExecutionState.TERMINAL

# How often an execution is tried to start before it fails.
MAX_TRIES = 3

TRANSITIONS: Final[Mapping[ExecutionState, frozenset[ExecutionState]]] = {
    _PENDING: frozenset({_RUNNING, _STOPPING, _TERMINAL}),
    _RUNNING: frozenset({_WAITING, _STOPPING, _TERMINAL}),
    _WAITING: frozenset({_RUNNING, _STOPPING, _TERMINAL}),
    _STOPPING: frozenset({_TERMINAL}),
    _TERMINAL: frozenset(),
}

ENDING_TYPES: Final[Mapping[str, Outcome]] = {
    "execution.completed": Outcome.COMPLETED,
    "execution.paused": Outcome.PAUSED,
    "execution.stopped": Outcome.STOPPED,
    "execution.failed": Outcome.FAILED,
    "execution.lost": Outcome.LOST,
}


def leading_to(after: ExecutionState) -> list[ExecutionState]:
    """The states from which an execution may come into `after`."""
    return [before for before, following in TRANSITIONS.items() if after in following]


@dataclasses.dataclass(frozen=True, slots=True)
class Winner:
    """The ending that closed an execution in the log: the one that counts, whoever wrote it.

    `sequence` is 0 when history would not take any ending and the pool closes the execution alone. `code` is the reason
    of a failure, as far as it is known.
    """

    event_id: str
    type: str
    epoch: int
    sequence: int
    code: str = ""

    @property
    def outcome(self) -> Outcome:
        """What the ending says."""
        return ENDING_TYPES[self.type]


class Queue(Enum):
    """What an ending does with the inputs that wait."""

    PROMOTE = "PROMOTE"
    # The one that waits for the cancel.
    STEER = "STEER"
    WAIT = "WAIT"
    PAUSE = "PAUSE"


_CANCEL: Final[Mapping[Outcome, CommandOutcome]] = {
    Outcome.COMPLETED: CommandOutcome.NOT_RUNNING,
    Outcome.PAUSED: CommandOutcome.NOT_RUNNING,
    Outcome.STOPPED: CommandOutcome.STOPPED,
    Outcome.FAILED: CommandOutcome.NOT_RUNNING,
    Outcome.LOST: CommandOutcome.LOST,
}


def cancel_outcome(outcome: Outcome) -> CommandOutcome:
    """What came of a cancel that was still open when its execution ended."""
    return _CANCEL[outcome]


def queue_after(outcome: Outcome, *, paused: bool, cancelled: bool = False, steered: bool = False) -> Queue:
    """What an ending does with the queue. One that a Stop paused stays so whichever ending won.

    `cancelled`: a cancel of the execution was open; `steered`: an input waited for that one. A queue that is not paused
    although a cancel was open was resumed since, or only had to make way for an input.
    """
    if steered and outcome is not Outcome.LOST:
        return Queue.STEER
    match outcome:
        case Outcome.COMPLETED:
            return Queue.WAIT if paused else Queue.PROMOTE
        case Outcome.PAUSED:
            return Queue.PAUSE if cancelled else Queue.WAIT
        case Outcome.STOPPED:
            return Queue.PROMOTE if cancelled and not paused else Queue.PAUSE
        case Outcome.FAILED | Outcome.LOST:
            return Queue.PAUSE


def finished_by(
    outcome: Outcome,
    *,
    prompted: Finished | None,
    before: Finished | None,
    cut_off: bool = False,
) -> Finished | None:
    """What a later `session/load` may be asked for, after an ending.

    `prompted` is what this execution was given to, None when it never got so far; `before` is what stood until now.
    `cut_off`: its agent was ended in the middle, and may not have kept what it was told. A turn that failed may have
    spoiled the agent's own record of it, and one that was lost, or cut off, in another session than the last finished
    one left that record behind: then the transcript is the truth.
    """
    if prompted is None:
        return before
    match outcome:
        case Outcome.COMPLETED | Outcome.PAUSED:
            return prompted
        case Outcome.STOPPED if not cut_off:
            return prompted
        case Outcome.STOPPED | Outcome.LOST:
            same = before is not None and (before.agent, before.session_id) == (prompted.agent, prompted.session_id)
            return before if same else None
        case Outcome.FAILED:
            return None


class Takeover(Enum):
    """What is done with an execution whose driver is gone."""

    DRIVE_AGAIN = "DRIVE_AGAIN"
    FAIL_START = "FAIL_START"
    LOSE = "LOSE"
    STOP = "STOP"
    PAUSE = "PAUSE"
    # Its ending is in the outbox already; only that is to be sent.
    AWAIT_ENDING = "AWAIT_ENDING"
    NOTHING = "NOTHING"


def takeover(state: ExecutionState, *, tries: int, ending: bool) -> Takeover:
    """What a takeover does with an execution in `state` that was tried `tries` times; `ending` = the pool ends it."""
    if ending and state is not _TERMINAL:
        return Takeover.AWAIT_ENDING
    match state:
        case ExecutionState.TERMINAL:
            return Takeover.NOTHING
        case ExecutionState.PENDING:
            return Takeover.DRIVE_AGAIN if tries < MAX_TRIES else Takeover.FAIL_START
        case ExecutionState.RUNNING:
            return Takeover.LOSE
        case ExecutionState.STOPPING:
            return Takeover.STOP
        case ExecutionState.WAITING:
            return Takeover.PAUSE
