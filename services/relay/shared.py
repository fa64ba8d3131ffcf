"""One piece of work for everybody who asks while it has not begun, and one question for all who want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from services.chassis.errors import HearthError, Unavailable
from services.chassis.tasks import Tasks

_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")


class Shared(Generic[_T]):
    """Runs `work` for callers together: each gets the result of a run that began after it asked.

    At most one run is under way; whoever asks meanwhile waits for the next one.
    """

    __slots__ = (
        "_name",
        "_next",
        "_running",
        "_tasks",
        "_work",
    )

    def __init__(self, name: str, work: Callable[[], Awaitable[_T]], tasks: Tasks) -> None:
        self._name = name
        self._work = work
        self._tasks = tasks
        self._next: asyncio.Future[_T] | None = None
        self._running: asyncio.Task[None] | None = None

    async def next(self) -> _T:
        """The result of the next run. Raises the `HearthError` it failed with."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if self._running is None:
                self._running = self._tasks.start(self._name, self._run(), critical=False)
                self._running.add_done_callback(self._ended)
        # A caller that gives up must not take the run from the others.
        return await asyncio.shield(self._next)

    def close(self) -> None:
        """Run no more; who waits is refused."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        asked: asyncio.Future[_T] | None = None
        try:
            while (asked := self._next) is not None:
                self._next = None
                try:
                    asked.set_result(await self._work())
                except HearthError as error:
                    _fail(asked, error)
        finally:
            self._over(asked)

    def _ended(self, run: asyncio.Task[None]) -> None:
        # One that is cancelled before its first step does not come to its own end.
        if self._running is run:
            self._over()

    def _over(self, asked: asyncio.Future[_T] | None = None) -> None:
        self._running = None
        for left in (asked, self._next):
            if left is not None and not left.done():
                _fail(left, Unavailable("given up; connect again", reason="STREAM_CLOSED"))
        self._next = None


class Gathered(Generic[_K, _V]):
    """Answers for single keys, asked for together: one `ask` for all keys that were wanted until it began.

    `ask` has an answer for every key that it is given.
    """

    def __init__(self, name: str, ask: Callable[[Sequence[_K]], Awaitable[Mapping[_K, _V]]], tasks: Tasks) -> None:
        self._ask = ask
        self._wanted: dict[_K, None] = {}
        self._shared = Shared(name, self._run, tasks)

    async def of(self, key: _K) -> _V:
        """The answer for `key`, asked for after this call. Raises the `HearthError` that `ask` failed with."""
        self._wanted[key] = None
        return (await self._shared.next())[key]

    async def _run(self) -> Mapping[_K, _V]:
        wanted, self._wanted = list(self._wanted), {}
        return await self._ask(wanted)


def _fail(asked: asyncio.Future[_T], error: HearthError) -> None:
    asked.set_exception(error)
    # All callers may be gone by now.
    asked.exception()
