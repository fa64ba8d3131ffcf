"""A history service for each module, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import grpc.aio
import pytest
import pytest_asyncio

from tests.contract.history.client import Client
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def service(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[ServiceProcess]:
    """A history process on a database of its own."""
    process = ServiceProcess(
        "services.history",
        servers.scratch(),
        {"HEARTH_POSTGRES_DSN": module_postgres_dsn, "HEARTH_VALKEY_URL": module_valkey_url},
    )
    process.start_blocking()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def replica(service: ServiceProcess, servers: Servers) -> Iterator[ServiceProcess]:
    """A second history process on the same database and bus."""
    process = ServiceProcess("services.history", servers.scratch(), service.env)
    process.start_blocking()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture
async def history(service: ServiceProcess) -> AsyncIterator[Client]:
    """A client of the module's service."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def other(replica: ServiceProcess) -> AsyncIterator[Client]:
    """A client of the second replica."""
    async with grpc.aio.insecure_channel(replica.address) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def database(service: ServiceProcess) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to the service's database, for what no call can do."""
    connection = await asyncpg.connect(service.env["HEARTH_POSTGRES_DSN"])
    yield connection
    await connection.close()
