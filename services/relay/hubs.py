"""All hubs of this process, and what keeps them honest: comparing heads, healing after the bus was away, closing."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Protocol

from redis.exceptions import RedisError

from hearth.history.v1 import history_pb2
from services.chassis.clock import Clock
from services.chassis.errors import HearthError
from services.chassis.tasks import Tasks
from services.relay.buffer import Buffer, Key
from services.relay.bus import Bus
from services.relay.follower import KEPT_SECONDS, Parts
from services.relay.hub import Hub, Member
from services.relay.log import HEADS_MAX, Log
from services.relay.metrics import Metrics
from services.relay.settings import RelaySettings
from services.relay.shared import Gathered
from services.relay.surroundings import Surroundings
from services.relay.ticker import Ticker

logger = logging.getLogger(__name__)

# Hubs that read back kept frames at the same time after the bus was away.
_HEALING = 16
# Of the shutdown time, what readers get to take their last message.
_CLOSING_SECONDS = 2.0
_LOOK_SECONDS = 1.0


class Reading(Member, Protocol):
    """A reader, as the process knows it."""

    def look(self, now: float) -> None:
        """Time passed: heartbeat, or give up on a reader that takes nothing."""
        ...

    def close(self) -> None:
        """End with `closing` as soon as it can be written."""
        ...

    def cut(self) -> None:
        """End now, though nothing can be written."""
        ...


class Hubs:
    """Makes hubs, and lets them go with their last reader."""

    def __init__(
        self,
        *,
        log: Log,
        bus: Bus,
        buffer: Buffer,
        surroundings: Surroundings,
        metrics: Metrics,
        tasks: Tasks,
        clock: Clock,
        settings: RelaySettings,
    ) -> None:
        self._log = log
        self._bus = bus
        self._surroundings = surroundings
        self._tasks = tasks
        self._clock = clock
        self._settings = settings
        self._ticker = Ticker(
            tick=settings.relay_tick, quick=settings.relay_quick_tick, few=settings.relay_quick_readers
        )
        self._buffer = buffer
        heads = Gathered("relay heads of new sessions", self._heads_of, tasks)
        written = Gathered("relay writers of new sessions", self._written, tasks)
        self._parts = Parts(
            log, heads, written, bus, buffer, self._ticker, tasks, clock, settings, metrics, self.suspect
        )
        self._hubs: dict[Key, Hub] = {}
        self._readers: dict[Reading, Hub] = {}
        # A comparison of heads is due at once, and whether it is one of all sessions. When the last one began.
        self._hurry = asyncio.Event()
        self._everybody = False
        self._compared_at = float("-inf")
        self.draining = False
        surroundings.on_change = self._wake_all
        bus.on_change = self._bus_changed

    @property
    def sessions(self) -> int:
        """How many sessions are followed."""
        return len(self._hubs)

    @property
    def readers(self) -> int:
        """How many readers there are."""
        return len(self._readers)

    def start(self) -> None:
        """Begin to watch."""
        self._tasks.start("relay heads", self._compare_for_ever())
        self._tasks.start("relay look", self._look_for_ever())

    def enter(self, reader: Reading, key: Key) -> Hub:
        """The hub of a session, with `reader` in it."""
        hub = self._hubs.get(key)
        if hub is None:
            hub = self._hubs[key] = Hub(key, self._parts)
        hub.enter(reader)
        self._readers[reader] = hub
        return hub

    def leave(self, reader: Reading) -> None:
        """`reader` is gone; so is its hub if it was the last."""
        hub = self._readers.pop(reader)
        hub.leave(reader)
        if not hub.members and self._hubs.get(hub.key) is hub:
            del self._hubs[hub.key]
            hub.close()

    async def drain(self) -> None:
        """Let every reader end with `closing`, and cut those that cannot take it. New ones are refused."""
        self.draining = True
        for reader in list(self._readers):
            reader.close()
        ends = self._clock.monotonic() + _CLOSING_SECONDS
        while self._readers and self._clock.monotonic() < ends:
            await self._clock.sleep(0.01)
        for reader in list(self._readers):
            reader.cut()

    def close(self) -> None:
        """Forget everything; no reader is left."""
        self._ticker.close()

    def _bus_changed(self) -> None:
        """The connection of the bus was lost, or is back."""
        self._surroundings.note("bus", there=self._bus.connected)
        self._everybody = True
        self._hurry.set()
        if self._bus.connected:
            self._tasks.start("relay heal", self._heal(list(self._hubs.values())), critical=False)

    async def _heal(self, hubs: Sequence[Hub]) -> None:
        gate = asyncio.Semaphore(_HEALING)

        async def heal(hub: Hub) -> None:
            async with gate:
                await hub.heal()

        await asyncio.gather(*(heal(hub) for hub in hubs))

    def suspect(self, key: Key) -> None:
        """A read of the history of a session failed: find out whether it is that session or all of it.

        At once, unless that was asked just now: what cannot be read in one session is asked for again in its turn.
        """
        hub = self._hubs.get(key)
        if hub is not None:
            hub.check_at = float("-inf")
        if self._clock.monotonic() - self._compared_at >= self._settings.relay_heads_every:
            self._hurry.set()

    def _wake_all(self) -> None:
        for reader in self._readers:
            reader.wake()

    async def _heads_of(self, keys: Sequence[Key]) -> dict[Key, history_pb2.Head]:
        return dict(zip(keys, await self._log.heads(keys), strict=True))

    async def _written(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """Which sessions may have kept frames; none while the bus does not say."""
        if self._bus.connected:
            try:
                async with asyncio.timeout(KEPT_SECONDS):
                    return await self._buffer.written(keys)
            except (RedisError, TimeoutError) as error:
                logger.warning("kept frames cannot be read", extra={"cause": type(error).__name__})
        return dict.fromkeys(keys, False)

    # --- watching ---

    async def _compare_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.relay_heads_every):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            everybody = self._everybody or bool(self._surroundings.away)
            self._everybody = False
            self._hurry.clear()
            await self._compare(everybody=everybody)

    async def _compare(self, *, everybody: bool) -> None:
        now = self._compared_at = self._clock.monotonic()
        due = [hub for hub in self._hubs.values() if everybody or hub.active or hub.check_at <= now]
        for start in range(0, len(due), HEADS_MAX):
            chunk = due[start : start + HEADS_MAX]
            asked = [hub.place for hub in chunk]
            try:
                heads = await self._log.heads([hub.key for hub in chunk])
            except HearthError:
                self._surroundings.note("history", there=False)
                return
            self._surroundings.note("history", there=True)
            for hub, head, place in zip(chunk, heads, asked, strict=True):
                # Spread, so that sessions that began together are not always asked for together.
                hub.check_at = now + self._settings.relay_heads_idle_within * random.uniform(0.5, 0.9)  # noqa: S311
                hub.compare(head, place)

    async def _look_for_ever(self) -> None:
        pause = min(_LOOK_SECONDS, self._settings.relay_heartbeat / 4, self._settings.relay_slow_reader / 4)
        while True:
            await self._clock.sleep(pause)
            now = self._clock.monotonic()
            for reader in list(self._readers):
                reader.look(now)
            for hub in self._hubs.values():
                hub.trim()
