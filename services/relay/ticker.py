"""When readers are written to: at once while few wait, else together at a fixed beat.

A message costs the same whether it carries one frame or fifty, so with many readers waiting a beat is what keeps up.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Flushable(Protocol):
    """Something that has news for its readers."""

    @property
    def waiting(self) -> int:
        """How many readers a flush would write to."""
        ...

    def flush(self) -> None:
        """Let the readers have what came until now."""
        ...


class Ticker:
    """Flushes what is dirty. Times are seconds."""

    def __init__(self, *, tick: float, quick: float, few: int) -> None:
        self._tick = tick
        self._quick = quick
        self._few = few
        self._dirty: dict[Flushable, None] = {}
        self._flushed = float("-inf")
        self._scheduled: asyncio.TimerHandle | None = None

    def dirty(self, hub: Flushable) -> None:
        """`hub` has news."""
        self._dirty[hub] = None
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_later(self._quick, self._due)

    def forget(self, hub: Flushable) -> None:
        """`hub` goes away."""
        self._dirty.pop(hub, None)

    def close(self) -> None:
        """Flush nothing any more."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._dirty.clear()

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        beat = self._flushed + self._tick
        if loop.time() < beat and sum(hub.waiting for hub in self._dirty) > self._few:
            self._scheduled = loop.call_at(beat, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        self._scheduled = None
        self._flushed = asyncio.get_running_loop().time()
        hubs, self._dirty = self._dirty, {}
        for hub in hubs:
            hub.flush()
