"""Ending a session as a whole: Kill, after which it may be used again, and Delete, after which it may not.

What was accepted in the database is done outside afterwards: the sandbox goes under the next epoch, so that no runner
that is still at work can bring it back. A process that dies in between leaves a claim that nobody renews, and, of a
deletion, a row that a sweep finishes.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.chassis.errors import HearthError
from services.pool.control.commands import Commands
from services.pool.control.inputs import session_not_found
from services.pool.control.outbox import Outbox
from services.pool.log import Log
from services.pool.rows import Claim, Key
from services.pool.store import Changed, Store
from services.pool.turns.driver import Driver
from services.pool.turns.sandboxes import Sandboxes

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "kill.committed", "delete.committed", "delete.workspace_deleted")

# How long a Kill waits for its ending to be in the log before it answers all the same.
_TOLD_SECONDS = 2.0


class Removal:
    """Kills and deletes sessions."""

    def __init__(
        self,
        *,
        store: Store,
        commands: Commands,
        outbox: Outbox,
        sandboxes: Sandboxes,
        log: Log,
        driver: Driver,
        clock: Clock,
        changed: Changed,
    ) -> None:
        self._store = store
        self._commands = commands
        self._outbox = outbox
        self._sandboxes = sandboxes
        self._log = log
        self._driver = driver
        self._clock = clock
        self._changed = changed

    async def kill(self, key: Key, request_id: str, fingerprint: bytes) -> None:
        """End whatever runs, empty the queue and delete the sandbox. Repeating it is safe."""
        epoch = await self._commands.kill(key, request_id, fingerprint)
        crashpoint("kill.committed")
        told = self._outbox.told(key)
        await self._without_agent(key, epoch)
        try:
            await self._sandboxes.release(key, Claim(epoch, 0), sandbox_pb2.RELEASE_REASON_KILLED)
        except HearthError as error:
            logger.warning("killed session keeps its sandbox for now", extra={"session": str(key), "why": error.reason})
            self._sandboxes.release_later(key, Claim(epoch, 0), sandbox_pb2.RELEASE_REASON_KILLED)
        await asyncio.wait([told], timeout=_TOLD_SECONDS)

    async def delete(self, key: Key) -> None:
        """Delete a session for good; the first answer comes when all of it is gone. Repeating it is safe."""
        async with self._store.changing(key) as changing:
            if changing is None:
                raise session_not_found(key)
            if changing.session.deleted_at is None:
                await self._commands.kill_in(changing, await changing.view(), reason="delete")
                changing.change(deleted_at=self._now())
            epoch = changing.session.epoch
        crashpoint("delete.committed")
        self._changed(key)
        await self.purge(key, epoch)

    async def purge(self, key: Key, epoch: int) -> None:
        """Do what a deletion that was accepted asks for; the tombstone stays."""
        await self._without_agent(key, epoch)
        await self._sandboxes.delete_workspace(key, Claim(epoch, 0))
        crashpoint("delete.workspace_deleted")
        await self._log.delete(key)
        await self._store.purge(key)
        logger.info("session deleted", extra={"session": str(key)})

    async def _without_agent(self, key: Key, epoch: int) -> None:
        # First: a turn that only saw its agent go would call that a failure.
        self._driver.evict(key, epoch)
        self._driver.evict_elsewhere(key, epoch)

    def _now(self) -> datetime:
        return self._clock.now()
