"""A Daytona sandbox that dies, or is stopped from outside, in the middle of a turn: on the stand-in, with the real SDK.

The turn ends in seconds with a typed failure, no second sandbox of the session runs beside it, and the next turn finds
the workspace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from hearth.cli.stand_in import AGENTD
from tests.contract.pool.house import Backend, House, agent_text, eventually, key, summary
from tests.support.daytona import remote
from tests.support.daytona.remote import RemoteStandIn
from tests.support.servers import Servers

# Far below the 60 s in which a silent stream counts as lost.
SECONDS = 30.0


@pytest_asyncio.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[RemoteStandIn]:
    """Daytona, without its delays."""
    async with remote.started(tmp_path / "daytona") as found:
        yield found


@pytest_asyncio.fixture
async def backend(
    stand_in: RemoteStandIn, servers: Servers, tmp_path: Path, migrated_dsn: str, valkey_url: str
) -> AsyncIterator[Backend]:
    """A backend of services that use it."""
    settings = {
        "HEARTH_PROVIDERS": "daytona",
        "HEARTH_DEFAULT_PROVIDER": "daytona",
        "HEARTH_DAYTONA_API_URL": stand_in.url,
        "HEARTH_DAYTONA_API_KEY": stand_in.api_key,
        "HEARTH_DAYTONA_DAEMON": json.dumps(AGENTD),
        "HEARTH_DAYTONA_MOUNT": str(tmp_path / "mounts"),
    }
    house = House(servers.scratch(), migrated_dsn, valkey_url, settings)
    try:
        await asyncio.to_thread(house.start_blocking)
        found = Backend(house)
        yield found
        await found.close()
    finally:
        await asyncio.to_thread(house.stop)


async def end(stand_in: RemoteStandIn, provider_id: str, how: str) -> None:
    """Let a sandbox die as a machine does, or stop it as somebody else with the key may."""
    if how == "dies":
        await stand_in.kill(provider_id)
        return
    headers = {"Authorization": f"Bearer {stand_in.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{stand_in.url}/sandbox/{provider_id}/stop") as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["dies", "is stopped"])
async def test_a_sandbox_that_is_lost_in_a_turn(backend: Backend, stand_in: RemoteStandIn, how: str) -> None:
    session = key()
    await backend.run(session, "hello")
    sent = await backend.send(session, "fs-write kept.txt still here\nstream 100000 words at 20/s")
    execution_id = sent.started.execution.execution_id

    async def wrote() -> bool:
        return any(event.HasField("tool_completed") for event in await backend.events(session))

    await eventually(wrote)
    (sandbox,) = await backend.running_sandboxes(session)
    await end(stand_in, sandbox.provider_id, how)
    ending = await backend.ending(session, execution_id, timeout=SECONDS)
    assert ending.execution_failed.code in {"HARNESS_UNREACHABLE", "DAEMON_UNREACHABLE", "AGENT_EXITED"}
    after = await backend.run(session, "read kept.txt")
    assert summary(after).how in {"cold", "restarted"}
    assert "still here" in agent_text(await backend.events(session), after.execution_id)
    assert await stand_in.overlaps() == []
