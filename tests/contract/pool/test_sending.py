"""C1, C4: what was accepted is durable and runs once, however it is retried or raced; what was refused left nothing."""

from __future__ import annotations

import asyncio
import uuid
from typing import TypeAlias

import asyncpg
import grpc

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.contract.pool.house import Backend, eventually, is_ending, key, text_content
from tests.contract.pool.refusals import refused

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def test_a_retry_answers_the_present_state_of_the_same_execution(backend: Backend) -> None:
    session, request_id = key(), str(uuid.uuid4())
    sent = await backend.send(session, "sleep 1", request_id=request_id)
    execution_id = sent.started.execution.execution_id
    assert sent.started.execution.state == sessions.EXECUTION_STATE_PENDING

    while_it_runs = await backend.send(session, "sleep 1", request_id=request_id)
    await backend.settled(session, execution_id)
    afterwards = await backend.send(session, "sleep 1", request_id=request_id)

    assert while_it_runs.started.input_id == afterwards.started.input_id == sent.started.input_id
    assert while_it_runs.started.execution.execution_id == execution_id
    assert afterwards.started.execution.outcome == sessions.EXECUTION_OUTCOME_COMPLETED
    events = await backend.events(session)
    assert sum(event.HasField("execution_started") for event in events) == 1


async def test_a_retry_of_a_queued_input_follows_it_through_its_states(backend: Backend) -> None:
    session = key()
    first = await backend.send(session, "sleep 1")
    kept, removed = str(uuid.uuid4()), str(uuid.uuid4())
    waiting = await backend.send(session, "hello", request_id=kept)
    unwanted = await backend.send(session, "not this", request_id=removed)
    assert (waiting.queued.rank, unwanted.queued.rank) == (1, 2)

    assert (await backend.send(session, "hello", request_id=kept)).queued.rank == 1
    await backend.sessions.RemoveInput(
        calls.RemoveInputRequest(session=session, request_id="r", input_id=unwanted.queued.input_id)
    )
    assert (await backend.send(session, "not this", request_id=removed)).removed.input_id == unwanted.queued.input_id

    await backend.settled(session, first.started.execution.execution_id)
    promoted = await backend.send(session, "hello", request_id=kept)
    assert promoted.started.input_id == waiting.queued.input_id
    await backend.settled(session, promoted.started.execution.execution_id)


async def test_a_request_id_is_refused_for_other_content_and_in_another_call(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "hello", request_id="one")
    other_text = await refused(backend.send(session, "other", request_id="one"))
    other_call = await refused(backend.stop(session, sent.started.execution.execution_id, request_id="one"))
    assert {other_text.reason, other_call.reason} == {"REQUEST_ID_REUSED"}
    await backend.settled(session, sent.started.execution.execution_id)
    # Nor is anything lost of the first.
    again = await backend.send(session, "hello", request_id="one")
    assert again.started.execution.execution_id == sent.started.execution.execution_id


async def test_two_sends_of_one_request_at_once_are_one(backend: Backend) -> None:
    session = key()
    answers = await asyncio.gather(*(backend.send(session, "hello", request_id="same") for _ in range(5)))
    assert len({answer.started.input_id for answer in answers}) == 1
    await backend.settled(session, answers[0].started.execution.execution_id)
    assert sum(event.HasField("execution_started") for event in await backend.events(session)) == 1


async def test_racing_sends_run_one_after_the_other_in_the_order_of_their_ranks(backend: Backend) -> None:
    session = key()
    answers = await asyncio.gather(*(backend.send(session, f"hello {number}") for number in range(6)))
    started = [answer for answer in answers if answer.HasField("started")]
    waiting = sorted((answer.queued.rank, answer.queued.input_id) for answer in answers if answer.HasField("queued"))
    assert len(started) == 1
    assert [rank for rank, _ in waiting] == [1, 2, 3, 4, 5]

    async def all_ended() -> bool:
        return sum(event.HasField("execution_completed") for event in await backend.events(session)) == 6

    await eventually(all_ended)
    events = await backend.events(session)
    order = [event.execution_started.input_id for event in events if event.HasField("execution_started")]
    assert order == [started[0].started.input_id, *(input_id for _, input_id in waiting)]
    # No turn begins before the one before it has ended.
    running = 0
    for event in events:
        running += event.HasField("execution_started") - event.HasField("execution_completed")
        assert running in {0, 1}
    promoted = [event.input_promoted.input_id for event in events if event.HasField("input_promoted")]
    assert promoted == [input_id for _, input_id in waiting]


async def test_reject_refuses_while_something_runs_and_stores_nothing(backend: Backend, database: Database) -> None:
    session = key()
    sent = await backend.send(session, "sleep 2")
    error = await refused(backend.send(session, "hello", on_busy=sessions.ON_BUSY_REJECT, request_id="rejected"))
    assert error.reason == "SESSION_BUSY"
    assert error.metadata["execution_id"] == sent.started.execution.execution_id
    stored = await database.fetchval(
        "SELECT count(*) FROM pool.request WHERE session = $1 AND request_id = 'rejected'", session.session
    )
    assert stored == 0
    await backend.settled(session, sent.started.execution.execution_id)
    later = await backend.send(session, "hello", on_busy=sessions.ON_BUSY_REJECT, request_id="rejected")
    assert later.HasField("started")
    await backend.settled(session, later.started.execution.execution_id)


async def test_who_saw_the_ending_is_never_told_busy(backend: Backend) -> None:
    session = key()
    for _ in range(10):
        sent = await backend.send(session, "hello", on_busy=sessions.ON_BUSY_REJECT)
        execution_id = sent.started.execution.execution_id

        async def ended(execution_id: str = execution_id) -> bool:
            return any(is_ending(event, execution_id) for event in await backend.events(session))

        await eventually(ended, every=0)


async def test_a_full_queue_refuses(backend: Backend, database: Database) -> None:
    session = key()
    sent = await backend.send(session, "sleep 5")
    await asyncio.gather(*(backend.send(session, f"{number}") for number in range(100)))
    error = await refused(backend.send(session, "one too many", request_id="over"))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    page = await backend.sessions.ListInputs(calls.ListInputsRequest(session=session, page_size=60))
    rest = await backend.sessions.ListInputs(
        calls.ListInputsRequest(session=session, page_size=60, page_token=page.next_page_token)
    )
    ranks = [found.rank for found in [*page.inputs, *rest.inputs] if found.rank]
    assert ranks == list(range(1, 101))
    assert not rest.next_page_token
    await backend.stop(session, sent.started.execution.execution_id)
    await backend.settled(session, sent.started.execution.execution_id)


async def test_an_edited_input_runs_as_edited_and_only_while_it_waits(backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "sleep 1")
    waiting = await backend.send(session, "first words")
    request = calls.UpdateInputRequest(
        session=session, request_id="edit", input_id=waiting.queued.input_id, content=text_content("second words")
    )
    edited = (await backend.sessions.UpdateInput(request)).input
    again = (await backend.sessions.UpdateInput(request)).input
    assert edited == again
    assert edited.rank == 1
    await backend.settled(session, sent.started.execution.execution_id)

    async def begun() -> str:
        shown = await backend.session(session)
        mine = shown.execution.input_id == waiting.queued.input_id
        return shown.execution.execution_id if mine else ""

    execution_id = await eventually(begun)
    await backend.settled(session, execution_id)
    events = await backend.events(session)
    said = [
        event.message_completed.content[0].text.text
        for event in events
        if event.entity_id == waiting.queued.input_id and event.HasField("message_completed")
    ]
    assert said == ["second words"]
    request.request_id = "late"
    error = await refused(backend.sessions.UpdateInput(request))
    assert error.reason == "INPUT_NOT_PENDING"
    unknown = calls.RemoveInputRequest(session=session, request_id="x", input_id=str(uuid.uuid4()))
    assert (await refused(backend.sessions.RemoveInput(unknown))).reason == "INPUT_NOT_FOUND"


async def test_a_cancelled_caller_leaves_a_whole_input_or_none(backend: Backend) -> None:
    session = key()
    for number in range(15):
        call = asyncio.create_task(backend.send(session, "hello", request_id=f"r{number}"))
        await asyncio.sleep(0.0005 * number)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    # A retry of each finds the same one input, and all of them run.
    answers = [await backend.send(session, "hello", request_id=f"r{number}") for number in range(15)]
    ids = {answer.started.input_id or answer.queued.input_id for answer in answers}
    assert len(ids) == 15

    async def all_ended() -> bool:
        return sum(event.HasField("execution_completed") for event in await backend.events(session)) == 15

    await eventually(all_ended)


async def test_the_same_session_id_in_two_projects_is_two_sessions(backend: Backend) -> None:
    one, other = key(), key()
    other.session, other.project = one.session, "umbrella"
    answers = await asyncio.gather(backend.send(one, "hello", request_id="a"), backend.send(other, "x", request_id="a"))
    executions = [answer.started.execution.execution_id for answer in answers]
    assert len(set(executions)) == 2
    await asyncio.gather(backend.settled(one, executions[0]), backend.settled(other, executions[1]))
    listed = await backend.sessions.ListSessions(calls.ListSessionsRequest(project="umbrella"))
    assert [found.session.session for found in listed.sessions] == [other.session]


async def test_sessions_are_listed_newest_change_first_in_pages(backend: Backend) -> None:
    project = f"p-{uuid.uuid4().hex[:8]}"
    names = [key(str(number)) for number in range(5)]
    for session in names:
        session.project = project
        sent = await backend.send(session, "hello")
        await backend.settled(session, sent.started.execution.execution_id)
    found: list[str] = []
    token = ""
    while True:
        page = await backend.sessions.ListSessions(
            calls.ListSessionsRequest(project=project, page_size=2, page_token=token)
        )
        found += [one.session.session for one in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert found == [session.session for session in reversed(names)]
