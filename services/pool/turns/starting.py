"""Waiting until history has acknowledged the start of a turn."""

from __future__ import annotations

import asyncio

from services.pool.store import PickedUp
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.room import TurnFailed, TurnRoom

# How long a start waits for history before that wait no longer counts as a try.
_SHORT_WAIT = 2.0
_ASK_AGAIN = 1.0


class StartInLog:
    """The start of one execution on its way to the log. `told` is done when history has it, or did not take it."""

    def __init__(self, room: TurnRoom, picked: PickedUp, told: asyncio.Future[None]) -> None:
        self._room = room
        self._execution = picked.execution
        self._told = told

    async def acknowledged(self) -> None:
        """Wait for it; that it takes long burns no try. Raises `TurnFailed` when history's time is over."""
        room = self._room
        give_up_at = room.clock.monotonic() + room.settings.history_patience
        if await self._within(_SHORT_WAIT):
            return
        await self._count(-1)
        while not await self._within(give_up_at - room.clock.monotonic()):
            if room.clock.monotonic() >= give_up_at:
                raise TurnFailed("HISTORY_UNAVAILABLE", "history did not take the start of the turn; send it again")
        await self._count(1)

    async def _count(self, tries: int) -> None:
        room, execution = self._room, self._execution
        await until_it_lands(
            room.clock, execution.key, "tries", lambda: room.store.count_try(execution, room.holder, tries)
        )

    async def _within(self, seconds: float) -> bool:
        await asyncio.wait([self._told], timeout=max(0.0, seconds))
        if not self._told.done():
            return False
        if self._told.exception() is None:
            return True
        await self._room.clock.sleep(_ASK_AGAIN)
        self._told = self._room.outbox.told(self._execution.key)
        return False
