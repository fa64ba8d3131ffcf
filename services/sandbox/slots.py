"""Warm slots: how many sandboxes of a provider may run without a turn.

A slot is taken before a sandbox counts as parked and given back when it is in use again or seen not to run, so those
on their way in and out are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from services.chassis import crashpoints
from services.sandbox.rows import Row
from services.sandbox.store import Store
from services.sandbox.tiers import Tier
from services.sandbox.transitions import Transitions

logger = logging.getLogger(__name__)

crashpoint = crashpoints.declare("sandbox", "park.slot_taken", "park.lost", "park.evicted")


class Slots:
    """The warm slots of all providers."""

    def __init__(self, store: Store, transitions: Transitions, tiers: Mapping[str, Tier]) -> None:
        self._store = store
        self._transitions = transitions
        self._tiers = tiers

    async def prepare(self) -> None:
        """Make the slots that the settings ask for."""
        for provider, tier in self._tiers.items():
            await self._store.ensure_slots(provider, tier.slots)

    async def park(self, row: Row) -> Row | None:
        """Park a running sandbox if a slot is free or can be made free; the row as it then is.

        The same row unchanged: there is no slot. None: somebody else changed it.
        """
        if not await self._take(row):
            return row
        crashpoint("park.slot_taken")
        parked = await self._transitions.park(row)
        if parked is None:
            crashpoint("park.lost")
            await self._store.return_slot(row.sandbox_id)
        return parked

    async def _take(self, row: Row) -> bool:
        cap = self._tiers[row.provider].slots
        if cap == 0:
            return False
        if await self._store.take_slot(row.provider, cap, row.sandbox_id):
            return True
        if not await self._evict(row.provider):
            return False
        crashpoint("park.evicted")
        return await self._store.take_slot(row.provider, cap, row.sandbox_id)

    async def _evict(self, provider: str) -> bool:
        """End the parked sandbox that was not used for the longest time and wait for it; False if none is parked.

        One that a turn takes at this moment is lost to it, and the next one is tried.
        """
        while (victim := await self._store.least_recently_parked(provider)) is not None:
            if await self._end(victim):
                return True
        return False

    async def trim(self, provider: str) -> int:
        """End what is parked beyond the cap, as after it was lowered or keeping running was switched off; how many."""
        tier = self._tiers.get(provider)
        beyond = await self._store.parked_beyond(provider, tier.slots if tier is not None else 0)
        return sum([await self._end(row) for row in beyond])

    async def _end(self, row: Row) -> bool:
        keep_disk = self._tiers[row.provider].park_stopped
        ended = await (self._transitions.stop(row) if keep_disk else self._transitions.delete(row))
        if ended is not None:
            logger.info("evicted from its warm slot", extra={"sandbox_id": row.sandbox_id})
        return ended is not None
