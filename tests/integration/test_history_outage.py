"""Postgres away, locked or refusing: callers are told to send again, nothing is half written, and it heals alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import grpc
import grpc.aio

from hearth.history.v1 import history_service_pb2
from services.chassis.errors import ResourceExhausted, Unavailable, from_rpc_error
from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import Client, ids, refused
from tests.support.servers import Servers, with_database
from tests.support.waiting import eventually


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@asynccontextmanager
async def away(dsn: str) -> AsyncIterator[None]:
    """The database takes no connections and ends those that it has, as a failover does."""
    name = dsn.rsplit("/", 1)[-1]
    async with connected(with_database(dsn, "postgres")) as admin:
        await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        yield
        await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


async def test_an_outage_is_unavailable_and_heals(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=valkey_url)
    session = events.key()
    async with grpc.aio.insecure_channel(service.address) as channel:
        history = Client(channel)
        first, second = events.user_message(), events.user_message()
        await history.accepted(session, first)
        async with away(migrated_dsn):
            for call in (history.append(session, second), history.page(session), history.heads(session)):
                error = await refused(call)
                assert isinstance(error, Unavailable)
                assert (error.reason, error.metadata["dependency"]) == ("DEPENDENCY_UNAVAILABLE", "Postgres")
                assert error.retry_after is not None
            await eventually(lambda: not service.serving())
        await eventually(service.serving)
        results = await history.append(session, first, second)
        assert [result.sequence for result in results] == [1, 2]
        assert ids(await history.read(session)) == [first.event_id, second.event_id]


async def test_a_restart_of_postgres_costs_one_answer_at_most(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=valkey_url)
    session = events.key()
    async with grpc.aio.insecure_channel(service.address) as channel:
        history = Client(channel)
        await history.accepted(session, events.user_message())
        async with away(migrated_dsn):
            pass
        event = events.user_message()
        try:
            (result,) = await history.append(session, event)
        except grpc.aio.AioRpcError as error:
            # The broken connection was used before its end was seen: nobody knows whether that commit happened.
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - it need not be raised
            (result,) = await history.append(session, event)
        assert result.sequence == 2
        assert await history.accepted(session, events.user_message()) == [3]


async def test_after_a_failed_request_nothing_behind_it_is_committed(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service(
        "services.history",
        HEARTH_POSTGRES_DSN=migrated_dsn,
        HEARTH_VALKEY_URL=valkey_url,
        HEARTH_POSTGRES_LOCK_TIMEOUT="0.3",
    )
    session, run = events.key(), events.Run()
    async with grpc.aio.insecure_channel(service.address) as channel, connected(migrated_dsn) as holder:
        history = Client(channel)
        await history.accepted(session, run.started())
        message, ending = run.message(), run.completed(counted=0)
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT 1 FROM history.logs WHERE session = $1 FOR UPDATE", session.session)
        call = history.stub.AppendStream()
        for number, event in enumerate((message, ending), 1):
            request = history_service_pb2.AppendStreamRequest(number=number, sets=[events.append_set(session, event)])
            await call.write(request)
            await asyncio.sleep(0.1)
        error = None
        try:
            await call.read()
        except grpc.aio.AioRpcError as found:
            error = from_rpc_error(found)
        await transaction.rollback()
        assert isinstance(error, Unavailable)
        assert error.metadata["first_unacknowledged"] == "1"
        assert len(await history.read(session)) == 1
        assert await history.accepted(session, message, ending) == [2, 3]


async def test_a_full_queue_refuses_and_says_when_to_come_back(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service(
        "services.history",
        HEARTH_POSTGRES_DSN=migrated_dsn,
        HEARTH_VALKEY_URL=valkey_url,
        HEARTH_HISTORY_QUEUE_EVENTS="10",
        HEARTH_HISTORY_LANES="1",
    )
    session = events.key()
    async with grpc.aio.insecure_channel(service.address) as channel, connected(migrated_dsn) as holder:
        history = Client(channel)
        await history.accepted(session, events.user_message())
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT 1 FROM history.logs WHERE session = $1 FOR UPDATE", session.session)
        taken = [
            asyncio.create_task(history.append(session, *(events.user_message() for _ in range(5)))) for _ in range(2)
        ]
        await asyncio.sleep(0.2)
        error = await refused(history.append(session, events.user_message()))
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "OVERLOADED"
        assert error.retry_after is not None
        assert (await history.page(session)).bounds.head == 1
        await transaction.rollback()
        first, second = await asyncio.gather(*taken)
        assert sorted(result.sequence for result in [*first, *second]) == list(range(2, 12))
        assert await history.accepted(session, *(events.user_message() for _ in range(50))) == list(range(12, 62))


async def test_replicas_that_start_together_migrate_once(
    start_service: StartService, servers: Servers, migrated_dsn: str, valkey_url: str
) -> None:
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url}
    first, second = await asyncio.gather(*(start_service("services.history", **env) for _ in range(2)))
    session = events.key()
    for service, expected in ((first, 1), (second, 2)):
        async with grpc.aio.insecure_channel(service.address) as channel:
            assert await Client(channel).accepted(session, events.user_message()) == [expected]
