"""A history service for each module, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

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


@pytest_asyncio.fixture
async def history(service: ServiceProcess) -> AsyncIterator[Client]:
    """A client of the module's service."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield Client(channel)
