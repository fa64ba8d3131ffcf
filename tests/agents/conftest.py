"""A house for each daemon, with every agent in it, and the stand-in of their models."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
import pytest_asyncio

from services.pool.sealing import new_key
from tests.agents.roster import ROSTER
from tests.contract.pool.house import House
from tests.support.harness import ROOT, sandbox_agent_binary
from tests.support.models.process import Models, models
from tests.support.servers import Servers

DAEMONS = ("agentd", "sandbox-agent")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand_in(servers: Servers) -> AsyncIterator[Models]:
    """The models."""
    async with models(servers.scratch()) as found:
        yield found


@pytest.fixture(scope="session", params=DAEMONS)
def house(request: pytest.FixtureRequest, servers: Servers, stand_in: Models) -> Iterator[House]:
    """The services, whose sandboxes run one of the daemons."""
    directory, dsn = servers.scratch(), servers.create_database()
    agents = {
        name: agent.entry(stand_in.base(f"{request.param}-{name}"), directory / "agents" / name)
        for name, agent in ROSTER.items()
    }
    env = {
        "HEARTH_AGENTS": json.dumps(agents),
        "HEARTH_DEFAULT_PERMISSION": "ask",
        "HEARTH_SECRET_KEY": new_key(),
        "HEARTH_LOCAL_WARM_WINDOW": "300",
        "HEARTH_LOCAL_WARM_CAP": "20",
    }
    if request.param == "sandbox-agent":
        daemon = [sys.executable, str(ROOT / "tests/support/sandbox_agent_daemon.py"), str(sandbox_agent_binary())]
        env["HEARTH_LOCAL_DAEMON"] = json.dumps(daemon)
    with ExitStack() as stack:
        stack.callback(servers.drop_database, dsn)
        yield stack.enter_context(House(directory, dsn, servers.empty_valkey(), env).running())
