"""`hearth stop`, `kill`, `queue`, `gates`, `answer` and `sessions`, as somebody uses them while agents work."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = "stream 3000 words at 40/s"


def new() -> str:
    return f"control-{uuid.uuid4().hex[:8]}"


async def eventually(look: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """Run a command again and again until it shows something."""
    async with asyncio.timeout(seconds):
        while not (found := await look()):
            pass
        return found


async def shown(hearth: Hearth, session: str) -> Any:
    return (await hearth.run("sessions", session, "--json")).json()


async def begun(hearth: Hearth, session: str, text: str = LONG, *options: str) -> str:
    """Send a message that the agent works on; its execution."""
    sent = (await hearth.run("send", session, text, "--json", *options)).json()
    execution: str = sent["started"]["execution"]["execution_id"]

    async def running() -> bool:
        state: str = (await shown(hearth, session))["execution"]["state"]
        return state in ("EXECUTION_STATE_RUNNING", "EXECUTION_STATE_WAITING")

    await eventually(running)
    return execution


async def types(hearth: Hearth, session: str) -> list[str]:
    return [item["event"]["type"] for item in (await hearth.run("history", session, "--json")).lines()]


async def test_what_waits_is_listed_changed_taken_out_and_run_first(hearth: Hearth) -> None:
    session = new()
    first = await begun(hearth, session)
    inputs = []
    for text in ("one", "two", "three"):
        sent = (await hearth.run("send", session, text, "--json")).json()
        inputs.append(sent["queued"]["input_id"])
    listed = (await hearth.run("queue", "list", session, "--json")).json()
    assert [found["input_id"] for found in listed["inputs"]] == inputs
    assert not listed["paused"]

    edited = (await hearth.run("queue", "edit", session, inputs[1], "two, but better", "--json")).json()
    assert edited["content"][0]["text"]["text"] == "two, but better"
    assert (await hearth.run("queue", "remove", session, inputs[0])).stdout.startswith("removed one")
    again = await hearth.run("queue", "remove", session, inputs[0])
    assert again.code == 4
    assert "INPUT_NOT_PENDING" in again.stderr
    table = (await hearth.run("queue", "list", session)).stdout
    assert "two, but better" in table
    assert inputs[2] in table

    # By how its id begins; what runs makes way for it.
    moved = (await hearth.run("queue", "now", session, inputs[2][:13], "--json")).json()
    assert moved["steered"]["command"]["execution_id"] == first

    async def both_ran() -> bool:
        return (await types(hearth, session)).count("execution.completed") == 2

    await eventually(both_ran)
    log = [item["event"] for item in (await hearth.run("history", session, "--json")).lines()]
    promoted = [event["input_promoted"]["input_id"] for event in log if event["type"] == "input.promoted"]
    assert promoted == [inputs[2], inputs[1]]
    (stopped,) = [event for event in log if event["type"] == "execution.stopped"]
    assert stopped["execution_stopped"]["reason"] == "steer"
    assert (await hearth.run("queue", "list", session)).stdout.strip() == "nothing waits"


async def test_a_stop_says_what_came_of_it_and_the_queue_waits_for_resume(hearth: Hearth) -> None:
    session = new()
    execution = await begun(hearth, session)
    assert (await hearth.run("send", session, "later")).code == 0
    command = (await hearth.run("stop", session, "--wait", "--json")).json()
    assert command["execution_id"] == execution
    assert command["outcome"] == "COMMAND_OUTCOME_STOPPED"
    assert "not running" in (await hearth.run("stop", session, "--wait")).stdout

    assert "paused" in (await hearth.run("queue", "list", session)).stdout
    listing = (await hearth.run("sessions")).stdout
    (line,) = [line for line in listing.splitlines() if line.startswith(f"demo/{session}")]
    assert "stopped" in line
    assert "1 paused" in line
    resumed = (await hearth.run("queue", "resume", session, "--json")).json()
    assert resumed["started"]["execution"]["execution_id"] != execution
    assert (await hearth.run("queue", "resume", session)).code == 0


async def test_kill_empties_all_and_the_session_goes_on_cold(hearth: Hearth) -> None:
    session = new()
    await begun(hearth, session)
    assert (await hearth.run("send", session, "never")).code == 0
    before = await shown(hearth, session)
    killed = (await hearth.run("kill", session, "--json")).json()
    assert int(killed["epoch"]) > int(before["epoch"])
    assert "queued_inputs" not in killed
    assert "killed" in (await hearth.run("kill", session)).stdout
    assert "input.removed" in await types(hearth, session)
    again = await hearth.run("send", session, "hello", "--wait")
    assert again.code == 0
    assert "cold" in again.stdout


async def test_what_is_asked_is_listed_and_answered(hearth: Hearth) -> None:
    session = new()
    asking = 'parallel ask search {"for": "hearths"}\nparallel ask remove {"path": "all"}\nparallel ask look {}'
    await begun(hearth, session, asking, "--permissions", "ask,look=allow")

    async def asked() -> Any:
        found = (await hearth.run("gates", session, "--json")).json()["interactions"]
        return found if len(found) == 2 else None

    gates = {gate["request"]["tool_name"]: gate for gate in await eventually(asked)}
    assert set(gates) == {"search", "remove"}
    assert gates["search"]["session"] == {"project": "demo", "session": session}
    assert gates["search"]["request"]["tool_call_id"] != gates["search"]["interaction_id"]
    table = (await hearth.run("gates")).stdout
    assert gates["remove"]["interaction_id"] in table
    assert "pending" in table

    unclear = await hearth.run("answer", session, "--allow")
    assert unclear.code == 2
    assert gates["search"]["interaction_id"] in unclear.stderr
    search = gates["search"]["interaction_id"]
    answered = (await hearth.run("answer", session, search[:13], "--allow", "--by", "ann", "--json")).json()
    assert answered["interactions"][0]["answered_by"] == "ann"
    assert answered["still_open"] == 1
    late = await hearth.run("answer", session, search, "--deny")
    assert late.code == 4
    assert "INTERACTION_CLOSED" in late.stderr
    assert "denied remove" in (await hearth.run("answer", session, "--deny", "--all")).stdout
    assert (await hearth.run("answer", session, "--deny")).code == 4

    async def over() -> bool:
        return "execution.completed" in await types(hearth, session)

    await eventually(over)
    log = [item["event"] for item in (await hearth.run("history", session, "--json")).lines()]
    ran = {
        event["tool_completed"]["name"]: event["tool_completed"]["status"]
        for event in log
        if event["type"] == "tool.completed"
    }
    assert ran["search"] == ran["look"] == "TOOL_STATUS_SUCCEEDED"
    assert ran["remove"] == "TOOL_STATUS_DENIED"
    assert (await hearth.run("gates", session)).stdout.strip() == "nobody is asked anything"
    everything = (await hearth.run("gates", session, "--all")).stdout
    assert "denied, consumed" in everything
    assert "ann" in everything


async def test_a_question_is_answered_in_words(hearth: Hearth) -> None:
    session = new()
    await begun(hearth, session, 'hearth-ask {"prompt": "which colour?"}')

    async def asked() -> Any:
        return "which colour?" in (await hearth.run("gates", session)).stdout

    await eventually(asked)
    assert (await hearth.run("answer", session, "--text", "blue")).code == 0

    async def over() -> bool:
        return "execution.completed" in await types(hearth, session)

    await eventually(over)
    assert "blue" in (await hearth.run("history", session)).stdout


async def test_wrong_use_and_refusals_say_what_to_do(hearth: Hearth) -> None:
    session = new()
    for command in (("queue", "list", session), ("stop", session), ("gates", session), ("sessions", session)):
        refused = await hearth.run(*command)
        assert (refused.code, "SESSION_NOT_FOUND" in refused.stderr) == (4, True), refused.stderr
    assert (await hearth.run("answer", session)).code == 2
    assert (await hearth.run("answer", session, "--allow", "--deny")).code == 2
    assert (await hearth.run("answer", session, "x", "--allow", "--all")).code == 2
    assert (await hearth.run("send", session, "x", "--permissions", "maybe")).code == 2
    assert (await hearth.run("send", session, "hello", "--wait")).code == 0
    assert (await hearth.run("queue", "remove", session, "abc")).code == 2
    unknown = await hearth.run("answer", session, str(uuid.uuid4()), "--allow")
    assert (unknown.code, "INTERACTION_NOT_FOUND" in unknown.stderr) == (4, True), unknown.stderr
    assert (await hearth.run("sessions", "--project", "nobody")).stdout.strip() == "no sessions"
