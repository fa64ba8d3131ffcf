"""The four services for each module, and a backend that uses them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from services.pool.sealing import new_key
from tests.contract.pool.house import SCRIPTED, Backend, House, agent_log_of
from tests.contract.pool.people import asking
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """The services, shared by the tests of a module, each of which uses sessions of its own."""
    env = {"HEARTH_SECRET_KEY": new_key()}
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest.fixture(scope="package")
def shared_house(servers: Servers) -> Iterator[House]:
    """The services for modules that ask for nothing special: each takes it as its `house`.

    Their agent `logged` writes down what reaches it (`agent_log_of`), and one that asks is kept for no time at all.
    """
    directory, dsn = servers.scratch(), servers.create_database(migrated=True)
    agent = {"command": SCRIPTED, "env": {"HEARTH_SCRIPTED_LOG": str(agent_log_of(directory))}}
    env = {
        "HEARTH_AGENTS": json.dumps({"logged": agent}),
        "HEARTH_APPROVAL_WINDOW": "0",
        "HEARTH_SECRET_KEY": new_key(),
    }
    with House(directory, dsn, servers.empty_valkey(), env).running() as found:
        yield found
    servers.drop_database(dsn)


@pytest.fixture(scope="package")
def asking_house(servers: Servers) -> Iterator[House]:
    """The services for modules whose agents ask people for everything, and wait for them for long.

    The agents write down what reaches them (`agent_log_of`).
    """
    directory, dsn = servers.scratch(), servers.create_database(migrated=True)
    env = {**asking(agent_log_of(directory)), "HEARTH_SECRET_KEY": new_key()}
    with House(directory, dsn, servers.empty_valkey(), env).running() as found:
        yield found
    servers.drop_database(dsn)


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
