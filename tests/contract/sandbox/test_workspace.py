"""The workspace of a session outlives its sandboxes; what the agent remembers lies in it, so sessions can be loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from hearth.sandbox.v1 import sandbox_service_pb2
from tests.support.acp_http import AcpHttp
from tests.support.harness import HarnessDaemon
from tests.support.sandboxes import Sandboxes, disposition, how


@asynccontextmanager
async def spoken_to(answer: sandbox_service_pb2.AcquireResponse) -> AsyncIterator[AcpHttp]:
    """The daemon of a sandbox, as the pool has it."""
    endpoint = answer.endpoint
    daemon = cast("HarnessDaemon", SimpleNamespace(kind="agentd", url=endpoint.url, token=endpoint.token))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.token}"}) as http:
        yield AcpHttp(daemon, http)


@pytest.mark.parametrize(("reason", "done"), [("KILLED", "DELETED"), ("IDLE_EXPIRED", "STOPPED")])
async def test_an_agents_session_is_loaded_in_the_next_sandbox(
    sandboxes: Sandboxes, session: str, holder: str, reason: str, done: str
) -> None:
    first = await sandboxes.acquire(session, 1, holder=holder)
    async with spoken_to(first) as acp:
        acp_session = await acp.open("s", "scripted", first.workspace)
        assert (await acp.prompt("s", acp_session, "remember my name is Ada")).result["stopReason"] == "end_turn"
    assert disposition(await sandboxes.release(session, 1, reason=reason)) == done

    second = await sandboxes.acquire(session, 2, holder=holder)
    assert how(second) == ("CREATED" if done == "DELETED" else "RESTARTED")
    assert second.workspace == first.workspace, "agents key what they remember by it"
    async with spoken_to(second) as acp:
        await acp.request("s", "initialize", {"protocolVersion": 1}, agent="scripted")
        asked = {"sessionId": acp_session, "cwd": second.workspace, "mcpServers": []}
        assert (await acp.request("s", "session/load", asked)).status == 200
        about = (await acp.prompt("s", acp_session, "what is my name?")).result["_meta"]["hearth.dev/agent"]
        assert about.items() >= {"turns_loaded": 1, "session_loaded": True}.items()


async def test_a_deleted_session_forgets(sandboxes: Sandboxes, session: str, holder: str) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    workspace = Path(answer.workspace)
    (workspace / "file").write_text("x")
    await sandboxes.delete_workspace(session, 2)
    assert not workspace.exists()
    again = await sandboxes.acquire(session, 3, holder=holder)
    assert not (Path(again.workspace) / "file").exists()
