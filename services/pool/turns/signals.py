"""What a turn is told from outside while it runs, and a way to wait for that beside the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Signals:
    """`stopping`: a Stop was accepted. `taken`: the rows say that the pool, or another driver, ends the execution;
    `fenced`: under a higher epoch. `gone`: its sandbox is, or its agent, and `loss` says how. `answered`: people
    decided something that it waits for. `leaving`: the process ends soon, and waits for nobody; `shut_down`: it ends
    now."""

    def __init__(self) -> None:
        self.stopping = False
        self.taken = False
        self.fenced = False
        self.gone = False
        self.answered = False
        self.leaving = False
        self.shut_down = False
        # A name of `hearth.types.v1.Reason`, and words for people.
        self.loss = ("HARNESS_UNREACHABLE", "the sandbox is gone")
        self._changed = asyncio.Event()

    def raise_(
        self,
        *,
        stopping: bool = False,
        taken: bool = False,
        fenced: bool = False,
        gone: bool = False,
        answered: bool = False,
        leaving: bool = False,
        shut_down: bool = False,
    ) -> None:
        """Set what is true now. Only `gone` and `answered` can be taken back."""
        before = self._all()
        self.stopping |= stopping
        self.taken |= taken
        self.fenced |= fenced
        self.gone |= gone
        self.answered |= answered
        self.leaving |= leaving or shut_down
        self.shut_down |= shut_down
        if self._all() != before:
            self._changed.set()

    def lose(self, code: str, message: str) -> None:
        """What the agent ran in is gone, or the agent itself; the first reason stands."""
        if not self.gone:
            self.loss = (code, message)
            self.raise_(gone=True)

    def found_again(self) -> None:
        """What was gone has been replaced, before the agent was asked."""
        self.gone = False

    def answers_taken(self) -> None:
        """What people decided so far is being looked at."""
        self.answered = False

    @property
    def over(self) -> bool:
        """Whether something was told after which nothing new may begin."""
        return self.stopping or self.taken or self.fenced or self.gone or self.shut_down

    async def next(self) -> None:
        """Wait until something is told that was not told before the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _all(self) -> tuple[bool, ...]:
        return (
            self.stopping,
            self.taken,
            self.fenced,
            self.gone,
            self.answered,
            self.leaving,
            self.shut_down,
        )


async def together(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all of them; the first error ends the others, waits for their end, and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(*tasks)


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of them is done, or `timeout` seconds; none is cancelled."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for it; its outcome is nobody's any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(seconds: float, work: Awaitable[_T]) -> bool:
    """Whether `work` ends in time; it is not cancelled when it does not, and its error is raised when it does."""
    future = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([future], timeout=seconds)
    if done:
        future.result()
    return bool(done)
