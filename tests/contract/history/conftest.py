"""A history service with a second replica, and clients of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import grpc.aio
import pytest
import pytest_asyncio

from tests.support.history_client import Client
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers


@pytest.fixture(scope="package")
def environment(servers: Servers) -> Iterator[dict[str, str]]:
    """A database of their own for these tests; each of them works on sessions of its own."""
    dsn = servers.create_database()
    yield {"HEARTH_POSTGRES_DSN": dsn, "HEARTH_VALKEY_URL": servers.empty_valkey()}
    servers.drop_database(dsn)


@pytest.fixture(scope="package")
def service(servers: Servers, environment: dict[str, str]) -> Iterator[ServiceProcess]:
    """A history process."""
    yield from _running(ServiceProcess("services.history", servers.scratch(), environment))


@pytest.fixture(scope="package")
def replica(service: ServiceProcess, servers: Servers, environment: dict[str, str]) -> Iterator[ServiceProcess]:
    """A second one on the same database and bus."""
    yield from _running(ServiceProcess("services.history", servers.scratch(), environment))


def _running(process: ServiceProcess) -> Iterator[ServiceProcess]:
    process.start_blocking()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture
async def history(service: ServiceProcess) -> AsyncIterator[Client]:
    """A client of the service."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def other(replica: ServiceProcess) -> AsyncIterator[Client]:
    """A client of the second replica."""
    async with grpc.aio.insecure_channel(replica.address) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def database(environment: dict[str, str]) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to the service's database, for what no call can do."""
    connection = await asyncpg.connect(environment["HEARTH_POSTGRES_DSN"])
    yield connection
    await connection.close()
