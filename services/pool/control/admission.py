"""What becomes of a request, decided from what stands beside the locked session row."""

from __future__ import annotations

import dataclasses
from enum import Enum

from services.chassis.errors import AlreadyExists, FailedPrecondition, HearthError, ResourceExhausted
from services.pool.rows import Execution, Request, Session, View


class OnBusy(Enum):
    """What the sender of an input wants when an execution is under way."""

    QUEUE = "QUEUE"
    REJECT = "REJECT"


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """It runs now, under the next epoch. `resumes`: it wakes a paused queue."""

    resumes: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Enqueue:
    """It waits at `rank`, counted from 1."""

    rank: int


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
    session: Session, view: View, fingerprint: bytes, on_busy: OnBusy, *, queue_cap: int
) -> Start | Enqueue | Repeat | Refuse:
    """What becomes of a SendInput."""
    known = repeated(session, view, "SendInput", fingerprint)
    if known is not None:
        return known
    if view.active is None and view.open_gates == 0:
        return Start(resumes=session.queue_paused and view.queued > 0)
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
    return Enqueue(view.queued + 1)


def resume_queue(view: View) -> bool:
    """Whether the head of the queue starts when the queue is resumed."""
    return view.active is None and view.open_gates == 0 and view.queued > 0


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
