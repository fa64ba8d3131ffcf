"""Which processes of this service live: a dead one's work is taken over at once, not when its deadline has passed.

Each process holds an advisory lock on a connection of its own. When it dies the kernel closes the connection and
Postgres lets the lock go, whatever the process was doing. Whoever sees a worker without its lock for some seconds, by
its own clock and without a gap in its own looks, ends the deadlines of that worker; from there everything goes on as
after any deadline.

A lock proves nothing more than that. A process that is frozen, or cut off from Postgres without either side noticing,
keeps it: the deadline stays the last word. One that lives and loses its connection is taken for dead only if it cannot
take the lock again in time; then it is in the place of a worker that came too late, and loses its compare-and-sets.
"""

from __future__ import annotations

import asyncio
import logging

import asyncpg

from hearth.secret import Secret
from services.chassis.clock import Clock
from services.chassis.postgres import CONNECT_ERRORS
from services.chassis.tasks import Tasks
from services.sandbox.claims import NO_CLAIM, LeaseLimits, Leases, Reading, lapsed, observe
from services.sandbox.store import Store

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_CHECK_SECONDS = 5.0
_LOST: tuple[type[Exception], ...] = (*CONNECT_ERRORS, asyncpg.PostgresError)


class Workers:
    """This process's lock, and its look at the others."""

    def __init__(self, store: Store, dsn: Secret, clock: Clock, *, gone_after: float) -> None:
        """`gone_after`: seconds that a lock must be seen free."""
        self._store = store
        self._dsn = dsn
        self._clock = clock
        # What is watched is the same as with leases: something that only a living process keeps from standing still.
        self._limits = LeaseLimits(lease=gone_after, gap=max(5.0, 2 * gone_after))
        self._seen = Leases()
        self._holding = asyncio.Event()

    async def start(self, tasks: Tasks) -> None:
        """Hold the lock in a task of `tasks`; returns when it is held, so that no work begins without it."""
        task = tasks.start("lock of this process", self.hold())
        held = asyncio.create_task(self._holding.wait())
        await asyncio.wait({task, held}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            held.cancel()
            task.result()

    async def hold(self) -> None:
        """Hold the lock until cancelled, and take it again whenever it is lost."""
        while True:
            try:
                connection = await asyncpg.connect(self._dsn.reveal(), timeout=_CHECK_SECONDS)
            except _LOST as error:
                logger.warning("no connection for the lock of this process", extra={"cause": type(error).__name__})
                await self._clock.sleep(_RETRY_SECONDS)
                continue
            try:
                await self._hold(connection)
            except _LOST as error:
                logger.warning("the lock of this process is lost, taking it again", extra={"cause": str(error)})
                await self._clock.sleep(_RETRY_SECONDS)
            finally:
                self._holding.clear()
                connection.terminate()

    async def _hold(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        while not await self._store.hold_worker_lock(connection):
            # The server has not noticed yet that the connection before this one is gone.
            await self._clock.sleep(_RETRY_SECONDS)
        self._holding.set()
        while not lost.is_set():
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await lost.wait()
            except TimeoutError:
                # A cut connection says nothing by itself.
                await connection.fetchval("SELECT 1", timeout=_CHECK_SECONDS)

    async def look(self) -> list[str]:
        """One look at the others; the sandboxes whose worker is dead, from now on free to be taken over."""
        now = self._clock.monotonic()
        without = await self._store.workers_without_lock()
        self._seen = observe(self._seen, [Reading(worker, NO_CLAIM, 0) for worker in without], now, self._limits)
        dead = sorted(lapsed(self._seen, self._limits))
        if not dead:
            return []
        freed = await self._store.expire_workers(dead)
        logger.warning("workers are dead", extra={"workers": dead, "sandboxes": freed})
        return freed
