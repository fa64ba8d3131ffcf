"""Background work of a process: named, owned, ended at shutdown, and never lost in silence."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.chassis.clock import Clock, SystemClock
from services.chassis.errors import Unavailable, as_hearth_error

logger = logging.getLogger(__name__)


class Tasks:
    """The background tasks of one process.

    A task runs outside of the call that started it: not bound by its deadline, not part of its trace, not cancelled
    with it. Give `context` to carry some of that on.
    """

    def __init__(self, on_death: Callable[[str], None]) -> None:
        """`on_death` is told the name of a critical task that ended by an error."""
        self._on_death = on_death
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self,
        name: str,
        work: Coroutine[Any, Any, Any],
        *,
        critical: bool = True,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """Run `work` until it returns or the process shuts down.

        An error in it is logged with its stack; with `critical` it also ends the process, because a service that lost
        one of its loops looks well and is not.
        """
        task = asyncio.create_task(work, name=name, context=context or contextvars.Context())
        self._running.add(task)
        task.add_done_callback(lambda done: self._ended(done, critical=critical))
        return task

    def repeat(
        self, name: str, work: Callable[[], Awaitable[object]], *, every: float, clock: Clock | None = None
    ) -> asyncio.Task[Any]:
        """Call `work` now and again `every` seconds after it returned, until the process shuts down.

        A round that fails because a dependency is away is logged and the next one tries again; any other error is a
        defect and ends the process, as in `start`.
        """
        return self.start(name, _rounds(name, work, every, clock or SystemClock()))

    @property
    def names(self) -> list[str]:
        """Names of the tasks that run now."""
        return sorted(task.get_name() for task in self._running)

    async def stop(self) -> None:
        """Cancel every task and wait until each has ended."""
        while self._running:
            ending = list(self._running)
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
            self._running.difference_update(ending)

    def _ended(self, task: asyncio.Task[Any], *, critical: bool) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        logger.error("background task died", exc_info=error, extra={"task": task.get_name(), "critical": critical})
        if critical:
            self._on_death(task.get_name())


async def _rounds(name: str, work: Callable[[], Awaitable[object]], every: float, clock: Clock) -> None:
    away = False
    while True:
        try:
            await work()
            if away:
                logger.info("background task goes on", extra={"task": name})
            away = False
        except Exception as error:
            if not isinstance(as_hearth_error(error), Unavailable):
                raise
            if not away:
                logger.warning("background task waits", extra={"task": name, "cause": type(error).__name__})
            away = True
        await clock.sleep(every)
