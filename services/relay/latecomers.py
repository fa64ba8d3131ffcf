"""Frames for readers who come while an execution runs: what was kept, without what their events make useless."""

from __future__ import annotations

import asyncio

from services.chassis.errors import Unavailable
from services.relay.buffer import Kept, Key
from services.relay.follower import Follower, Parts
from services.relay.order import FrameIn, Order
from services.relay.shared import Shared
from services.relay.view import Snapshot, View, condense

# Frames condensed without letting others run.
_SLICE = 1000


class Latecomers:
    """Snapshots of one session. Readers that come together share the reads and the work."""

    __slots__ = (
        "_follower",
        "_reads",
    )

    def __init__(self, key: Key, parts: Parts, follower: Follower) -> None:
        self._follower = follower
        self._reads = Shared("relay read kept frames", self._read, parts.tasks)

    async def snapshot(self, order: Order, sequence: int) -> Snapshot | None:
        """The frames kept for a reader that pinned itself behind event `sequence`, at `order`, before it asked.

        None when no execution ran there or nothing is kept of it. Raises `Unavailable` when history is needed for it
        and does not answer.
        """
        view = self._follower.view
        if order.ended or view.execution != order.execution:
            return None
        reading = await self._reads.next()
        if reading is None or not (kept := reading.kept).frames:
            return None
        if kept.execution != order.execution or kept.epoch < order.epoch:
            return None
        await self._follower.complete_view()
        if view.started == 0:
            return None
        return Snapshot(kept.execution, kept.epoch, view.started, await reading.pieces(view, sequence))

    async def heal(self) -> None:
        """The bus was away: hand on what was kept meanwhile, so that fewer frames are lost."""
        try:
            reading = await self._reads.next()
        except Unavailable:
            # The last reader left meanwhile.
            return
        if reading is not None:
            self._follower.take_kept(reading.kept)

    def close(self) -> None:
        """Work no more."""
        self._reads.close()

    async def _read(self) -> _Reading | None:
        kept = await self._follower.read_kept()
        return None if kept is None else _Reading(kept)


class _Reading:
    """Kept frames as they were read once, and what became of them for readers behind the same event."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self._lock = asyncio.Lock()
        self._pieces: dict[int, list[FrameIn]] = {}

    async def pieces(self, view: View, at: int) -> list[FrameIn]:
        """The frames for readers with the events up to `at`, made once."""
        async with self._lock:
            found = self._pieces.get(at)
            if found is None:
                found = []
                for start in range(0, len(self.kept.frames), _SLICE):
                    found += condense(self.kept.frames[start : start + _SLICE], view, at)
                    await asyncio.sleep(0)
                self._pieces[at] = found
            return found
