"""What becomes of a request, decided from what stands beside the locked session row."""

from __future__ import annotations

import dataclasses
from enum import Enum

from services.chassis.errors import AlreadyExists, FailedPrecondition, HearthError, ResourceExhausted
from services.pool.rows import Command, Execution, Input, Request, Session, View


class OnBusy(Enum):
    """What the sender of an input wants when an execution is under way."""

    QUEUE = "QUEUE"
    REJECT = "REJECT"
    STEER = "STEER"


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """It runs now, under the next epoch. `resumes`: it wakes a paused queue. `unasks`: what a paused execution still
    asks people is closed first."""

    resumes: bool
    unasks: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Enqueue:
    """It waits at `rank`, counted from 1; with `first` it is put before all others."""

    rank: int
    first: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Steer:
    """It waits before all others for a cancel of `execution`: for `cancel`, which is open, or for one that is made."""

    execution: Execution
    cancel: Command | None


@dataclasses.dataclass(frozen=True, slots=True)
class Steering:
    """It waits for `cancel` already."""

    cancel: Command


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """The request was accepted before; the answer is the present state of what it made."""

    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """It is refused, and nothing is stored."""

    error: HearthError


def repeated(session: Session, view: View, method: str, fingerprint: bytes) -> Repeat | Refuse | None:
    """Whether the request id of `view` was used before, and may be; None when it is a new one."""
    if session.deleted_at is not None:
        return Refuse(deleted(session))
    if view.request is None:
        return None
    if view.request.method != method or view.request.fingerprint != fingerprint:
        return Refuse(
            AlreadyExists(
                "request_id was used before in this session for another request; use a new one",
                reason="REQUEST_ID_REUSED",
                metadata={"method": view.request.method},
            )
        )
    return Repeat(view.request)


def send_input(
    session: Session,
    view: View,
    fingerprint: bytes,
    on_busy: OnBusy,
    *,
    queue_cap: int,
    cancel: Command | None = None,
    meant: str = "",
) -> Start | Enqueue | Steer | Repeat | Refuse:
    """What becomes of a SendInput. For one that steers: `cancel` is the open one of what runs, `meant` the execution
    that is to make way for it, empty if that is whichever runs."""
    known = repeated(session, view, "SendInput", fingerprint)
    if known is not None:
        return known
    steers = on_busy is OnBusy.STEER
    if view.active is None and (view.open_gates == 0 or steers):
        return Start(resumes=session.queue_paused and view.queued > 0, unasks=view.open_gates > 0)
    if on_busy is OnBusy.REJECT:
        return Refuse(_busy(view.active))
    if view.queued >= queue_cap:
        return Refuse(
            ResourceExhausted(
                f"{view.queued} inputs wait in this session, which is the most; remove one or wait",
                reason="QUEUE_FULL",
                metadata={"queued": str(view.queued)},
            )
        )
    if steers and view.active is not None:
        return _steer(view.active, view.queued, cancel, meant)
    return Enqueue(view.queued + 1)


def _steer(active: Execution, queued: int, cancel: Command | None, meant: str) -> Enqueue | Steer:
    if meant and meant != active.execution_id:
        # Its sender cannot have meant what runs by now: that ends by itself, and then this is next.
        return Enqueue(1, first=True)
    if cancel is not None and cancel.steer_input_id is not None:
        return Enqueue(queued + 1)
    return Steer(active, cancel)


def send_now(
    view: View, waiting: Input, cancel: Command | None, *, paused: bool, meant: str = ""
) -> Start | Steer | Steering | Refuse:
    """What becomes of an input that waits and is to run before all others; `cancel` and `meant` as in `send_input`."""
    if view.active is None:
        return Start(resumes=paused and view.queued > 1, unasks=view.open_gates > 0)
    if cancel is not None and cancel.steer_input_id == waiting.input_id:
        return Steering(cancel)
    if meant and meant != view.active.execution_id:
        return Refuse(mismatch(view.active))
    if cancel is not None and cancel.steer_input_id is not None:
        return Refuse(
            FailedPrecondition(
                "another input is about to run before all others; retry when it runs",
                reason="SESSION_BUSY",
                metadata={"execution_id": view.active.execution_id, "input_id": cancel.steer_input_id},
            )
        )
    return Steer(view.active, cancel)


def resume_queue(view: View) -> bool:
    """Whether the head of the queue starts when the queue is resumed."""
    return view.active is None and view.open_gates == 0 and view.queued > 0


def mismatch(current: Execution) -> HearthError:
    """The refusal to touch an execution that the caller cannot have meant."""
    return FailedPrecondition(
        "another execution runs than the one meant; look at it and decide again",
        reason="EXECUTION_MISMATCH",
        metadata={"execution_id": current.execution_id, "epoch": str(current.epoch)},
    )


def deleted(session: Session) -> HearthError:
    """The answer to everything that is asked of a deleted session."""
    return FailedPrecondition(
        "the session was deleted and its id cannot be used again",
        reason="SESSION_DELETED",
        resource=("session", str(session.key), ""),
    )


def _busy(active: Execution | None) -> HearthError:
    what = "an execution is under way" if active is not None else "the session waits for answers"
    return FailedPrecondition(
        f"{what}; retry when it has ended, or send with QUEUE",
        reason="SESSION_BUSY",
        metadata={"execution_id": active.execution_id} if active is not None else None,
    )
