"""Fixtures of the tests that freeze, kill and double the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.faults.pool_scene import PoolScene
from tests.support.servers import Servers


@pytest.fixture(scope="session")
def pool_services(servers: Servers) -> Iterator[PoolScene]:
    """The services, started once."""
    found = PoolScene(servers)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def scene(pool_services: PoolScene) -> AsyncIterator[PoolScene]:
    """The services with nothing in them; after the test nothing may be left of what it made."""
    await pool_services.begin()
    try:
        yield pool_services
    finally:
        await pool_services.clean_up()
