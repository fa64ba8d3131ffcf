"""C4: what waits is visible in its order, may be changed by its owner until it runs, and runs once; what pauses the
queue, and what lets it go on."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, session_pb2
from tests.contract.pool.control import (
    Database,
    busy,
    edit,
    inputs,
    quiet,
    remove,
    resume,
    started,
    waiting,
)
from tests.contract.pool.house import Backend, House, agent_log_of, frozen, is_ending, key, text_content
from tests.contract.pool.refusals import refused
from tests.contract.pool.test_attachments import put


@pytest.fixture(scope="module")
def house(shared_house: House) -> House:
    """The one that modules share."""
    return shared_house


async def test_n89_n111_a_session_at_work_refuses_or_queues_and_an_idle_one_starts(
    backend: Backend, database: Database
) -> None:
    session = key()
    running = await busy(backend, session)
    error = await refused(backend.send(session, "now or never", on_busy=sessions.ON_BUSY_REJECT))
    assert (error.reason, error.metadata["execution_id"]) == ("SESSION_BUSY", running.execution_id)
    assert await database.fetchval("SELECT count(*) FROM pool.input WHERE session = $1", session.session) == 1
    assert (await backend.send(session, "waits")).queued.rank == 1
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)
    sent = await backend.send(session, "hello", on_busy=sessions.ON_BUSY_REJECT)
    assert sent.HasField("started")
    await quiet(backend, session, 3)


async def test_n112_each_turn_that_completes_starts_one_more(backend: Backend) -> None:
    session = key()
    first = (await backend.send(session, "sleep 0.3")).started.input_id
    queued = [(await backend.send(session, f"hello {number}")).queued.input_id for number in range(5)]
    events = await quiet(backend, session, 6)
    assert started(events) == [first, *queued]
    promoted = [event.input_promoted.input_id for event in events if event.HasField("input_promoted")]
    assert promoted == queued
    # One after the other: no turn begins before the one before it has ended.
    open_turns = 0
    for event in events:
        open_turns += event.HasField("execution_started") - is_ending(event, event.execution_id)
        assert open_turns in {0, 1}


async def test_n114_a_stop_and_a_failure_start_nothing_of_what_waits(backend: Backend) -> None:
    for text, stop in (("stream 6000 words at 60/s", True), ("sleep 0.5\nerror broken", False)):
        session = key()
        running = await busy(backend, session, text)
        queued = [(await backend.send(session, f"hello {number}")).queued.input_id for number in range(2)]
        if stop:
            await backend.stop(session, running.execution_id)
        settled = await backend.settled(session, running.execution_id)
        expected = sessions.EXECUTION_OUTCOME_STOPPED if stop else sessions.EXECUTION_OUTCOME_FAILED
        assert settled.outcome == expected
        shown = await backend.session(session)
        assert (shown.queue_paused, shown.execution.execution_id) == (True, running.execution_id)
        assert await waiting(backend, session) == queued
        # Only the head starts by resuming; the rest follows it.
        assert (await resume(backend, session)).started.input_id == queued[0]
        assert not (await backend.session(session)).queue_paused
        assert started(await quiet(backend, session, 3))[1:] == queued


async def test_resuming_before_a_stop_has_its_answer_counts(backend: Backend, house: House) -> None:
    session = key()
    running = await busy(backend, session)
    queued = (await backend.send(session, "waits")).queued.input_id
    with frozen(house, "history"):
        await backend.stop(session, running.execution_id)
        assert not (await resume(backend, session)).HasField("started")
        assert not (await backend.session(session)).queue_paused
    events = await quiet(backend, session, 2)
    assert started(events)[1:] == [queued]
    assert (await backend.execution(session, running.execution_id)).outcome == sessions.EXECUTION_OUTCOME_STOPPED


async def test_n120_n121_what_waits_is_removed_and_edited_until_it_runs(backend: Backend) -> None:
    session, other = key(), key()
    running = await busy(backend, session)
    request = calls.SendInputRequest(session=session, request_id="edited", content=text_content("first words"))
    kept = (await backend.sessions.SendInput(request)).queued.input_id
    gone = (await backend.send(session, "not this")).queued.input_id
    last = (await backend.send(session, "last")).queued.input_id
    edited = await edit(backend, session, kept, "second words")
    assert (edited.input_id, edited.rank, edited.state) == (kept, 1, sessions.INPUT_STATE_PENDING)
    # The request that made it still answers, although the words are others by now.
    assert (await backend.sessions.SendInput(request)).queued.input_id == kept
    assert (await remove(backend, session, gone)).state == sessions.INPUT_STATE_REMOVED
    assert await waiting(backend, session) == [kept, last]
    for call in (remove(backend, session, gone), edit(backend, session, gone, "x")):
        error = await refused(call)
        assert (error.reason, error.metadata["state"]) == ("INPUT_NOT_PENDING", "REMOVED")
    # In another session nobody knows of it.
    await backend.run(other, "hello")
    for call in (remove(backend, other, kept), edit(backend, other, kept, "x")):
        assert (await refused(call)).reason == "INPUT_NOT_FOUND"
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)
    await resume(backend, session)
    events = await quiet(backend, session, 3)
    for call in (remove(backend, session, kept), edit(backend, session, kept, "x")):
        error = await refused(call)
        assert (error.reason, error.metadata["state"]) == ("INPUT_NOT_PENDING", "PROMOTED")
    assert _words(events, kept) == "second words"
    assert started(events)[1:] == [kept, last]


async def test_n121_an_edit_keeps_name_and_place_and_the_files_that_it_names_again(backend: Backend) -> None:
    session = key()
    running = await busy(backend, session)
    file, more = await put(backend, session, b"one"), await put(backend, session, b"two", name="more.txt")
    queued = (await backend.send(session, "waits", files=[file])).queued.input_id
    behind = (await backend.send(session, "behind")).queued.input_id
    content = [
        *text_content("edited"),
        *(content_pb2.ContentPart(attachment=one) for one in (file, more)),
    ]
    request = calls.UpdateInputRequest(session=session, request_id="edit", input_id=queued, content=content)
    edited = [(await backend.sessions.UpdateInput(request)).input for _ in range(2)]
    assert edited[0] == edited[1]
    assert (edited[0].input_id, edited[0].rank) == (queued, 1)
    assert [part.attachment.name for part in edited[0].content[1:]] == ["notes.txt", "more.txt"]
    assert await waiting(backend, session) == [queued, behind]
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)


async def test_a_promoted_input_that_has_not_started_is_visible_and_can_be_stopped(
    backend: Backend, house: House
) -> None:
    session = key()
    running = await busy(backend, session)
    queued = (await backend.send(session, "waits")).queued.input_id
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)
    await backend.idle_entry(session)
    with frozen(house, "sandbox"):
        promoted = (await resume(backend, session)).started.execution
        (listed,) = await inputs(backend, session)
        assert (listed.input_id, listed.state, listed.rank) == (queued, sessions.INPUT_STATE_PROMOTED, 0)
        assert listed.execution_id == promoted.execution_id
        with frozen(house, "history"):
            command = await backend.stop(session, promoted.execution_id)
            # Until its end is known to readers it is still there.
            assert [one.input_id for one in await inputs(backend, session)] == [queued]
        settled = await backend.settled(session, promoted.execution_id)
    assert (settled.outcome, settled.HasField("started_at")) == (sessions.EXECUTION_OUTCOME_STOPPED, False)
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    assert not await inputs(backend, session)


async def test_edits_and_removals_race_with_the_promotion_and_each_learns_what_became(backend: Backend) -> None:
    """Either it was changed and runs so, or was removed and never runs, or the caller is told that it runs."""
    session, outcomes = key(), set()
    await backend.run(session, "hello")
    executions = 1
    for number in range(8):
        await backend.send(session, "sleep 0.1")
        queued = (await backend.send(session, "as sent")).queued.input_id
        await asyncio.sleep(0.03 * number)
        removing = number % 2
        call = remove(backend, session, queued) if removing else edit(backend, session, queued, "as edited")
        (answer,) = await asyncio.gather(call, return_exceptions=True)
        late = isinstance(answer, BaseException)
        outcomes.add(late)
        executions += 1 if removing and not late else 2
        events = await quiet(backend, session, executions)
        if removing:
            assert (queued in started(events)) is late
        else:
            assert _words(events, queued) == ("as sent" if late else "as edited")
    assert outcomes


async def test_n118_a_retry_of_a_queued_message_names_the_execution_that_ran_it(backend: Backend) -> None:
    session, request_id = key(), str(uuid.uuid4())
    await backend.send(session, "sleep 0.2")
    queued = (await backend.send(session, "hello", request_id=request_id)).queued.input_id
    events = await quiet(backend, session, 2)
    again = (await backend.send(session, "hello", request_id=request_id)).started
    ran = [event.execution_id for event in events if event.execution_started.input_id == queued]
    assert (again.input_id, [again.execution.execution_id]) == (queued, ran)


async def test_n122_one_request_sent_many_times_at_once_reaches_its_agent_once(backend: Backend, house: House) -> None:
    session, spec = key(), sessions.SessionSpec(agent="logged")
    answers = await asyncio.gather(*(backend.send(session, "hello", request_id="same", spec=spec) for _ in range(5)))
    (execution_id,) = {answer.started.execution.execution_id for answer in answers}
    await backend.settled(session, execution_id)
    lines = [json.loads(line) for line in agent_log_of(house.directory).read_text().splitlines()]
    prompts = [line for line in lines if line["event"] == "prompt" and line["message_id"] == execution_id]
    assert len(prompts) == 1
    assert started(await backend.events(session)) == [answers[0].started.input_id]


async def test_n95_queues_of_one_session_id_in_two_projects_are_two(backend: Backend) -> None:
    one = key()
    other = session_pb2.SessionKey(project="umbrella", session=one.session)
    running = await asyncio.gather(busy(backend, one), busy(backend, other))
    mine = (await backend.send(one, "waits")).queued.input_id
    assert await waiting(backend, one) == [mine]
    assert await waiting(backend, other) == []
    await backend.stop(one, running[0].execution_id)
    await backend.settled(one, running[0].execution_id)
    assert (await backend.execution(other, running[1].execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    assert not (await backend.session(other)).queue_paused
    await backend.stop(other, running[1].execution_id)
    await backend.settled(other, running[1].execution_id)


def _words(events: object, input_id: str) -> str:
    found = [
        event.message_completed.content[0].text.text
        for event in events  # type: ignore[attr-defined]
        if event.entity_id == input_id and event.message_completed.role == content_pb2.ROLE_USER
    ]
    assert len(found) <= 1
    return "".join(found)
