"""The real SDK, pointed at a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from daytona import AsyncDaytona, DaytonaConfig

from tests.support.daytona.stand_in import RunningStandIn


@asynccontextmanager
async def connected(stand_in: RunningStandIn, *, api_key: str = "") -> AsyncIterator[AsyncDaytona]:
    """A client of the SDK, as an application has it."""
    config = DaytonaConfig(api_key=api_key or stand_in.api_key, api_url=stand_in.url, target="us")
    async with AsyncDaytona(config) as client:
        yield client
