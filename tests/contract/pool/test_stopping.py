"""C2, C3: a Stop ends what its sender meant, or nothing, and says truly what came of it; the agent stays for more."""

from __future__ import annotations

import asyncio
import json
import uuid

import psutil

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, frozen, key, summary
from tests.contract.pool.refusals import refused


def agent_of(event: event_pb2.Event) -> dict[str, object]:
    """What the agent reported of itself."""
    report: dict[str, dict[str, object]] = json.loads(summary(event).agent_report_json)
    return report["hearth.dev/agent"]


async def running(backend: Backend, session: object, execution_id: str) -> None:
    """Wait until the agent was asked."""

    async def found() -> bool:
        execution = await backend.execution(session, execution_id)  # type: ignore[arg-type]
        return execution.state == sessions.EXECUTION_STATE_RUNNING

    await eventually(found)


async def test_a_running_turn_stops_and_its_agent_takes_the_next_one(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    sent = await backend.send(session, "stream 3000 words at 100/s")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    await asyncio.sleep(0.2)

    command = await backend.stop(session, execution_id)
    assert command.execution_id == execution_id
    ending = await backend.ending(session, execution_id, timeout=6)

    assert ending.execution_stopped.reason == "user"
    assert ending.execution_stopped.command_id == command.command_id
    assert (await backend.settled(session, execution_id)).outcome == sessions.EXECUTION_OUTCOME_STOPPED
    settled = await backend.command(session, command.command_id)
    assert settled.state == sessions.COMMAND_STATE_APPLIED
    assert settled.outcome == sessions.COMMAND_OUTCOME_STOPPED
    # What was said so far is kept, in one set with the ending.
    events = await backend.events(session)
    cut = [event for event in events if event.execution_id == execution_id and event.HasField("message_completed")]
    assert cut[-1].message_completed.finish_reason == "stopped"
    assert events[-2:] == [cut[-1], ending]

    last = await backend.run(session, "what is my name?")
    assert summary(last).how == "warm"
    assert agent_of(last)["pid"] == agent_of(first)["pid"]
    assert "Ada" in agent_text(await backend.events(session), last.execution_id)


async def test_an_open_tool_call_is_cancelled_in_one_set_with_the_ending(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "run sleep 60")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    await asyncio.sleep(0.3)
    await backend.stop(session, execution_id)
    await backend.ending(session, execution_id, timeout=6)
    events = await backend.events(session)
    tools = [event.tool_completed for event in events if event.HasField("tool_completed")]
    assert [tool.status for tool in tools] == [event_pb2.TOOL_STATUS_CANCELLED]
    assert events[-1].HasField("execution_stopped")


async def test_what_a_stopped_turn_started_does_not_go_on(backend: Backend) -> None:
    session = key()
    await backend.run(session, "hello")
    mark = f"{7000 + uuid.uuid4().int % 1000}.25"
    sent = await backend.send(session, f"leave-child {mark}\nhang")
    execution_id = sent.started.execution.execution_id
    await eventually(lambda: _children(mark))
    await backend.stop(session, execution_id)
    ending = await backend.ending(session, execution_id, timeout=6)
    assert ending.HasField("execution_stopped")
    assert not await _children(mark)
    # Nothing is left, so the agent could be kept.
    assert summary(await backend.run(session, "hello")).how == "warm"


async def _children(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if mark in command and "sleep" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


async def test_an_agent_that_ignores_the_cancel_is_ended(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "who are you?")
    sent = await backend.send(session, "hang-hard")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    command = await backend.stop(session, execution_id)
    ending = await backend.ending(session, execution_id, timeout=15)
    assert ending.execution_stopped.reason == "user"
    assert not psutil.pid_exists(int(str(agent_of(first)["pid"])))
    await backend.settled(session, execution_id)
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    after = await backend.run(session, "hello")
    assert summary(after).how == "cold"


async def test_idle_and_wrong_aims(backend: Backend) -> None:
    session = key()
    unknown = await refused(backend.stop(session, str(uuid.uuid4())))
    assert unknown.reason == "SESSION_NOT_FOUND"
    done = await backend.run(session, "hello")
    await backend.settled(session, done.execution_id)

    idle = await backend.stop(session, done.execution_id, request_id="idle")
    assert (idle.state, idle.outcome) == (sessions.COMMAND_STATE_OBSOLETE, sessions.COMMAND_OUTCOME_NOT_RUNNING)

    sent = await backend.send(session, "sleep 3")
    current = sent.started.execution
    by_id = await refused(backend.stop(session, done.execution_id))
    by_epoch = await refused(backend.stop(session, seen_epoch=current.epoch - 1))
    for error in (by_id, by_epoch):
        assert error.reason == "EXECUTION_MISMATCH"
        assert error.metadata["execution_id"] == current.execution_id
    # A retry of the idle Stop answers as before, and does not reach what runs now.
    assert await backend.stop(session, done.execution_id, request_id="idle") == idle
    assert (await backend.execution(session, current.execution_id)).state != sessions.EXECUTION_STATE_STOPPING

    await running(backend, session, current.execution_id)
    await backend.stop(session, seen_epoch=current.epoch)
    assert (await backend.ending(session, current.execution_id, timeout=6)).HasField("execution_stopped")


async def test_stops_of_one_execution_share_a_command_and_keep_their_keys(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "stream 1000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    commands = await asyncio.gather(
        *(backend.stop(session, execution_id, request_id=f"stop-{number % 3}") for number in range(6))
    )
    assert len({command.command_id for command in commands}) == 1
    await backend.settled(session, execution_id)
    again = await backend.stop(session, execution_id, request_id="stop-2")
    assert again.command_id == commands[0].command_id
    assert again.outcome == sessions.COMMAND_OUTCOME_STOPPED


async def test_a_stop_before_the_agent_is_asked_ends_it_without_one(backend: Backend, house: House) -> None:
    session = key()
    with frozen(house, "sandbox"):
        sent = await backend.send(session, "hello")
        execution_id = sent.started.execution.execution_id
        command = await backend.stop(session, execution_id)
        ending = await backend.ending(session, execution_id, timeout=5)
    assert ending.execution_stopped.reason == "user"
    assert ending.execution_stopped.command_id == command.command_id
    assert summary(ending).manifest.runner_events == 0
    settled = await backend.settled(session, execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_STOPPED
    assert not settled.HasField("started_at")
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    events = await backend.events(session)
    assert not any(event.message_completed.role == content_pb2.ROLE_AGENT for event in events)
    assert summary(await backend.run(session, "hello")).how == "cold"


async def test_a_stop_pauses_the_queue_until_somebody_goes_on(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "stream 1000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    waiting = [await backend.send(session, f"waiting {number}") for number in range(2)]
    await running(backend, session, execution_id)
    await backend.stop(session, execution_id)
    await backend.settled(session, execution_id)
    shown = await backend.session(session)
    assert (shown.queue_paused, shown.queued_inputs) == (True, 2)

    # The next message runs first, and wakes the others.
    sent = await backend.send(session, "first of all")
    assert sent.HasField("started")
    assert list(sent.resumed_input_ids) == [one.queued.input_id for one in waiting]

    async def all_ended() -> bool:
        return sum(event.HasField("execution_completed") for event in await backend.events(session)) == 3

    await eventually(all_ended)
    started = [e.execution_started.input_id for e in await backend.events(session) if e.HasField("execution_started")]
    assert started[1:] == [sent.started.input_id, *(one.queued.input_id for one in waiting)]


async def test_resume_queue_starts_its_head_once(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "stream 1000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    waiting = await backend.send(session, "sleep 1")
    await running(backend, session, execution_id)
    await backend.stop(session, execution_id)
    await backend.settled(session, execution_id)
    request = calls.ResumeQueueRequest(session=session, request_id="go on")
    answers = await asyncio.gather(*(backend.sessions.ResumeQueue(request) for _ in range(3)))
    assert {answer.started.input_id for answer in answers} == {waiting.queued.input_id}
    assert len({answer.started.execution.execution_id for answer in answers}) == 1
    await backend.settled(session, answers[0].started.execution.execution_id)
    nothing = await backend.sessions.ResumeQueue(calls.ResumeQueueRequest(session=session, request_id="again"))
    assert not nothing.HasField("started")


async def test_a_stop_that_comes_too_late_says_so_and_pauses_the_queue(backend: Backend) -> None:
    """However the race goes, the command's outcome is that of the ending."""
    outcomes = set()
    for number in range(8):
        session = key()
        sent = await backend.send(session, "hello")
        await backend.send(session, "waits")
        execution_id = sent.started.execution.execution_id
        await asyncio.sleep(0.01 * number)
        command = await backend.stop(session, execution_id, request_id="stop")
        if command.outcome == sessions.COMMAND_OUTCOME_NOT_RUNNING:
            continue
        settled = await backend.settled(session, execution_id)
        outcome = (await backend.command(session, command.command_id)).outcome
        outcomes.add(outcome)
        stopped = settled.outcome == sessions.EXECUTION_OUTCOME_STOPPED
        expected = sessions.COMMAND_OUTCOME_STOPPED if stopped else sessions.COMMAND_OUTCOME_NOT_RUNNING
        assert outcome == expected
        shown = await backend.session(session)
        assert (shown.queue_paused, shown.queued_inputs) == (True, 1)
    assert outcomes


async def test_kill_ends_everything_and_the_session_goes_on_cold(backend: Backend) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    sent = await backend.send(session, "stream 3000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    waiting = await backend.send(session, "waits")
    await running(backend, session, execution_id)
    request = calls.KillSessionRequest(session=session, request_id="kill")
    killed = (await backend.sessions.KillSession(request)).session
    assert killed.epoch > sent.started.execution.epoch
    assert killed.queued_inputs == 0
    ending = await backend.ending(session, execution_id)
    assert ending.execution_stopped.reason == "killed"
    events = await backend.events(session)
    assert [e.input_removed.input_id for e in events if e.HasField("input_removed")] == [waiting.queued.input_id]
    assert not await backend.running_sandboxes(session)

    after = await backend.run(session, "hello")
    assert summary(after).how == "cold"
    # A retry is an answer, not another kill.
    epoch = (await backend.session(session)).epoch
    again = (await backend.sessions.KillSession(request)).session
    assert again.epoch == epoch
    assert (await backend.idle_entry(session)) is not None


async def test_delete_leaves_a_tombstone(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "stream 3000 words at 50/s")
    await running(backend, session, sent.started.execution.execution_id)
    request = calls.DeleteSessionRequest(session=session, request_id="delete")
    await backend.sessions.DeleteSession(request, timeout=30)
    await backend.sessions.DeleteSession(request, timeout=30)
    assert not await backend.running_sandboxes(session)
    for call in (
        backend.send(session, "hello"),
        backend.session(session),
        backend.stop(session, sent.started.execution.execution_id),
        backend.sessions.RemoveInput(
            calls.RemoveInputRequest(session=session, request_id="x", input_id=str(uuid.uuid4()))
        ),
    ):
        assert (await refused(call)).reason == "SESSION_DELETED"
