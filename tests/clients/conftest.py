"""The four services for all tests of clients: each test uses sessions of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

import hearth
from services.pool.sealing import new_key
from tests.contract.pool.house import House
from tests.support.servers import Servers


@pytest.fixture(scope="package")
def house(servers: Servers) -> Iterator[House]:
    """History, relay, sandbox and pool as processes."""
    directory, dsn = servers.scratch(), servers.create_database(migrated=True)
    with House(directory, dsn, servers.empty_valkey(), {"HEARTH_SECRET_KEY": new_key()}).running() as found:
        yield found
    servers.drop_database(dsn)


@pytest.fixture
def addresses(house: House) -> hearth.Addresses:
    """Where they are."""
    return hearth.Addresses(**{name: house.processes[name].address for name in ("pool", "history", "relay", "sandbox")})


@pytest_asyncio.fixture
async def client(addresses: hearth.Addresses) -> AsyncIterator[hearth.Client]:
    """A client of them."""
    async with hearth.Client(addresses) as found:
        yield found
