"""What becomes of an agent between turns: kept warm in a parked sandbox for a while, or done away with."""

from __future__ import annotations

import logging
from typing import TypeAlias

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints, telemetry
from services.chassis.clock import Clock
from services.chassis.errors import HearthError
from services.pool.harness.port import HarnessError
from services.pool.metrics import Metrics
from services.pool.rows import Key
from services.pool.settings import PoolSettings
from services.pool.turns.sandboxes import Sandboxes
from services.pool.warm.entries import Entries, Entry

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "park.releasing", "park.released", "close.agent_closed")

Reason: TypeAlias = "sandbox_pb2.ReleaseReason.ValueType"


async def close_agent(sandboxes: Sandboxes, entry: Entry, reason: Reason) -> None:
    """End an agent session and give its sandbox back: what the entries do when one is closed."""
    if entry.live is not None:
        try:
            await entry.live.harness.close()
        except HarnessError as error:
            logger.info("agent session was not closed", extra={"session": str(entry.key), "reason": error.reason})
    crashpoint("close.agent_closed")
    try:
        await sandboxes.release(entry.key, entry.claim, reason)
    except HearthError as error:
        logger.warning("sandbox was not released", extra={"session": str(entry.key), "reason": error.reason})
        if error.reason != "FENCED":
            sandboxes.release_later(entry.key, entry.claim, reason)


class Parking:
    """Parks agents that ended their turn well."""

    def __init__(
        self, entries: Entries, sandboxes: Sandboxes, settings: PoolSettings, metrics: Metrics, clock: Clock
    ) -> None:
        self._entries = entries
        self._sandboxes = sandboxes
        self._settings = settings
        self._metrics = metrics
        self._clock = clock

    async def park(self, entry: Entry, *, stopped: bool) -> None:
        """Keep a BUSY entry for the warm window of its provider; longer after a Stop of its user."""
        started = self._clock.monotonic()
        with telemetry.span("turn.park"):
            await self._park(entry, stopped=stopped)
        self._metrics.stage("park", "", self._clock.monotonic() - started)

    async def park_unused(self, key: Key) -> None:
        """Park an entry that was kept at hand for a turn that then did not come."""
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at is None and self._entries.checkout(key) is entry:
            await self.park(entry, stopped=False)

    async def _park(self, entry: Entry, *, stopped: bool) -> None:
        live = entry.live
        assert live is not None, "an agent that ended its turn is there"
        window = self._settings.warm_window(live.provider)
        if window == 0:
            await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED)
            return
        if not await self._entries.seat(entry):
            await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_CAPACITY)
            return
        reason = sandbox_pb2.RELEASE_REASON_STOPPED_WARM if stopped else sandbox_pb2.RELEASE_REASON_CLEAN_TURN
        try:
            await live.harness.park()
        except HarnessError as error:
            logger.warning("agent was not parked", extra={"session": str(entry.key), "reason": error.reason})
            await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_FAILED_TURN)
            return
        crashpoint("park.releasing")
        try:
            disposition = await self._sandboxes.release(entry.key, entry.claim, reason)
        except HearthError as error:
            logger.warning("sandbox was not parked", extra={"session": str(entry.key), "reason": error.reason})
            if error.reason == "FENCED":
                self._entries.drop(entry)
            else:
                # Whether it was parked is not known. Its disk is good, so what is left of it is stopped.
                await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED)
            return
        crashpoint("park.released")
        if disposition != sandbox_pb2.DISPOSITION_PARKED:
            # There was no place for one more, and its sandbox is stopped or gone.
            await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED)
            return
        if self._entries.keep(entry, self._settings.stop_window if stopped else window):
            return
        if entry.lost:
            self._entries.drop(entry)
        else:
            await self._entries.close(entry, sandbox_pb2.RELEASE_REASON_SESSION_INCOMPATIBLE)
