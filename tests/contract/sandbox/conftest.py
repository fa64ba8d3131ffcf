"""One sandbox service for each module of contract tests; at its end nothing of its sandboxes may be left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.support.processes import ServiceProcess
from tests.support.sandboxes import (
    Sandboxes,
    agents_with_stubborn,
    connected,
    left_below,
    new_id,
    service_environment,
)
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def sandbox_root(servers: Servers) -> Path:
    """Where the sandboxes of the module's service lie."""
    return servers.scratch() / "sandboxes"


@pytest.fixture(scope="module")
def sandbox_service(
    request: pytest.FixtureRequest, servers: Servers, module_postgres_dsn: str, sandbox_root: Path
) -> Iterator[ServiceProcess]:
    """A service; a module sets further variables in a constant ENVIRONMENT."""
    environment = service_environment(
        module_postgres_dsn,
        sandbox_root,
        HEARTH_AGENTS=agents_with_stubborn(),
        **getattr(request.module, "ENVIRONMENT", {}),
    )
    service = ServiceProcess("services.sandbox", servers.scratch(), environment)
    service.start_blocking()
    yield service
    assert service.stop() == 0
    assert left_below(sandbox_root) == []


@pytest_asyncio.fixture
async def sandboxes(sandbox_service: ServiceProcess) -> AsyncIterator[Sandboxes]:
    """Calls to the service; what a test leaves is deleted."""
    async with connected(sandbox_service.address) as calls:
        yield calls
        await calls.clear()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """For calls to daemons."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def session() -> str:
    """A session that no other test uses."""
    return f"s-{new_id()}"


@pytest.fixture
def holder() -> str:
    """A holding process."""
    return new_id()
