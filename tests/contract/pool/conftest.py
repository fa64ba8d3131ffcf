"""The four services for each module, and a backend that uses them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """The services, shared by the tests of a module, each of which uses sessions of its own."""
    env = {"HEARTH_SECRET_KEY": new_key()}
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest_asyncio.fixture
async def backend(house: House) -> AsyncIterator[Backend]:
    """A backend of the module's services."""
    found = Backend(house)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def database(house: House) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to the services' database, for what no call can tell."""
    connection = await asyncpg.connect(house.dsn)
    yield connection
    await connection.close()
