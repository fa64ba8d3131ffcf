"""How real agents end: killed at work, with their sandbox, with their session. And messages to one wait in line."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import session_pb2
from tests.agents.conftest import Seen
from tests.agents.people import Meet, Person
from tests.agents.roster import Agent
from tests.contract.pool.house import House, eventually, text_content
from tests.support.models.process import Models

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


def at_work_for(house: House, key: session_pb2.SessionKey) -> list[tuple[psutil.Process, str]]:
    """The processes whose directory is the session's workspace, with their command lines: the agent, and what it
    started."""
    workspace = house.directory / "sandboxes" / "workspaces" / key.project / key.session
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(workspace):
                found.append((process, " ".join(process.cmdline())))
        except psutil.Error:
            continue
    return found


async def begun(person: Person, text: str = "stream: 3000 20") -> str:
    """A turn that is being answered; its execution."""
    execution_id = await person.send(text)
    await person.hears("word-5 ")
    return execution_id


async def test_an_agent_that_is_killed_at_work_fails_its_turn(
    meet: Meet, house: House, seen: Seen, stand_in: Models, daemon: str, agent: Agent
) -> None:
    person = meet()
    await person.say("My name is Ada.")
    execution_id = await begun(person)
    agents = at_work_for(house, person.key)
    assert agents
    for process, _ in agents:
        with suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.kill()
    turn = await person.until_the_end(execution_id)
    assert turn.kind == "failed"
    assert "word-5 " in turn.text
    seen(f"`{turn.ending.execution_failed.code}`")
    again = await person.say("say: back 4417")
    assert again.kind == "completed"
    assert again.how != "warm"
    log = f"{daemon}-{agent.name}"
    asked = next(one for one in reversed(await stand_in.asked(log)) if "back 4417" in one.users[-1])
    assert "My name is Ada." in json.dumps(await stand_in.body(log, asked.number)), "it is told what went before"


async def test_a_conversation_outlives_its_sandbox(meet: Meet) -> None:
    person = meet()
    await person.say("My name is Ada.")
    await person.forget()
    request = sandbox_service_pb2.ListSandboxesRequest(project=person.key.project, session=person.key.session)
    for sandbox in (await person.backend.sandboxes.ListSandboxes(request, timeout=20)).sandboxes:
        delete = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox.sandbox_id)
        await person.backend.sandboxes.DeleteSandbox(delete, timeout=60)
    turn = await person.say("recall:")
    assert (turn.kind, turn.how, turn.opened) == ("completed", "cold", "load")
    assert "My name is Ada." in turn.text


async def test_nothing_of_a_killed_session_runs_on(meet: Meet, house: House) -> None:
    person, seconds = meet(), f"4712.{uuid.uuid4().int % 10**9}"
    execution_id = await person.send(f"run: touch begun; sleep {seconds}; touch late")
    await person.allow(execution_id)

    async def runs() -> bool:
        return any(seconds in command for _, command in at_work_for(house, person.key))

    await eventually(runs, timeout=60)
    request = calls.KillSessionRequest(session=person.key, request_id=str(uuid.uuid4()))
    await person.backend.sessions.KillSession(request, timeout=60)
    turn = await person.until_the_end(execution_id)
    assert turn.kind == "stopped"

    async def gone() -> bool:
        return not at_work_for(house, person.key)

    await eventually(gone, timeout=60)


async def test_messages_to_a_busy_agent_wait_for_each_other(meet: Meet) -> None:
    person = meet()
    first = await person.send("stream: 60 20")
    later = await asyncio.gather(*(person.backend.send(person.key, f"say: answer {n}") for n in ("one", "two")))
    assert all(sent.HasField("queued") for sent in later)
    await person.until_the_end(first)

    async def answered() -> list[str] | None:
        said = [text for text in await person.said() if "answer" in text]
        return said if len(said) == 2 else None

    said = await eventually(answered, timeout=120, every=0.1)
    assert {text.strip()[-3:] for text in said} == {"one", "two"}


async def test_a_message_steers_what_runs(meet: Meet) -> None:
    person = meet()
    first = await begun(person)
    request = calls.SendInputRequest(
        session=person.key,
        request_id=str(uuid.uuid4()),
        content=text_content("say: this instead"),
        on_busy=sessions.ON_BUSY_STEER,
    )
    sent = await person.backend.sessions.SendInput(request, timeout=30)
    assert sent.HasField("steered"), sent
    turn = await person.until_the_end(first)
    assert turn.kind == "stopped"

    async def answered() -> bool:
        return any("this instead" in text for text in await person.said())

    await eventually(answered, timeout=120, every=0.1)
