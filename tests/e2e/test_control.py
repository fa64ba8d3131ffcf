"""`hearth stop`, `kill`, `queue`, `gates`, `answer` and `sessions`, as somebody uses them while agents work."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hearth.client import Addresses, Client, session_key
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2
from tests.contract.pool.house import eventually
from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = "stream 3000 words at 40/s"


def new() -> str:
    return f"control-{uuid.uuid4().hex[:8]}"


@pytest_asyncio.fixture(loop_scope="session")
async def client(hearth: Hearth) -> AsyncIterator[Client]:
    """What the commands did is looked at without them."""
    where = hearth.addresses()
    addresses = Addresses(**{name: where[name] for name in ("pool", "history", "relay", "sandbox")})
    async with Client(addresses) as found:
        yield found


async def begun(hearth: Hearth, client: Client, session: str, text: str = LONG, *options: str) -> str:
    """Send a message that the agent works on; its execution."""
    sent = (await hearth.run("send", session, text, "--json", *options)).json()
    execution: str = sent["started"]["execution"]["execution_id"]

    async def running() -> bool:
        state = (await client.get_execution(session_key("demo", session), execution)).state
        return state in (control_pb2.EXECUTION_STATE_RUNNING, control_pb2.EXECUTION_STATE_WAITING)

    await eventually(running)
    return execution


async def log_of(client: Client, session: str) -> list[event_pb2.Event]:
    return [item.event async for item in client.history(session_key("demo", session))]


async def asked(client: Client, session: str, number: int) -> bool:
    """Whether so many interactions wait for an answer."""
    return len([found async for found in client.interactions(session_key("demo", session))]) == number


async def types(client: Client, session: str) -> list[str]:
    return [event.type for event in await log_of(client, session)]


@pytest.mark.exhaustive
async def test_what_waits_is_listed_changed_taken_out_and_run_first(hearth: Hearth, client: Client) -> None:
    session = new()
    first = await begun(hearth, client, session)
    inputs = []
    for text in ("one", "two", "three"):
        sent = await client.send(session_key("demo", session), text)
        inputs.append(sent.queued.input_id)
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
        return (await types(client, session)).count("execution.completed") == 2

    await eventually(both_ran)
    log = await log_of(client, session)
    promoted = [event.input_promoted.input_id for event in log if event.HasField("input_promoted")]
    assert promoted == [inputs[2], inputs[1]]
    assert [event.execution_stopped.reason for event in log if event.HasField("execution_stopped")] == ["steer"]
    assert (await hearth.run("queue", "list", session)).stdout.strip() == "nothing waits"


async def test_a_stop_says_what_came_of_it_and_the_queue_waits_for_resume(hearth: Hearth, client: Client) -> None:
    session = new()
    execution = await begun(hearth, client, session)
    later = asyncio.create_task(hearth.run("send", session, "later", "--wait"))

    async def waits() -> bool:
        return (await client.get_session(session_key("demo", session))).queued_inputs == 1

    await eventually(waits)
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
    # Who waits for a message that waits sees its answer, not what ran before.
    finished = await later
    assert (finished.code, "queued at 1" in finished.stdout, "completed" in finished.stdout) == (0, True, True)


async def test_kill_empties_all_and_the_session_goes_on_cold(hearth: Hearth, client: Client) -> None:
    session = new()
    await begun(hearth, client, session)
    await client.send(session_key("demo", session), "never")
    before = (await hearth.run("sessions", session, "--json")).json()
    killed = (await hearth.run("kill", session, "--json")).json()
    assert int(killed["epoch"]) > int(before["epoch"])
    assert "queued_inputs" not in killed
    assert "killed" in (await hearth.run("kill", session)).stdout
    assert "input.removed" in await types(client, session)
    again = await hearth.run("send", session, "hello", "--wait")
    assert again.code == 0
    assert "cold" in again.stdout


async def test_an_option_changes_what_it_names_and_the_rest_of_the_spec_stays(hearth: Hearth, client: Client) -> None:
    session = new()
    key = session_key("demo", session)
    spec = control_pb2.SessionSpec(agent="scripted", instructions="Be brief.")
    await client.send(key, "hello", spec=spec)
    for policy, action in (("ask", control_pb2.PERMISSION_ACTION_ASK), ("deny", control_pb2.PERMISSION_ACTION_DENY)):
        assert (await hearth.run("send", session, "hello", "--permissions", policy, "--wait")).code == 0
        spec.permissions.default_action = action
        assert (await client.get_session(key)).spec == spec
    assert (await hearth.run("send", session, "hello", "--agent", "scripted", "--wait")).code == 0
    assert (await client.get_session(key)).spec == spec


async def test_a_watch_until_the_end_of_a_turn_that_has_ended_leaves(hearth: Hearth) -> None:
    session = new()
    assert (await hearth.run("send", session, "hello", "--wait")).code == 0
    watched = await hearth.run("watch", session, "--after", "1", "--until-end")
    assert watched.code == 0
    assert "execution.completed" in watched.stdout


async def test_what_is_asked_is_listed_and_answered(hearth: Hearth, client: Client) -> None:
    session = new()
    asking = 'parallel ask search {"for": "hearths"}\nparallel ask remove {"path": "all"}\nparallel ask look {}'
    await begun(hearth, client, session, asking, "--permissions", "ask,look=allow")

    await eventually(lambda: asked(client, session, 2))
    listed = (await hearth.run("gates", session, "--json")).json()["interactions"]
    gates = {gate["request"]["tool_name"]: gate for gate in listed}
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
        return "execution.completed" in await types(client, session)

    await eventually(over)
    completed = [event.tool_completed for event in await log_of(client, session) if event.HasField("tool_completed")]
    ran = {tool.name: tool.status for tool in completed}
    assert ran["search"] == ran["look"] == event_pb2.TOOL_STATUS_SUCCEEDED
    assert ran["remove"] == event_pb2.TOOL_STATUS_DENIED
    assert (await hearth.run("gates", session)).stdout.strip() == "nobody is asked anything"
    everything = (await hearth.run("gates", session, "--all")).stdout
    assert "denied, consumed" in everything
    assert "ann" in everything


async def test_a_question_is_answered_in_words(hearth: Hearth, client: Client) -> None:
    session = new()
    await begun(hearth, client, session, 'hearth-ask {"prompt": "which colour?"}')

    await eventually(lambda: asked(client, session, 1))
    assert "which colour?" in (await hearth.run("gates", session)).stdout
    assert (await hearth.run("answer", session, "--text", "blue")).code == 0

    async def over() -> bool:
        return "execution.completed" in await types(client, session)

    await eventually(over)
    assert "blue" in (await hearth.run("history", session)).stdout


async def test_refusals_say_what_to_do(hearth: Hearth, client: Client) -> None:
    session = new()
    for command in (("queue", "list", session), ("gates", session)):
        refused = await hearth.run(*command)
        assert (refused.code, "SESSION_NOT_FOUND" in refused.stderr) == (4, True), refused.stderr
    await client.send(session_key("demo", session), "hello")
    assert (await hearth.run("queue", "remove", session, "abc")).code == 2
    unknown = await hearth.run("answer", session, str(uuid.uuid4()), "--allow")
    assert (unknown.code, "INTERACTION_NOT_FOUND" in unknown.stderr) == (4, True), unknown.stderr
    assert (await hearth.run("sessions", "--project", "nobody")).stdout.strip() == "no sessions"
