"""This process among the replicas of the pool: who it is, what it takes over at its start, and what others tell it.

This version runs one pool process against a database. It makes sure of that with a lock which Postgres itself holds for
the life of a connection, and at its start takes over whatever another one left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import asyncpg

from hearth.pool.v1 import pool_pb2, replica_service_pb2, replica_service_pb2_grpc
from services.chassis.clock import Clock
from services.chassis.errors import Unavailable, as_hearth_error
from services.chassis.fields import uuid_text
from services.chassis.interceptors import Context
from services.chassis.postgres import CONNECT_ERRORS
from services.chassis.settings import StartupError
from services.pool.requests import key_of
from services.pool.rows import Key
from services.pool.store import Changed, Store
from services.pool.turns.recovery import Recovery

logger = logging.getLogger(__name__)

BEAT_EVERY = 5.0
_LOCK = "hearth/pool/single"
_LOCK_RETRY = 0.2
_CONNECT_SECONDS = 5.0
KEEP_EVERY = 5.0


class SingleReplica:
    """The lock that only one pool process of a database holds."""

    def __init__(self, dsn: str, clock: Clock) -> None:
        self._dsn = dsn
        self._clock = clock
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    async def take(self, timeout: float) -> None:
        """Take the lock; raises `StartupError` when another process keeps it for `timeout` seconds."""
        ends = self._clock.monotonic() + timeout
        while not await self._try():
            if self._clock.monotonic() > ends:
                raise StartupError(
                    "another pool process runs against this database; this version runs one of them, stop it first"
                )
            await self._clock.sleep(_LOCK_RETRY)

    async def keep(self) -> bool:
        """Take the lock again if its connection was lost; False when another process has it by now."""
        if self._connection is not None and not self._connection.is_closed():
            return True
        return await self._try()

    async def release(self) -> None:
        """Let the lock go."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=1.0)
            except CONNECT_ERRORS:
                connection.terminate()

    async def _try(self) -> bool:
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._dsn, timeout=_CONNECT_SECONDS)
        taken: bool = await self._connection.fetchval("SELECT pg_try_advisory_lock(hashtextextended($1, 0))", _LOCK)
        return taken


class Replicas:
    """This replica. `driving` tells what it drives, `entries` how many agents it keeps."""

    def __init__(
        self,
        store: Store,
        recovery: Recovery,
        holder: str,
        address: str,
        *,
        wake: Changed,
        driving: Callable[[], Iterable[Key]],
        entries: Callable[[], int],
    ) -> None:
        self._store = store
        self._recovery = recovery
        self.holder = holder
        self._address = address
        self._wake = wake
        self._driving = driving
        self._entries = entries
        self.draining = False

    async def start(self) -> None:
        """Say that this replica is there, and take over every execution that has not ended."""
        await self._store.forget_replicas(self.holder)
        await self._store.register_replica(self.holder, self._address)
        await self._store.forget_holders(self.holder)
        unfinished = await self._store.unfinished()
        for execution in unfinished:
            await self._recovery.take_over(execution, why="the pool process that drove it is gone")
            self._wake(execution.key)
        if unfinished:
            logger.info("unfinished executions taken over", extra={"executions": len(unfinished)})

    async def beat(self) -> None:
        """Say once that this replica lives, and what it does."""
        await self._store.beat(
            self.holder, draining=self.draining, driving=map(str, self._driving()), entries=self._entries()
        )

    async def leave(self) -> None:
        """Say that this replica is no more."""
        try:
            async with asyncio.timeout(1.0):
                await self._store.remove_replica(self.holder)
        except Exception as error:
            if not isinstance(as_hearth_error(error), Unavailable):
                raise
            logger.warning("replica row stays", extra={"cause": type(error).__name__})


class ReplicaService(replica_service_pb2_grpc.ReplicaServiceServicer):
    """What other replicas call."""

    def __init__(self, holder: str, *, wake: Changed) -> None:
        self._holder = holder
        self._wake = wake

    async def Nudge(
        self, request: replica_service_pb2.NudgeRequest, context: Context
    ) -> replica_service_pb2.NudgeResponse:
        """Look at the rows of a session, if this is the replica that is meant."""
        key = key_of(request.session)
        if uuid_text("holder", request.holder) != self._holder:
            return replica_service_pb2.NudgeResponse(receipt=pool_pb2.NUDGE_RECEIPT_NOT_HELD)
        self._wake(key)
        return replica_service_pb2.NudgeResponse(receipt=pool_pb2.NUDGE_RECEIPT_ACCEPTED)
