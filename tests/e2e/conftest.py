"""One stack for all end-to-end tests of a worker: they use sessions of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.cli import Hearth, running
from tests.support.servers import Servers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hearth(servers: Servers) -> AsyncIterator[Hearth]:
    """The `hearth` program with a stack that runs."""
    async with running(servers.scratch() / ".hearth") as program:
        yield program
