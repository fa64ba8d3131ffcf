"""Clients of two replicas of the history under test; where one address was named, of that one twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from tests.support.history_client import Client
from tests.support.servers import Servers
from tests.support.targets import Replicas, Stores, Target, running


@pytest.fixture(scope="package")
def stores(servers: Servers) -> Iterator[Stores]:
    """A database of their own for these tests; each of them works on sessions of its own."""
    dsn = servers.create_database(migrated=True)
    yield Stores(dsn, servers.empty_valkey())
    servers.drop_database(dsn)


@pytest.fixture(scope="package")
def target(given_target: Target | None, request: pytest.FixtureRequest) -> Iterator[Target]:
    """The services under test."""
    if given_target is not None:
        yield given_target
        return
    servers: Servers = request.getfixturevalue("servers")
    stores: Stores = request.getfixturevalue("stores")
    replicas = Replicas(servers.scratch(), stores, histories=2, relays=0)
    # What the tests with a picky database provoke.
    with running(replicas, expected=["Postgres refuses an event"]):
        yield replicas.target


@pytest_asyncio.fixture
async def history(target: Target) -> AsyncIterator[Client]:
    """A client of the first replica."""
    async with target.channel(target.history[0]) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def other(target: Target) -> AsyncIterator[Client]:
    """A client of the last replica."""
    async with target.channel(target.history[-1]) as channel:
        yield Client(channel)


@pytest_asyncio.fixture
async def database(
    given_target: Target | None, target: Target, request: pytest.FixtureRequest
) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to the service's database, for what no call can do."""
    if given_target is not None:
        pytest.skip("changes rows in the database of the service, which a test of somebody else's cannot")
    connection = await asyncpg.connect(request.getfixturevalue("stores").postgres_dsn)
    yield connection
    await connection.close()
