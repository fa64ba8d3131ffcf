"""The relays under test and the history they read, and their channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from hearth.types.v1 import session_pb2
from tests.support import events
from tests.support.relay_turns import Turn
from tests.support.servers import Servers
from tests.support.targets import Replicas, Stores, Target, running

# Of ours, so that a test sees it in its time; the contract says 15 s.
HEARTBEAT_SECONDS = 0.4
CONTRACT_HEARTBEAT_SECONDS = 15.0


@dataclass(frozen=True)
class Services:
    """Channels to all replicas; `history` and `relay` are the first of each."""

    histories: list[grpc.aio.Channel]
    relays: list[grpc.aio.Channel]
    heartbeat: float

    @property
    def history(self) -> grpc.aio.Channel:
        """A history."""
        return self.histories[0]

    @property
    def relay(self) -> grpc.aio.Channel:
        """A relay."""
        return self.relays[0]

    @property
    def other_relay(self) -> grpc.aio.Channel:
        """Another relay, where there is one."""
        return self.relays[-1]

    def turn(self, session: session_pb2.SessionKey | None = None, *, epoch: int = 1) -> Turn:
        """A scripted execution, by default in a session of its own."""
        return Turn(self.history, self.relay, session or events.key(), epoch=epoch)


@pytest.fixture(scope="package")
def stores(servers: Servers) -> Iterator[Stores]:
    """A database and a bus of their own for these tests; each of them works on sessions of its own."""
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
    heartbeat = {"HEARTH_RELAY_HEARTBEAT": str(HEARTBEAT_SECONDS)}
    replicas = Replicas(servers.scratch(), stores, histories=2, relays=2, relay_env=heartbeat)
    with running(replicas):
        yield replicas.target


@pytest_asyncio.fixture
async def services(given_target: Target | None, target: Target) -> AsyncIterator[Services]:
    """Channels to the services under test."""
    async with AsyncExitStack() as stack:
        histories = [await stack.enter_async_context(target.channel(address)) for address in target.history]
        relays = [await stack.enter_async_context(target.channel(address)) for address in target.relay]
        heartbeat = HEARTBEAT_SECONDS if given_target is None else CONTRACT_HEARTBEAT_SECONDS
        yield Services(histories, relays, heartbeat)


@pytest.fixture
def bus_url(given_target: Target | None, target: Target, request: pytest.FixtureRequest) -> str:
    """The Valkey that the relays use."""
    if given_target is not None:
        pytest.skip("looks into the bus of the service, which a test of somebody else's cannot")
    stores: Stores = request.getfixturevalue("stores")
    return stores.valkey_url
