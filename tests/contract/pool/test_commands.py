"""C2, C3: a Stop is durable, aimed and delivered once; whoever asks again, or asks too late, is told how it stands."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.control import Database, busy, quiet, running, started, steer, waiting
from tests.contract.pool.house import Backend, House, agent_log_of, eventually, frozen, key, summary
from tests.contract.pool.refusals import refused

LOGGED = sessions.SessionSpec(agent="logged")
ASKING = sessions.SessionSpec(
    agent="logged", permissions=sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ASK)
)
OPEN = (sessions.COMMAND_STATE_PENDING, sessions.COMMAND_STATE_CLAIMED)


@pytest.fixture(scope="module")
def house(shared_house: House) -> House:
    """The one that modules share."""
    return shared_house


@pytest.fixture
def agent_log(house: House) -> Path:
    """Where its agents write down what reaches them."""
    return agent_log_of(house.directory)


def cancels(agent_log: Path, ending: event_pb2.Event) -> list[dict[str, Any]]:
    """What was cancelled in the agent process that answered a turn."""
    pid = json.loads(summary(ending).agent_report_json)["hearth.dev/agent"]["pid"]
    lines = [json.loads(line) for line in agent_log.read_text().splitlines()]
    return [line for line in lines if line["pid"] == pid and line["event"] == "cancel"]


async def commands(database: Database, session: session_pb2.SessionKey) -> int:
    """How many commands a session has."""
    found: int = await database.fetchval("SELECT count(*) FROM pool.command WHERE session = $1", session.session)
    return found


async def test_n01_n02_a_stop_is_accepted_with_all_it_means_and_delivered_once(
    backend: Backend, house: House, database: Database, agent_log: Path
) -> None:
    session = key()
    first = await backend.run(session, "hello", spec=LOGGED)
    execution = await busy(backend, session)
    before = await backend.session(session)
    with frozen(house, "history"):
        command = await backend.stop(session, execution.execution_id)
        assert (command.execution_id, command.kind) == (execution.execution_id, sessions.COMMAND_KIND_CANCEL)
        shown = await backend.session(session)
        # In the commit of the command; who drives it, and at which epoch, is as before.
        assert shown.execution.state == sessions.EXECUTION_STATE_STOPPING
        assert (shown.epoch, shown.holder) == (before.epoch, before.holder)
        assert shown.queue_paused
        row = await database.fetchrow(
            "SELECT driver::text, epoch FROM pool.execution WHERE execution_id = $1::uuid", execution.execution_id
        )
        assert tuple(row or ()) == (before.holder, execution.epoch)
        # Nothing starts underneath it.
        assert (await backend.send(session, "waits")).queued.rank == 1

        async def delivered() -> bool:
            return bool(cancels(agent_log, first))

        await eventually(delivered)
        for _ in range(3):
            await backend.stop(session, execution.execution_id)
    await backend.settled(session, execution.execution_id)
    assert len(cancels(agent_log, first)) == 1
    assert await commands(database, session) == 1


async def test_n03_n04_n30_what_has_nothing_to_stop_or_means_another_execution_delivers_nothing(
    backend: Backend, database: Database, agent_log: Path
) -> None:
    session = key()
    done = await backend.run(session, "hello", spec=LOGGED)
    await backend.settled(session, done.execution_id)
    idle = await backend.stop(session, done.execution_id)
    assert (idle.state, idle.outcome) == (sessions.COMMAND_STATE_OBSOLETE, sessions.COMMAND_OUTCOME_NOT_RUNNING)
    assert idle.HasField("settled_at")
    assert not (await backend.session(session)).queue_paused
    execution = await busy(backend, session)
    stored = await commands(database, session)
    for call in (
        backend.stop(session, done.execution_id, request_id="stale"),
        # n05: it was admitted after what the caller has seen, so it cannot be meant.
        backend.stop(session, seen_epoch=execution.epoch - 1, request_id="stale"),
    ):
        error = await refused(call)
        assert (error.reason, error.metadata["execution_id"]) == ("EXECUTION_MISMATCH", execution.execution_id)
    assert await commands(database, session) == stored
    assert (await backend.execution(session, execution.execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    assert not cancels(agent_log, done)
    # The id of a refused request is free.
    command = await backend.stop(session, execution.execution_id, request_id="stale")
    assert command.execution_id == execution.execution_id
    await backend.settled(session, execution.execution_id)


async def test_n06_a_stop_reaches_what_has_not_started_yet(backend: Backend, house: House) -> None:
    session = key()
    with frozen(house, "sandbox"):
        execution = (await backend.send(session, "hello")).started.execution
        assert not execution.HasField("started_at")
        command = await backend.stop(session, seen_epoch=execution.epoch)
        settled = await backend.settled(session, execution.execution_id)
    assert (settled.outcome, settled.HasField("started_at")) == (sessions.EXECUTION_OUTCOME_STOPPED, False)
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED


async def test_n08_n110_a_stop_of_a_paused_execution_closes_what_it_asks(backend: Backend) -> None:
    """Nothing runs, so nothing was stopped; what waits is not started by it, and an answer comes too late."""
    for by_epoch in (False, True):
        session = key()
        await backend.run(session, "hello", spec=ASKING)
        sent = await backend.send(session, 'ask search {"for": "x"}')
        execution = sent.started.execution
        settled = await backend.settled(session, execution.execution_id)
        assert settled.outcome == sessions.EXECUTION_OUTCOME_PAUSED
        assert (await backend.session(session)).open_interactions == 1
        queued = (await backend.send(session, "waits")).queued.input_id
        for wrong in (
            backend.stop(session, str(uuid.uuid4())),
            backend.stop(session, seen_epoch=execution.epoch - 1),
        ):
            error = await refused(wrong)
            assert (error.reason, error.metadata["execution_id"]) == ("EXECUTION_MISMATCH", execution.execution_id)
        assert (await backend.session(session)).open_interactions == 1
        command = await (
            backend.stop(session, seen_epoch=execution.epoch)
            if by_epoch
            else backend.stop(session, execution.execution_id)
        )
        assert (command.state, command.outcome) == (
            sessions.COMMAND_STATE_OBSOLETE,
            sessions.COMMAND_OUTCOME_NOT_RUNNING,
        )
        shown = await backend.session(session)
        assert (shown.open_interactions, shown.queue_paused) == (0, True)
        assert await waiting(backend, session) == [queued]

        async def told(session: session_pb2.SessionKey = session) -> list[event_pb2.InteractionResolved]:
            events = await backend.events(session)
            return [event.interaction_resolved for event in events if event.HasField("interaction_resolved")]

        (resolved,) = await eventually(told)
        assert resolved.resolution == event_pb2.INTERACTION_RESOLUTION_CANCELLED


async def test_a_steer_of_a_paused_execution_closes_what_it_asks_and_runs(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, 'ask search {"for": "x"}', spec=ASKING)
    await backend.settled(session, sent.started.execution.execution_id)
    queued = (await backend.send(session, "waits")).queued.input_id
    answer = await steer(backend, session, "hello")
    assert answer.HasField("started")
    assert (await backend.session(session)).open_interactions == 0
    events = await quiet(backend, session, 3)
    assert started(events) == [sent.started.input_id, answer.started.input_id, queued]


async def test_n09_n10_n22_stops_of_one_execution_are_one_command_under_every_key(
    backend: Backend, house: House, database: Database
) -> None:
    session = key()
    execution = await busy(backend, session)
    with frozen(house, "history"):
        found = await asyncio.gather(*(backend.stop(session, execution.execution_id) for _ in range(5)))
        assert len({command.command_id for command in found}) == 1
        assert await commands(database, session) == 1
        # Also one that means it by the epoch.
        other = await backend.stop(session, seen_epoch=execution.epoch)
        assert other.command_id == found[0].command_id
    await backend.settled(session, execution.execution_id)


async def test_n11_n12_a_settled_command_is_no_hindrance_and_its_keys_keep_naming_it(
    backend: Backend, database: Database
) -> None:
    session = key()
    execution = await busy(backend, session)
    first = await backend.stop(session, execution.execution_id, request_id="one")
    alias = await backend.stop(session, execution.execution_id, request_id="alias")
    assert alias.command_id == first.command_id
    await backend.settled(session, execution.execution_id)
    newer = await busy(backend, session)
    for request_id in ("one", "alias"):
        again = await backend.stop(session, execution.execution_id, request_id=request_id)
        assert (again.command_id, again.execution_id) == (first.command_id, execution.execution_id)
        assert again.outcome == sessions.COMMAND_OUTCOME_STOPPED
    assert (await backend.execution(session, newer.execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    second = await backend.stop(session, newer.execution_id, request_id="two")
    assert second.command_id != first.command_id
    assert await commands(database, session) == 2
    await backend.settled(session, newer.execution_id)


async def test_n13_a_key_is_refused_for_another_expectation(backend: Backend, database: Database) -> None:
    session = key()
    execution = await busy(backend, session)
    command = await backend.stop(session, execution.execution_id, request_id="one")
    for call in (
        backend.stop(session, str(uuid.uuid4()), request_id="one"),
        backend.stop(session, seen_epoch=execution.epoch, request_id="one"),
    ):
        assert (await refused(call)).reason == "REQUEST_ID_REUSED"
    assert await commands(database, session) == 1
    await backend.settled(session, execution.execution_id)
    found = await backend.command(session, command.command_id)
    assert found.outcome == sessions.COMMAND_OUTCOME_STOPPED


async def test_n25_a_stop_is_accepted_while_nothing_can_be_delivered_or_told(backend: Backend, house: House) -> None:
    session = key()
    execution = await busy(backend, session)
    with frozen(house, "sandbox"), frozen(house, "history"), frozen(house, "relay"):
        command = await backend.stop(session, execution.execution_id)
        found = await backend.command(session, command.command_id)
        assert found.state in OPEN
    settled = await backend.settled(session, execution.execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_STOPPED
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED


async def test_n29_after_a_stop_the_session_is_idle_and_its_agent_takes_the_next_turn(backend: Backend) -> None:
    session = key()
    await backend.run(session, "hello")
    execution = await busy(backend, session)
    await backend.stop(session, execution.execution_id)
    await backend.settled(session, execution.execution_id)
    await backend.idle_entry(session)
    shown = await backend.session(session)
    assert shown.execution.state == sessions.EXECUTION_STATE_TERMINAL
    assert shown.holder
    assert summary(await backend.run(session, "hello")).how == "warm"


async def test_a_stopped_turn_leaves_no_tool_call_open(backend: Backend) -> None:
    """Each that was open is told as cancelled, in one set with the ending and before it."""
    session = key()
    sent = await backend.send(session, "run sleep 61")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)

    await backend.stop(session, execution_id)
    await backend.ending(session, execution_id)
    events = [event for event in await backend.events(session) if event.execution_id == execution_id]
    assert events[-1].HasField("execution_stopped")
    tools = [event.tool_completed for event in events if event.HasField("tool_completed")]
    assert {tool.status for tool in tools} <= {event_pb2.TOOL_STATUS_CANCELLED}
    assert all(tool.name and tool.input_json for tool in tools)


async def test_n94_a_kill_closes_and_empties_everything_once_and_the_session_goes_on(backend: Backend) -> None:
    session = key()
    await backend.run(session, "hello", spec=ASKING)
    sent = await backend.send(session, 'ask search {"for": "x"}')
    paused = await backend.settled(session, sent.started.execution.execution_id)
    assert paused.outcome == sessions.EXECUTION_OUTCOME_PAUSED
    queued = (await backend.send(session, "waits")).queued.input_id
    request = calls.KillSessionRequest(session=session, request_id="kill")
    killed = [(await backend.sessions.KillSession(request, timeout=30)).session for _ in range(2)]
    assert [(one.open_interactions, one.queued_inputs) for one in killed] == [(0, 0), (0, 0)]
    assert killed[0].epoch == killed[1].epoch
    assert not await backend.running_sandboxes(session)
    events = await backend.events(session)
    assert [e.input_removed.input_id for e in events if e.HasField("input_removed")] == [queued]
    resolved = [e.interaction_resolved.resolution for e in events if e.HasField("interaction_resolved")]
    assert resolved == [event_pb2.INTERACTION_RESOLUTION_CANCELLED]
    listed = (await backend.sessions.ListSessions(calls.ListSessionsRequest(project=session.project))).sessions
    assert session in [one.session for one in listed]
    assert summary(await backend.run(session, "hello")).how == "cold"


async def test_get_command_of_another_session_is_unknown(backend: Backend) -> None:
    session, other = key(), key()
    execution = await busy(backend, session)
    await backend.run(other, "hello")
    command = await backend.stop(session, execution.execution_id)
    assert (await refused(backend.command(other, command.command_id))).reason == "COMMAND_NOT_FOUND"
    await backend.settled(session, execution.execution_id)
