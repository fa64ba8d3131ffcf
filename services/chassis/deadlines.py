"""How much time the call being served has left, so that what it calls is not allowed more."""

from __future__ import annotations

import asyncio
import time
import weakref
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Incoming:
    # The context that this is kept in belongs to the task: a circle of each call otherwise.
    task: weakref.ref[asyncio.Task[object]]
    ends: float


_incoming: ContextVar[_Incoming | None] = ContextVar("incoming_deadline", default=None)


def serve_until(seconds: float | None) -> None:
    """The running task serves a call that ends in `seconds`; None = a call without deadline."""
    task = asyncio.current_task()
    if seconds is None or task is None:
        _incoming.set(None)
    else:
        _incoming.set(_Incoming(weakref.ref(task), time.monotonic() + seconds))


def remaining() -> float | None:
    """Seconds left of the call that *this task* serves, never negative; None without such a bound.

    A task that the handler started inherits its context but not its deadline: background work that the call only set
    off must outlive it, and work that the handler waits for is cancelled with the handler anyway.
    """
    found, task = _incoming.get(), asyncio.current_task()
    if found is None or task is None or found.task() is not task:
        return None
    return max(0.0, found.ends - time.monotonic())


def bounded(timeout: float | None) -> float | None:
    """The shorter of `timeout` and what is left of the call being served."""
    left = remaining()
    if left is None:
        return timeout
    return left if timeout is None else min(timeout, left)
