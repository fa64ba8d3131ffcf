"""What nobody did in time: found in the rows every second, and done by whoever finds it.

Every commit wakes the driver at once; these reads are for what a crash, a lost wake or another process left behind.
Deletions wait for other services, and are finished beside the rest: nothing that `look` does waits for any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from services.chassis.errors import HearthError
from services.pool.control.outbox import Outbox
from services.pool.replica_rows import ReplicaRows
from services.pool.rows import Execution, Key
from services.pool.store import Changed, Store

logger = logging.getLogger(__name__)

EVERY = 1.0
_BATCH = 500
# An execution whose holder does not pick it up, nor the replica that admitted it, seen so many times in a row.
_LEFT_AFTER = 5
# Facts of sessions that nobody drives are told by whoever committed them; that late, they were not.
_OVERDUE = 5.0
# An execution that is ours by its row and that no turn of ours runs, seen so many times in a row.
_ORPHANED_AFTER = 10
_PURGES = 10


class Drives(Protocol):
    """Who knows what is being driven here."""

    @property
    def driving(self) -> Iterable[Key]:
        """Sessions with a turn under way."""
        ...

    def drives(self, key: Key, execution_id: str) -> bool:
        """Whether a turn of this execution is under way."""
        ...


class Sweeps:
    """Each `look` finds all but the deletions, which one replica finishes (`first`). `wake` looks at a session, `take`
    starts what waits in it whoever holds it, `take_over` takes what its driver forgot, `purge` finishes a deletion,
    `expire` closes what nobody answered in time."""

    def __init__(
        self,
        store: Store,
        rows: ReplicaRows,
        outbox: Outbox,
        driver: Drives,
        holder: str,
        *,
        wake: Changed,
        take: Callable[[Key], None],
        first: Callable[[], bool],
        take_over: Callable[[Execution], Awaitable[object]],
        purge: Callable[[Key, int], Awaitable[None]],
        expire: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._rows = rows
        self._outbox = outbox
        self._driver = driver
        self._holder = holder
        self._wake = wake
        self._take = take
        self._first = first
        self._take_over = take_over
        self._purge = purge
        self._expire = expire
        self._orphaned: dict[str, int] = {}
        self._left: dict[str, int] = {}

    async def look(self) -> None:
        """One look at everything but the deletions."""
        await self._pick_up()
        for key in await self._rows.commands_here(self._holder, _BATCH):
            self._wake(key)
        for key in await self._store.unheard_gates(self._holder, _BATCH):
            self._wake(key)
        await self._expire()
        for key in await self._rows.facts_here(self._holder, _OVERDUE, _BATCH):
            self._outbox.wake(key)
        await self._repair()

    async def finish_deletions(self) -> None:
        """One look at deletions that were accepted and are not done."""
        if not self._first():
            return
        for key, epoch in await self._store.to_purge(_PURGES):
            # They may take long enough for another replica to be the first meanwhile.
            if self._first():
                await self._finish_deletion(key, epoch)

    async def _pick_up(self) -> None:
        """What waits to be driven: at once where it is ours or nobody's, after a while where its holder leaves it."""
        seen: dict[str, int] = {}
        for key, execution_id, holder in await self._rows.unpicked(_BATCH):
            if holder in {None, self._holder}:
                self._wake(key)
                continue
            times = self._left.get(execution_id, 0) + 1
            if times < _LEFT_AFTER:
                seen[execution_id] = times
                continue
            logger.warning("execution is left waiting", extra={"session": str(key), "holder": holder})
            self._take(key)
        self._left = seen

    async def _repair(self) -> None:
        """Executions of ours that no turn of ours runs: their turn ended without settling them."""
        seen: dict[str, int] = {}
        for execution in await self._store.driven_by(self._holder):
            if self._driver.drives(execution.key, execution.execution_id):
                continue
            times = self._orphaned.get(execution.execution_id, 0) + 1
            if times < _ORPHANED_AFTER:
                seen[execution.execution_id] = times
                continue
            logger.error(
                "execution without a turn", extra={"session": str(execution.key), "execution": execution.execution_id}
            )
            await self._take_over(execution)
        self._orphaned = seen

    async def _finish_deletion(self, key: Key, epoch: int) -> None:
        try:
            async with asyncio.timeout(30.0):
                await self._purge(key, epoch)
        except (HearthError, TimeoutError) as error:
            logger.warning("deletion is put off", extra={"session": str(key), "cause": str(error)})
