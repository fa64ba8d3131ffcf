"""Work that must not end with the call that set it off: a cancelled caller leaves no half state behind."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from services.chassis.errors import HearthError, as_hearth_error
from services.chassis.interceptors import shutting_down
from services.chassis.tasks import Tasks

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Refused:
    """A refusal as a result: it is for the callers, and no task of ours has died."""

    error: HearthError


class Works:
    """The works that run now, at most one for each key; who asks for a running one joins it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._running: dict[Hashable, asyncio.Task[Any]] = {}

    async def join(self, name: str, key: Hashable, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of the work under `key`, started by `make` if it does not run. Cancelling this call leaves the
        work alone. Raises what the work raises."""
        task = self.start(name, key, make)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise shutting_down() from None
            raise
        if isinstance(result, _Refused):
            raise result.error
        return cast("_T", result)

    def start(self, name: str, key: Hashable, make: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Start the work under `key` unless it runs; the running task."""
        task = self._running.get(key)
        if task is None:
            # Its spans belong to the trace of the call that set it off.
            task = self._tasks.start(name, _settled(make()), critical=False, context=contextvars.copy_context())
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def drain(self) -> None:
        """Wait until the works that run now have ended."""
        running = list(self._running.values())
        if running:
            logger.info("waiting for work in progress", extra={"works": len(running)})
            await asyncio.wait(running)


async def _settled(work: Coroutine[Any, Any, _T]) -> _T | _Refused:
    try:
        return await work
    except Exception as error:
        known = as_hearth_error(error)
        if known is None:
            raise
        return _Refused(known)
