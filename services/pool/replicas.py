"""This process among the replicas of the pool: it beats, watches the beats of others, and takes over from the dead.

Each replica decides by itself who is dead, from its own readings (`observing`). Taking over is a compare-and-set on
what was read: of several that come to it one wins, and one that was given up by mistake finds out at its next beat.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from hearth.pool.v1 import replica_service_pb2, replica_service_pb2_grpc
from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.chassis.errors import Unavailable, as_hearth_error
from services.chassis.fields import uuid_text
from services.chassis.interceptors import Context
from services.pool import runners
from services.pool.observing import BeatLimits, Driven, Reading, Seen, dead, forgotten, observe
from services.pool.replica_rows import ReplicaRows
from services.pool.requests import key_of
from services.pool.rows import Execution, Key
from services.pool.runners import Reason, Receipt
from services.pool.store import Store
from services.pool.trust import Trust
from services.pool.turns.recovery import Recovery

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "replica.condemned")

# A beat that takes longer than this has not landed.
_BEAT_SECONDS = 5.0
_LEAVE_SECONDS = 1.0
# Executions of a dead replica that are taken over at the same time.
_TAKEN_AT_ONCE = 4


class Replicas:
    """This replica. `driving` tells what it drives, `entries` how many agents it keeps; `reread` compares what it holds
    with its rows."""

    def __init__(
        self,
        rows: ReplicaRows,
        trust: Trust,
        clock: Clock,
        holder: str,
        address: str,
        *,
        every: float,
        every_failing: float,
        trusted_for: float,
        driving: Callable[[], Iterable[Key]],
        entries: Callable[[], int],
        reread: Callable[[], Awaitable[None]],
    ) -> None:
        self._rows = rows
        self._trust = trust
        self._clock = clock
        self.holder = holder
        self.address = address
        self.place = here()
        self._every = every
        self._every_failing = every_failing
        self._trusted_for = trusted_for
        self._driving = driving
        self._entries = entries
        self._reread = reread
        self._beats = 0
        self._landed_at: float | None = None
        self._failing = False
        self._left = False
        self.draining = False

    async def register(self) -> None:
        """Say that this replica is there."""
        began = self._clock.monotonic()
        self._beats += 1
        await self._rows.register(self.holder, self.address, self.place, self._beats)
        self._landed(began)

    async def beat(self) -> None:
        """Say once that this replica lives, and what it does.

        After a time in which it may have been given up, what it holds is compared with its rows before it is trusted.
        """
        began = self._clock.monotonic()
        self._beats += 1
        driving = list(self._driving())
        async with asyncio.timeout(_BEAT_SECONDS):
            known = await self._rows.beat(
                self.holder, self._beats, draining=self.draining, driving=driving, entries=self._entries()
            )
        if self._left:
            return
        if not known:
            logger.error("this replica was given up by another one", extra={"holder": self.holder})
            await self._rows.register(self.holder, self.address, self.place, self._beats)
        if not known or self._doubtful(began):
            logger.warning("beats land again, reading what is still held", extra={"holder": self.holder})
            await self._reread()
        self._landed(began)

    async def keep_beating(self) -> None:
        """Beat until the process ends; more often while beats do not land."""
        while True:
            landed = await self._tried()
            await self._clock.sleep(self._every if landed else self._every_failing)

    async def drain(self) -> None:
        """Say that this replica takes nothing new, at once if it can be said now."""
        self.draining = True
        await self._tried()

    async def leave(self) -> None:
        """Say that this replica is no more."""
        self._left = True
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._rows.leave(self.holder)
        except Exception as error:
            if not isinstance(as_hearth_error(error), Unavailable):
                raise
            logger.warning("replica row stays", extra={"cause": type(error).__name__})

    async def _tried(self) -> bool:
        try:
            await self.beat()
        except Exception as error:
            if not isinstance(error, TimeoutError) and not isinstance(as_hearth_error(error), Unavailable):
                raise
            if not self._failing:
                logger.warning("beats do not land", extra={"cause": type(error).__name__})
            self._failing = True
        else:
            self._failing = False
        return not self._failing

    def _doubtful(self, now: float) -> bool:
        return self._landed_at is None or now - self._landed_at > self._trusted_for

    def _landed(self, at: float) -> None:
        self._landed_at = at
        self._trust.landed(at)


class Observer:
    """Watches the other replicas, and takes over what a dead one drove or a living one has forgotten.

    Taking over may have to wait, for the locks of a frozen process most of all: `spawn` lets it, and looks go on.
    """

    def __init__(
        self,
        rows: ReplicaRows,
        store: Store,
        recovery: Recovery,
        clock: Clock,
        *,
        holder: str,
        limits: BeatLimits,
        spawn: Callable[[str, Coroutine[Any, Any, None]], object],
    ) -> None:
        self._rows = rows
        self._store = store
        self._spawn = spawn
        self._recovery = recovery
        self._clock = clock
        self._holder = holder
        self._limits = limits
        self._seen = Seen()
        # Holders and executions that are being taken over.
        self._taking: set[str] = set()
        # Living replicas with a smaller id: work that one of them is enough for is left to the first.
        self._before: set[str] = set()

    @property
    def first(self) -> bool:
        """Whether this replica does what one of them is enough for; of no consequence when two believe it."""
        return not self._before

    async def replaced(self, place: str, address: str) -> None:
        """Take over from processes that listened where this one does now: a port that could be bound was theirs."""
        if place:
            for holder, beats in (await self._rows.in_place(place, address, self._holder)).items():
                if await self._rows.condemn(holder, beats):
                    await self._bury(holder, beats)

    async def look(self) -> None:
        """Read everything once, and act on what has been seen by now."""
        began = self._clock.monotonic()
        driven = await self._rows.driven(self._holder)
        beats = await self._rows.beats(self._holder)
        reading = Reading(began, self._clock.monotonic(), beats, driven)
        self._seen = observe(self._seen, reading, self._limits)
        gone = dead(self._seen, self._limits)
        self._before = {holder for holder in beats if holder < self._holder and holder not in gone}
        for holder, counter in gone.items():
            # Without a row: it left, or whoever gave it up did not get to the end of it.
            if counter is None or await self._rows.condemn(holder, counter):
                self._begin(holder, self._bury(holder, counter))
        for one in forgotten(self._seen):
            self._begin(one.execution_id, self._take_forgotten(one))

    def _begin(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        if what in self._taking:
            work.close()
            return
        self._taking.add(what)

        async def take() -> None:
            try:
                await work
            finally:
                self._taking.discard(what)

        self._spawn(f"take over {what}", take())

    async def _bury(self, holder: str, beats: int | None) -> None:
        crashpoint("replica.condemned")
        executions = await self._store.driven_by(holder)
        logger.error("replica is dead", extra={"holder": holder, "beats": beats, "executions": len(executions)})
        turns = asyncio.Semaphore(_TAKEN_AT_ONCE)

        async def take(execution: Execution) -> None:
            async with turns:
                await self._recovery.take_over(execution, why="the pool process that drove it is gone")

        await asyncio.gather(*(take(execution) for execution in executions))
        while await self._rows.release_held(holder):
            pass

    async def _take_forgotten(self, one: Driven) -> None:
        execution = await self._store.execution(one.key, one.execution_id)
        if execution is not None and (execution.driver, execution.epoch) == (one.driver, one.epoch):
            await self._recovery.take_over(execution, why="the pool process that picked it up does not drive it")


class ReplicaService(replica_service_pb2_grpc.ReplicaServiceServicer):
    """What other replicas call. `nudged` is the runner of this process."""

    def __init__(self, holder: str, *, nudged: Callable[[Key, int, Reason], Receipt]) -> None:
        self._holder = holder
        self._nudged = nudged

    async def Nudge(
        self, request: replica_service_pb2.NudgeRequest, context: Context
    ) -> replica_service_pb2.NudgeResponse:
        """Look at the rows of a session, if this is the replica that is meant."""
        key = key_of(request.session)
        if uuid_text("holder", request.holder) != self._holder:
            return runners.message(Receipt.NOT_HELD)
        return runners.message(self._nudged(key, request.epoch, request.reason))


def here() -> str:
    """What no two network places share as long as both exist: with it, who binds a port knows whose it was.

    Empty where the system does not say; then nobody is known by its place.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
