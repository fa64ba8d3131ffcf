"""What real agents can do through Hearth, behind agentd and behind sandbox-agent: the same six steps for each."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import psutil
import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from tests.agents import mcp_probe
from tests.agents.conftest import Seen
from tests.agents.people import ALLOWED, DENIED, Meet
from tests.agents.roster import Agent
from tests.contract.pool.house import House, eventually

pytestmark = pytest.mark.timeout(400)


def processes_with(word: str) -> list[int]:
    """Processes that have this in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and word in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


async def test_1_a_prompt_is_answered(meet: Meet, seen: Seen) -> None:
    person = meet()
    turn = await person.say("say: hello from the model")
    seen(f"{turn.seconds:.1f} s")
    assert (turn.kind, turn.how, turn.opened) == ("completed", "cold", "new")
    assert turn.text.endswith("hello from the model")
    assert turn.ending.execution_completed.finish_reason == "end_turn"
    assert (turn.tools, turn.asked) == ([], [])


async def test_2_a_tool_runs_once_it_is_allowed(meet: Meet, tmp_path: Path) -> None:
    person = meet()
    # Some agents ask only for commands that change something.
    turn = await person.say(f"run: touch {tmp_path}/made; echo marker-$((40+2))")
    assert (tmp_path / "made").exists()
    assert turn.kind == "completed"
    (question,) = turn.asked
    assert "marker-$((40+2))" in question.request.input_json
    (tool,) = turn.tools
    assert (tool.status, tool.tool_call_id) == (event_pb2.TOOL_STATUS_SUCCEEDED, question.request.tool_call_id)
    assert "marker-42" in tool.output
    assert "marker-$((40+2))" in tool.input_json
    assert "marker-42" in turn.text


async def test_2_a_tool_does_not_run_once_it_is_denied(meet: Meet, agent: Agent, tmp_path: Path, seen: Seen) -> None:
    person = meet()
    turn = await person.say(f"run: touch {tmp_path}/made", DENIED)
    assert turn.kind == "completed"
    (tool,) = turn.tools
    assert tool.status == event_pb2.TOOL_STATUS_DENIED
    assert not (tmp_path / "made").exists()
    assert bool(turn.text) == agent.goes_on_after_a_denial
    seen("the model is told" if turn.text else "it ends the turn")
    again = await person.say("say: still here")
    assert (again.kind, again.how) == ("completed", "warm")
    assert again.text.endswith("still here")


async def test_3_stop_in_the_middle_of_an_answer(meet: Meet, house: House) -> None:
    person = meet()
    execution_id = await person.send("stream: 2000 20")
    await person.hears("word-5 ")
    turn = await person.stop(execution_id)
    assert turn.kind == "stopped"
    assert "word-5 " in turn.text
    said = [event.message_completed for event in turn.events if event.message_completed.role == content_pb2.ROLE_AGENT]
    assert said[-1].finish_reason == "stopped"
    again = await person.say("say: and on")
    assert (again.kind, again.how) == ("completed", "warm")


async def test_3_stop_during_a_command_leaves_no_child(meet: Meet, tmp_path: Path) -> None:
    person, seconds = meet(), f"4711.{uuid.uuid4().int % 10**9}"
    execution_id = await person.send(f"run: touch {tmp_path}/begun; sleep {seconds}; touch {tmp_path}/late")
    await person.allow(execution_id)

    async def runs() -> list[int]:
        return processes_with(f"sleep {seconds}")

    await eventually(runs, timeout=60)
    turn = await person.stop(execution_id)
    assert turn.kind == "stopped"
    await person.backend.idle_entry(person.key)
    assert processes_with(seconds) == []
    again = await person.say("say: and on")
    assert (again.kind, again.how) == ("completed", "warm")


async def test_4_a_second_turn_is_warm_and_remembers(meet: Meet, seen: Seen) -> None:
    person = meet()
    await person.say("My name is Ada.")
    turn = await person.say("recall:")
    seen(f"{turn.seconds:.1f} s")
    assert (turn.kind, turn.how, turn.opened) == ("completed", "warm", "continue")
    assert "My name is Ada." in turn.text


async def test_5_a_conversation_is_loaded_after_a_restart(meet: Meet, seen: Seen) -> None:
    person = meet()
    await person.say("My name is Ada.")
    await person.say("run: echo remember-$((40+2))")
    await person.forget()
    turn = await person.say("recall:")
    seen(f"{turn.seconds:.1f} s")
    assert (turn.kind, turn.how, turn.opened) == ("completed", "restarted", "load")
    assert turn.text.count("My name is Ada.") == 1, "it is told by the agent's own record, and not once more by Hearth"


async def test_6_an_mcp_server_of_the_spec_is_used(meet: Meet) -> None:
    name = f"probe-{uuid.uuid4().hex[:8]}"
    server = sessions.McpServer(
        name="probe",
        stdio=sessions.McpStdio(
            command=[sys.executable, mcp_probe.__file__],
            env={"PLAIN": "x"},
            credentials=[sessions.CredentialBinding(credential=name, target="PROBE_KEY")],
        ),
    )
    person = meet(mcp_servers=[server])
    value = "!echo $HOME ${x} {env:HOME}"
    request = calls.PutCredentialRequest(project="acme", request_id=name, name=name, value=value)
    await person.backend.sessions.PutCredential(request)
    turn = await person.say('call: echo {"text":"marco"}')
    assert turn.kind == "completed"
    (tool,) = turn.tools
    assert tool.status == event_pb2.TOOL_STATUS_SUCCEEDED
    assert f"probe heard marco with {value}" in tool.output
    assert turn.asked, "a tool of a server is asked about like any other"
    again = await person.say('call: echo {"text":"polo"}', ALLOWED)
    assert again.how == "warm"
    assert "probe heard polo" in again.text
