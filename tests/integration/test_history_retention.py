"""Events go by age: old ones and no others, never those of what runs, shared by replicas, beside whoever appends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import grpc.aio
import pytest_asyncio

from hearth.secret import Secret
from hearth.types.v1 import session_pb2
from services.chassis.clock import SystemClock
from services.chassis.errors import OutOfRange
from services.chassis.postgres import create_pool
from services.history.retention import Retention
from services.history.settings import HistorySettings
from services.history.store import PLANNER, Store
from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import QUARANTINED, Client, refused

AGE = timedelta(days=2)
NOW = timedelta()
LATER = timedelta(hours=1)


@dataclass
class House:
    """A history that keeps everything, and its database."""

    history: Client
    database: asyncpg.Connection[asyncpg.Record]
    dsn: str
    valkey_url: str

    async def grow_old(self, session: session_pb2.SessionKey, through: int) -> None:
        """Let the events up to `through` have been stored three days ago."""
        log = await self.database.fetchval(
            "SELECT id FROM history.logs WHERE project = $1 AND session = $2", session.project, session.session
        )
        await self.database.execute(
            "UPDATE history.events SET appended_at = appended_at - interval '3 days' WHERE log = $1 AND sequence <= $2",
            log,
            through,
        )

    @asynccontextmanager
    async def retention(self, *, batch: int = 1_000) -> AsyncIterator[Retention]:
        """What a replica has of it."""
        settings = HistorySettings(postgres_dsn=Secret(self.dsn), valkey_url=Secret(self.valkey_url))
        pool = await create_pool(settings, "retention", server_settings=PLANNER)
        async with pool:
            yield Retention(Store(pool), SystemClock(), batch=batch)


@pytest_asyncio.fixture
async def house(start_service: StartService, migrated_dsn: str, valkey_url: str) -> AsyncIterator[House]:
    """One replica without the setting."""
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=valkey_url)
    database: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(migrated_dsn, server_settings=PLANNER)
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield House(Client(channel), database, migrated_dsn, valkey_url)
    await database.close()


async def test_old_events_go_and_young_ones_stay(house: House) -> None:
    history, session, run = house.history, events.key(), events.Run()
    late = run.message()
    await history.accepted(session, run.started(), run.completed(counted=0), *(events.custom() for _ in range(248)))
    log = await history.read(session)
    await house.grow_old(session, 170)
    async with house.retention(batch=40) as retention:
        assert await retention.expire_slice(AGE, every=NOW) == 170
        assert await retention.expire_slice(AGE, every=NOW) is None, "the round is over"
        assert await retention.expire_slice(AGE, every=NOW) == 0
    for after in (None, log[168].cursor):
        error = await refused(history.page(session, after))
        assert isinstance(error, OutOfRange)
        assert (error.reason, error.metadata["oldest"], error.metadata["head"]) == ("CURSOR_EXPIRED", "171", "250")
    assert list((await history.page(session, log[169].cursor)).events) == log[170:]
    assert await history.accepted(session, events.custom()) == [251]
    # What it was told by the ledger outlives its events.
    (result,) = await history.append(session, late)
    assert (result.outcome, result.reason) == (QUARANTINED, "EXECUTION_ENDED")


async def test_an_old_event_behind_a_young_one_waits(house: House) -> None:
    history, session = house.history, events.key()
    await history.accepted(session, *(events.custom() for _ in range(6)))
    await house.grow_old(session, 6)
    await house.database.execute("UPDATE history.events SET appended_at = now() WHERE sequence = 4")
    async with house.retention() as retention:
        assert await retention.expire_slice(AGE, every=NOW) == 3
    assert (await history.heads(session))[0].oldest == 4


async def test_a_log_may_go_to_its_head(house: House) -> None:
    history, session = house.history, events.key()
    await history.accepted(session, *(events.custom() for _ in range(5)))
    log = await history.read(session)
    await house.grow_old(session, 5)
    async with house.retention(batch=5) as retention:
        assert await retention.expire_slice(AGE, every=NOW) == 5
    page = await history.page(session, log[4].cursor)
    assert (list(page.events), page.bounds.oldest, page.bounds.head) == ([], 0, 5)
    assert await history.accepted(session, events.custom()) == [6]


async def test_nothing_goes_while_an_execution_runs(house: House) -> None:
    history, session, run = house.history, events.key(), events.Run()
    message = run.message()
    await history.accepted(session, events.custom(), run.started(), message)
    await house.grow_old(session, 3)
    async with house.retention() as retention:
        assert await retention.expire_slice(AGE, every=NOW) == 0
        # Also where it began after its log was found to be old.
        assert await house.database.fetchval("SELECT history.expire_batch(id, $1, 10) FROM history.logs", AGE) == 0
        # So an event that its producer sends again is known, however long that took.
        (again,) = await history.append(session, message)
        assert again.sequence == 3
        assert await history.accepted(session, run.completed(counted=1)) == [4]
        assert await retention.expire_slice(AGE, every=NOW) is None
        assert await retention.expire_slice(AGE, every=NOW) == 3
    assert (await history.heads(session))[0].oldest == 4


async def test_a_deleted_log_is_left_to_its_removal(house: House) -> None:
    history, session = house.history, events.key()
    await history.accepted(session, events.custom())
    await house.grow_old(session, 1)
    await house.database.execute("UPDATE history.logs SET deleted_at = now() WHERE session = $1", session.session)
    async with house.retention() as retention:
        assert await retention.expire_slice(AGE, every=NOW) == 0


async def test_replicas_share_a_round_beside_appenders(house: House) -> None:
    history, sessions = house.history, [events.key() for _ in range(20)]
    for session in sessions:
        await history.accepted(session, *(events.custom() for _ in range(40)))
        await house.grow_old(session, 30)
    scanned = "SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'history' AND relname <> $1"
    await house.database.execute("SELECT pg_stat_force_next_flush()")
    before = await house.database.fetchval(scanned, "schema_version")

    async def work(retention: Retention) -> list[int]:
        took = []
        while (removed := await retention.expire_slice(AGE, every=LATER, logs=3)) is not None:
            took.append(removed)
        return took

    async def append(session: session_pb2.SessionKey) -> None:
        for place in range(10):
            assert await history.accepted(session, events.custom()) == [41 + place]

    async with house.retention(batch=7) as first, house.retention(batch=7) as second, house.retention() as third:
        *took, _ = await asyncio.gather(work(first), work(second), work(third), asyncio.gather(*map(append, sessions)))
        assert sum(map(sum, took)) == 20 * 30
        # Twenty logs, three at a time: nobody looked at what another one had.
        assert sum(map(len, took)) == 7
        assert await first.expire_slice(AGE, every=LATER) is None, "the next round is an hour away"
    for session in sessions:
        (head,) = await history.heads(session)
        assert (head.oldest, head.head.sequence) == (31, 50)
    await house.database.execute("SELECT pg_stat_clear_snapshot()")
    assert await house.database.fetchval(scanned, "schema_version") == before


async def test_a_service_with_the_setting_does_it(
    house: House, start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    history, session = house.history, events.key()
    await history.accepted(session, *(events.custom() for _ in range(30)))
    await house.grow_old(session, 20)
    for _ in range(2):
        await start_service(
            "services.history",
            HEARTH_POSTGRES_DSN=migrated_dsn,
            HEARTH_VALKEY_URL=valkey_url,
            HEARTH_HISTORY_RETENTION="86400",
        )

    async def went() -> bool:
        return (await history.heads(session))[0].oldest == 21

    async with asyncio.timeout(20):
        while not await went():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
