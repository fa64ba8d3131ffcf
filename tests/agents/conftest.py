"""A house for each daemon, with the agents that this run meets in it, and the stand-in of their models.

`make exhaustive` takes one agent behind our own daemon through the six steps; `make agents` all of them behind both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Protocol, runtime_checkable

import pytest
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from services.pool.sealing import new_key
from tests.agents.people import Meet, Person
from tests.agents.roster import FIRST, ROSTER, Agent
from tests.contract.pool.house import House
from tests.support.harness import ROOT, sandbox_agent_binary
from tests.support.models.process import Models, models
from tests.support.npm import Unavailable
from tests.support.servers import Servers

DAEMONS = ("agentd", pytest.param("sandbox-agent", marks=pytest.mark.exhaustive))
AGENTS = [name if name == FIRST else pytest.param(name, marks=pytest.mark.exhaustive) for name in ROSTER]

Seen = Callable[[str], None]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand_in(servers: Servers) -> AsyncIterator[Models]:
    """The models."""
    async with models(servers.scratch()) as found:
        yield found


@runtime_checkable
class Called(Protocol):
    """A test with parameters."""

    callspec: Any


@pytest.fixture(scope="session", params=DAEMONS)
def daemon(request: pytest.FixtureRequest) -> str:
    """Which daemon."""
    return str(request.param)


@pytest.fixture(scope="session")
def met(request: pytest.FixtureRequest) -> list[str]:
    """The agents of the tests that run, so that no other one is installed."""
    calls = [item.callspec.params for item in request.session.items if isinstance(item, Called)]
    return [name for name in ROSTER if any(params.get("agent") == name for params in calls)]


@pytest.fixture(scope="session")
def house(daemon: str, met: list[str], servers: Servers, stand_in: Models) -> Iterator[House]:
    """The services, whose sandboxes run one of the daemons."""
    directory = servers.scratch()
    try:
        agents = {
            name: ROSTER[name].entry(stand_in.base(f"{daemon}-{name}"), directory / "agents" / name) for name in met
        }
    except Unavailable as why:
        pytest.skip(str(why))
    dsn = servers.create_database()
    env = {
        "HEARTH_AGENTS": json.dumps(agents),
        "HEARTH_DEFAULT_PERMISSION": "ask",
        "HEARTH_SECRET_KEY": new_key(),
        # Real agents start slowly on a busy machine.
        "HEARTH_OPEN_TIMEOUT": "110",
        "HEARTH_LOCAL_WARM_WINDOW": "300",
        "HEARTH_LOCAL_WARM_CAP": "20",
    }
    if daemon == "sandbox-agent":
        program = [sys.executable, str(ROOT / "tests/support/sandbox_agent_daemon.py"), str(sandbox_agent_binary())]
        env["HEARTH_LOCAL_DAEMON"] = json.dumps(program)
    with ExitStack() as stack:
        stack.callback(servers.drop_database, dsn)
        yield stack.enter_context(House(directory, dsn, servers.empty_valkey(), env).running())


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    """Which agent."""
    return ROSTER[request.param]


@pytest_asyncio.fixture
async def meet(house: House, agent: Agent) -> AsyncIterator[Meet]:
    """Opens sessions."""
    async with AsyncExitStack() as stack:

        def one(**spec: Any) -> Person:
            person = Person(house, sessions.SessionSpec(agent=agent.name, **spec))
            stack.push_async_callback(person.close)
            return person

        yield one


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Seen:
    """`seen("1.2 s")`: what the table of docs/agents.md says of this test, in place of a plain yes."""

    def note(words: str) -> None:
        request.node.user_properties.append(("seen", words))

    return note
