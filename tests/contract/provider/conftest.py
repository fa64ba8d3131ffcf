"""A place for each test, once for every provider; at its end nothing of it may be left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.contract.provider.places import PLACES, Place, connect
from tests.support.daytona import RunningStandIn, StandIn
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left running is found at the end of the run."""
    monkeypatch.setenv(RUN_MARKER, marker())


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """For calls to daemons."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest_asyncio.fixture(params=sorted(PLACES))
async def place(request: pytest.FixtureRequest, scratch: Path, http: aiohttp.ClientSession) -> AsyncIterator[Place]:
    """Each provider in turn."""
    async with PLACES[request.param](scratch) as provider:
        found = Place(provider, http)
        yield found
        await found.clear()


@pytest_asyncio.fixture
async def stand_in(scratch: Path) -> AsyncIterator[RunningStandIn]:
    """Daytona, as far as it can be had here."""
    async with StandIn.running(scratch / "daytona") as running:
        yield running


@pytest_asyncio.fixture
async def at_daytona(stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession) -> AsyncIterator[Place]:
    """The Daytona provider alone, at `stand_in`, with limits that a busy machine keeps."""
    provider = await connect(
        stand_in,
        scratch,
        call_seconds=6.0,
        slice_seconds=8.0,
        create_seconds=25.0,
        start_seconds=25.0,
        stop_seconds=25.0,
        delete_seconds=25.0,
        daemon_seconds=25.0,
        clean_up_seconds=4.0,
        grace_seconds=0.5,
    )
    found = Place(provider, http)
    yield found
    stand_in.faults.clear()
    stand_in.release()
    await found.clear()
    await provider.close()
    assert stand_in.running() == 0
