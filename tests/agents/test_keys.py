"""Codex with nothing but a key, which it takes only when it is told to."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from services.pool.sealing import new_key
from tests.agents import codex
from tests.agents.people import Person
from tests.agents.roster import ROSTER
from tests.contract.pool.house import House
from tests.support.models.process import Models
from tests.support.npm import Unavailable
from tests.support.servers import Servers

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
    pytest.mark.skipif("codex" not in ROSTER, reason="AGENTS leaves Codex out"),
]


@pytest.fixture(scope="module")
def own(servers: Servers, stand_in: Models) -> Iterator[House]:
    """The services, with Codex as it comes."""
    try:
        agents = {"codex": codex.with_its_own_provider(stand_in.base("own-provider"))}
    except Unavailable as why:
        pytest.skip(str(why))
    dsn = servers.create_database()
    env = {"HEARTH_AGENTS": json.dumps(agents), "HEARTH_SECRET_KEY": new_key(), "HEARTH_OPEN_TIMEOUT": "110"}
    try:
        with House(servers.scratch(), dsn, servers.empty_valkey(), env).running() as house:
            yield house
    finally:
        servers.drop_database(dsn)


@pytest_asyncio.fixture
async def person(own: House, request: pytest.FixtureRequest) -> AsyncIterator[Person]:
    """Somebody in a session whose agent gets these credentials: credential → variable."""
    credentials = [sessions.CredentialBinding(credential=name, target=target) for name, target in request.param.items()]
    found = Person(own, sessions.SessionSpec(agent="codex", credentials=credentials))
    yield found
    await found.close()


@pytest.mark.parametrize("person", [{"model-key": "OPENAI_API_KEY"}], indirect=True)
async def test_a_key_is_enough_and_stays_in_no_file(person: Person, own: House) -> None:
    value = f"sk-{uuid.uuid4().hex}"
    put = calls.PutCredentialRequest(project="acme", request_id=value[3:], name="model-key", value=value)
    await person.backend.sessions.PutCredential(put)
    turn = await person.say("say: with a key")
    assert turn.kind == "completed"
    assert turn.text.endswith("with a key")
    await person.forget()
    workspace = own.directory / "sandboxes" / "workspaces" / person.key.project / person.key.session
    files = [path for path in workspace.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if value.encode() in path.read_bytes()] == []
    again = await person.say("recall:")
    assert (again.kind, again.opened) == ("completed", "load")
    assert "with a key" in again.text


@pytest.mark.parametrize("person", [{}], indirect=True)
async def test_without_one_it_says_which_variable_it_wants(person: Person) -> None:
    turn = await person.say("say: nothing")
    assert (turn.kind, turn.ending.execution_failed.code) == ("failed", "AGENT_START_FAILED")
    assert "OPENAI_API_KEY" in turn.ending.execution_failed.message
