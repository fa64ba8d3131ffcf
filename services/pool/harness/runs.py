"""One prompt between the stream that feeds it and the turn that reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from services.pool.harness.port import HarnessError, PromptResult, Update

# What waits for the turn; beyond it the stream is not read, and the daemon keeps what comes. The real daemon keeps no
# more than 1,024 messages, so a burst is better held here.
WAITING_UPDATES = 4_096
WAITING_BYTES = 16 * 1024 * 1024
# After so many updates in a row the turn lets the rest of the process do something.
UPDATES_IN_A_ROW = 64


class AcpRun:
    """One prompt on its way: updates in order, then its end."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Update, int]] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._outcome: PromptResult | HarnessError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._outcome is not None

    async def updates(self) -> AsyncIterator[Update]:
        """See `PromptRun.updates`."""
        given = 0
        while True:
            while self._waiting:
                update, size = self._waiting.popleft()
                self._waiting_bytes -= size
                if self._has_room:
                    self._room.set()
                given += 1
                if given % UPDATES_IN_A_ROW == 0:
                    await asyncio.sleep(0)
                yield update
            if self._outcome is not None:
                break
            self._changed.clear()
            await self._changed.wait()
        if isinstance(self._outcome, HarnessError):
            raise self._outcome

    async def result(self) -> PromptResult:
        """See `PromptRun.result`."""
        while self._outcome is None:
            self._changed.clear()
            await self._changed.wait()
        if isinstance(self._outcome, HarnessError):
            raise self._outcome
        return self._outcome

    async def put(self, update: Update, size: int) -> None:
        """Hand an update of about `size` bytes over, once there is room for it."""
        while not self._room.is_set() and not self.ended:
            await self._room.wait()
        if self.ended:
            return
        self._waiting.append((update, size))
        self._waiting_bytes += size
        if not self._has_room:
            self._room.clear()
        self._changed.set()

    @property
    def _has_room(self) -> bool:
        return len(self._waiting) < WAITING_UPDATES and self._waiting_bytes < WAITING_BYTES

    def end(self, outcome: PromptResult | HarnessError) -> None:
        """Nothing more comes; the first outcome stands."""
        if self._outcome is None:
            self._outcome = outcome
            self._changed.set()
            self._room.set()
