"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import UTC, datetime, timedelta


class ManualClock:
    """Seconds from 0; `sleep` ends when `advance` has passed its end."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # The delays that were asked for.
        self.asked: list[float] = []
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (self.seconds + seconds, next(self._numbers), woken))
        await woken

    @property
    def sleeping(self) -> int:
        """How many sleep."""
        return sum(not woken.done() for _, _, woken in self._sleeping)

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, and everything that waited for one of them go on."""
        ends = self.seconds + seconds
        await settle()
        while self._sleeping and self._sleeping[0][0] <= ends:
            at, _, woken = heapq.heappop(self._sleeping)
            self.seconds = max(self.seconds, at)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.seconds = ends
        await settle()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
