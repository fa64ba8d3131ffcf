"""The daemons that the harness contract is checked against: ours, and the real one it stands in for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.acp_http import AcpHttp, client_of
from tests.support.harness import SCRIPTED_AGENT, agentd, real_sandbox_agent

# The real daemon knows its agents by name; behind each of these names runs the scripted agent.
AGENTS = {"codex": SCRIPTED_AGENT, "claude": SCRIPTED_AGENT}


@pytest.fixture(params=["agentd", "sandbox-agent"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which daemon."""
    return str(request.param)


@pytest_asyncio.fixture
async def acp(kind: str, tmp_path: Path) -> AsyncIterator[AcpHttp]:
    """A client of the daemon, with HOME in `tmp_path / "home"`."""
    start = agentd if kind == "agentd" else real_sandbox_agent
    async with start(AGENTS, tmp_path / "home") as daemon, client_of(daemon) as client:
        yield client
