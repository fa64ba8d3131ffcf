"""One stack for all end-to-end tests of a worker: they use sessions of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cli import Hearth, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hearth(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hearth]:
    """The `hearth` program with a stack that runs."""
    root = tmp_path_factory.mktemp("stack")
    # The embedded Postgres may run as another user, who has to get through to its own directory.
    for directory in (root, *list(root.parents)[:3]):
        directory.chmod(0o755)
    async with running(root / ".hearth") as program:
        yield program
