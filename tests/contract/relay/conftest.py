"""History and relay as processes for each module, and their channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from hearth.types.v1 import session_pb2
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_turns import Turn
from tests.support.servers import Servers

# Short, so that a test sees it in its time.
HEARTBEAT_SECONDS = 0.4


@pytest.fixture(scope="module")
def history_service(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[ServiceProcess]:
    """A history process on a database of its own."""
    env = {"HEARTH_POSTGRES_DSN": module_postgres_dsn, "HEARTH_VALKEY_URL": module_valkey_url}
    process = ServiceProcess("services.history", servers.scratch(), env)
    process.start_blocking()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def relay_service(
    servers: Servers, history_service: ServiceProcess, module_valkey_url: str
) -> Iterator[ServiceProcess]:
    """A relay process that reads that history."""
    env = {
        "HEARTH_VALKEY_URL": module_valkey_url,
        "HEARTH_HISTORY_ADDRESS": history_service.address,
        "HEARTH_RELAY_HEARTBEAT": str(HEARTBEAT_SECONDS),
    }
    process = ServiceProcess("services.relay", servers.scratch(), env)
    process.start_blocking()
    yield process
    assert process.stop() == 0
    assert "ERROR" not in process.log(), process.log_tail()


@dataclass(frozen=True)
class Services:
    """Channels to both."""

    history: grpc.aio.Channel
    relay: grpc.aio.Channel

    def turn(self, session: session_pb2.SessionKey | None = None, *, epoch: int = 1) -> Turn:
        """A scripted execution, by default in a session of its own."""
        return Turn(self.history, self.relay, session or events.key(), epoch=epoch)


@pytest_asyncio.fixture
async def services(history_service: ServiceProcess, relay_service: ServiceProcess) -> AsyncIterator[Services]:
    """Channels to the services of the module."""
    async with (
        grpc.aio.insecure_channel(history_service.address) as history,
        grpc.aio.insecure_channel(relay_service.address) as relay,
    ):
        yield Services(history, relay)


MakeTurn = Callable[..., Turn]
