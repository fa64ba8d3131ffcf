"""C1, C2, C5: an agent that asks waits for people with all that it has, goes on with each answer once, and nothing runs
that was not allowed."""

from __future__ import annotations

import asyncio
import uuid

import grpc.aio
import psutil
import pytest

from hearth.relay.v1 import relay_service_pb2, relay_service_pb2_grpc
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from tests.contract.pool.house import Backend, House, agent_log_of, agent_text, eventually, frozen, key, summary
from tests.contract.pool.people import (
    AGENT,
    ALLOWED,
    DENIED,
    Journal,
    answer,
    asked,
    interactions,
    resolved,
    state_of,
    tools_of,
)
from tests.contract.pool.refusals import refused


@pytest.fixture(scope="module")
def house(asking_house: House) -> House:
    """Services whose agents ask people, and wait for them for long."""
    return asking_house


@pytest.fixture
def journal(house: House) -> Journal:
    """What the agents wrote down."""
    return Journal(agent_log_of(house.directory))


async def sent(backend: Backend, session: session_pb2.SessionKey, text: str, **more: object) -> str:
    """Send a message that starts at once; its execution."""
    response = await backend.send(session, text, **more)  # type: ignore[arg-type]
    assert response.HasField("started"), response
    return response.started.execution.execution_id


async def in_state(
    backend: Backend, session: session_pb2.SessionKey, execution_id: str, state: sessions.ExecutionState.ValueType
) -> None:
    """Wait until an execution is in a state."""

    async def is_there() -> bool:
        return (await backend.execution(session, execution_id)).state == state

    await eventually(is_there)


async def test_w_a01_w_a08_an_approved_call_runs_once_in_the_agent_that_waited(
    backend: Backend, journal: Journal
) -> None:
    session = key()
    execution_id = await sent(backend, session, 'stream 3 words\nask deploy {"to": "prod"}\nstream 2 words')
    (card,) = await asked(backend, session)
    assert card.execution_id == execution_id
    assert (card.request.tool_name, card.request.input_json) == ("deploy", '{"to":"prod"}')
    assert [option.kind for option in card.request.options] == ["allow_once", "allow_always", "reject_once"]
    assert card.request.tool_call_id not in {"", card.interaction_id}
    await in_state(backend, session, execution_id, sessions.EXECUTION_STATE_WAITING)
    assert (await backend.session(session)).open_interactions == 1
    assert await state_of(backend, session) == "AWAITING"
    # What was said before the question is in the log before it.
    await backend.event(session, "interaction_requested")
    kinds = [e.type for e in await backend.events(session) if e.execution_id == execution_id]
    assert kinds == ["execution.started", "message.completed", "message.completed", "interaction.requested"]

    response = await answer(backend, session, {card.interaction_id: ALLOWED}, by="ada")
    assert response.interactions[0].request == card.request
    ending = await backend.ending(session, execution_id)

    assert ending.HasField("execution_completed")
    assert journal.ran(execution_id) == ["deploy"]
    assert [line["outcome"] for line in journal.of(execution_id, "permission")] == ["allow_once"]
    assert await tools_of(backend, session, execution_id) == {card.request.tool_call_id: "SUCCEEDED"}
    told = (await resolved(backend, session))[card.interaction_id]
    assert told.resolution == event_pb2.INTERACTION_RESOLUTION_CONSUMED
    assert (told.decision, told.decided_by, told.tool_call_id) == (ALLOWED, "ada", card.request.tool_call_id)
    assert (await backend.session(session)).open_interactions == 0
    # It is consumed before the result of what it allowed.
    order = [e.type for e in await backend.events(session) if e.execution_id == execution_id]
    assert order.index("interaction.answered") < order.index("interaction.resolved") < order.index("tool.completed")
    await backend.idle_entry(session)
    assert summary(await backend.run(session, "hello")).how == "warm"


async def test_an_answer_is_in_the_log_before_the_agent_hears_of_it(
    house: House, backend: Backend, journal: Journal
) -> None:
    """While the log is away it would otherwise be told of what a tool did, and then of who allowed it."""
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)

    async def consumed() -> bool:
        (one,) = await interactions(backend, session)
        return one.state == sessions.INTERACTION_STATE_CONSUMED

    with frozen(house, "history"):
        await answer(backend, session, {card.interaction_id: ALLOWED})
        await eventually(consumed)
        await asyncio.sleep(0.3)
        assert journal.ran(execution_id) == []
    await backend.ending(session, execution_id)
    assert journal.ran(execution_id) == ["deploy"]
    order = [e.type for e in await backend.events(session) if e.execution_id == execution_id]
    assert order.index("interaction.answered") < order.index("interaction.resolved") < order.index("tool.completed")


async def test_a_denial_reaches_the_live_agent_and_it_goes_on(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)
    await answer(backend, session, {card.interaction_id: DENIED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    assert journal.ran(execution_id) == []
    assert [line["outcome"] for line in journal.of(execution_id, "permission")] == ["reject_once"]
    assert await tools_of(backend, session, execution_id) == {card.request.tool_call_id: "DENIED"}
    assert "deploy was rejected." in agent_text(await backend.events(session), execution_id)
    await backend.idle_entry(session)
    assert summary(await backend.run(session, "hello")).how == "warm"


async def test_w_a04_answers_to_some_are_used_while_others_are_waited_for(backend: Backend, journal: Journal) -> None:
    session = key()
    text = 'parallel ask first {"n": 1}\nparallel ask second {"n": 2}\nparallel ask third {"n": 3}'
    execution_id = await sent(backend, session, text)
    first, second, third = await asked(backend, session, 3)
    assert [one.request.tool_name for one in (first, second, third)] == ["first", "second", "third"]
    assert len({one.request.tool_call_id for one in (first, second, third)}) == 3

    response = await answer(backend, session, {second.interaction_id: ALLOWED})
    assert response.still_open == 2

    async def second_ran() -> bool:
        return journal.ran(execution_id) == ["second"]

    await eventually(second_ran)
    assert [one.interaction_id for one in await asked(backend, session, 2)] == [
        first.interaction_id,
        third.interaction_id,
    ]
    assert (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_WAITING
    assert await state_of(backend, session) == "AWAITING"

    await answer(backend, session, {third.interaction_id: DENIED, first.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    assert sorted(journal.ran(execution_id)) == ["first", "second"]
    outcomes = {line["tool_call_id"]: line["outcome"] for line in journal.of(execution_id, "permission")}
    assert outcomes == {
        first.request.tool_call_id: "allow_once",
        second.request.tool_call_id: "allow_once",
        third.request.tool_call_id: "reject_once",
    }


async def test_questions_and_tools_of_the_client(backend: Backend, journal: Journal) -> None:
    session = key()
    text = (
        'parallel hearth-ask {"prompt": "Which?", "schema": {"type": "string"}}\n'
        'parallel hearth-client-tool {"name": "map", "input": {"a": 1}}'
    )
    execution_id = await sent(backend, session, text)
    question, tool = await asked(backend, session, 2)
    assert question.request.kind == event_pb2.INTERACTION_KIND_QUESTION
    assert (question.request.prompt, question.request.answer_schema_json) == ("Which?", '{"type":"string"}')
    assert question.request.tool_call_id == ""
    assert tool.request.kind == event_pb2.INTERACTION_KIND_CLIENT_TOOL
    assert (tool.request.tool_name, tool.request.input_json) == ("map", '{"a":1}')
    await answer(backend, session, {tool.interaction_id: '{"at": [1, 2]}', question.interaction_id: '"blue"'})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    answers = [line["answer"] for line in journal.of(execution_id, "answer")]
    assert sorted(str(one["answer"]) for one in answers) == ["blue", "{'at': [1, 2]}"]
    (completed,) = [e.tool_completed for e in await backend.events(session) if e.HasField("tool_completed")]
    assert (completed.tool_call_id, completed.name) == (tool.request.tool_call_id, "map")
    assert (completed.input_json, completed.status) == ('{"a":1}', event_pb2.TOOL_STATUS_SUCCEEDED)
    assert completed.output.replace(" ", "") == '{"at":[1,2]}'


async def test_the_same_call_asked_twice_is_decided_twice(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, 'ask deploy {"n": 1}\nask deploy {"n": 1}')
    (first,) = await asked(backend, session)
    await answer(backend, session, {first.interaction_id: ALLOWED})

    async def another() -> sessions.Interaction | None:
        waiting = [i for i in await interactions(backend, session) if i.state == sessions.INTERACTION_STATE_PENDING]
        return waiting[0] if waiting and waiting[0].interaction_id != first.interaction_id else None

    second = await eventually(another)
    assert second.request.input_digest == first.request.input_digest
    await answer(backend, session, {second.interaction_id: DENIED})
    await backend.ending(session, execution_id)
    assert journal.ran(execution_id) == ["deploy"]


async def test_w_a06_a_policy_decides_by_tool_what_people_are_asked(backend: Backend, journal: Journal) -> None:
    session = key()
    policy = sessions.PermissionPolicy(
        default_action=sessions.PERMISSION_ACTION_ASK,
        rules=[
            sessions.PermissionRule(tool="search*", action=sessions.PERMISSION_ACTION_ALLOW),
            sessions.PermissionRule(tool="remove", action=sessions.PERMISSION_ACTION_DENY),
            sessions.PermissionRule(tool="deploy", action=sessions.PERMISSION_ACTION_ASK),
        ],
    )
    text = "ask search-web {}\nask remove {}\nparallel ask deploy {}\nparallel ask other {}"
    spec = sessions.SessionSpec(agent=AGENT, permissions=policy)
    execution_id = await sent(backend, session, text, spec=spec)
    waiting = await asked(backend, session, 2)
    assert [one.request.tool_name for one in waiting] == ["deploy", "other"]
    assert journal.ran(execution_id) == ["search-web"]
    await answer(backend, session, {one.interaction_id: ALLOWED for one in waiting})
    await backend.ending(session, execution_id)
    assert sorted(journal.ran(execution_id)) == ["deploy", "other", "search-web"]
    by_policy = [r for r in (await resolved(backend, session)).values() if r.decided_by == "policy"]
    assert [one.decision for one in by_policy] == [ALLOWED, DENIED]


async def test_no_limit_runs_while_people_are_asked(backend: Backend) -> None:
    session = key()
    spec = sessions.SessionSpec(agent=AGENT)
    spec.limits.turn.FromMilliseconds(2500)
    spec.limits.idle.FromMilliseconds(1200)
    spec.limits.tool_call.FromMilliseconds(1200)
    execution_id = await sent(backend, session, "ask deploy {}\nstream 2 words", spec=spec)
    (card,) = await asked(backend, session)
    await asyncio.sleep(3)
    assert (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_WAITING
    await answer(backend, session, {card.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")


async def test_a_limit_runs_again_after_the_answer(backend: Backend) -> None:
    session = key()
    spec = sessions.SessionSpec(agent=AGENT)
    spec.limits.turn.FromMilliseconds(3000)
    execution_id = await sent(backend, session, "ask deploy {}\nhang", spec=spec)
    (card,) = await asked(backend, session)
    await answer(backend, session, {card.interaction_id: ALLOWED})
    ending = await backend.ending(session, execution_id)
    assert ending.execution_failed.code in {"TURN_LIMIT", "IDLE_LIMIT"}


async def test_w_a19_a_stop_cancels_what_waits_and_the_agent_stays(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, "parallel ask deploy {}\nparallel ask remove {}")
    cards = await asked(backend, session, 2)
    command = await backend.stop(session, execution_id)
    ending = await backend.ending(session, execution_id)
    assert (ending.execution_stopped.reason, ending.execution_stopped.command_id) == ("user", command.command_id)
    await backend.settled(session, execution_id)
    assert [line["outcome"] for line in journal.of(execution_id, "permission")] in ([], ["cancelled"] * 2)
    assert journal.ran(execution_id) == []
    assert set((await tools_of(backend, session, execution_id)).values()) == {"CANCELLED"}
    shown = await interactions(backend, session)
    assert {one.state for one in shown} == {sessions.INTERACTION_STATE_CLOSED}
    told = await resolved(backend, session)
    assert set(told) == {one.interaction_id for one in cards}
    late = await refused(answer(backend, session, {cards[0].interaction_id: ALLOWED}))
    assert late.reason == "INTERACTION_CLOSED"
    await backend.idle_entry(session)
    after = await backend.run(session, "hello")
    assert summary(after).how == "warm"
    assert journal.ran(execution_id) == journal.ran(after.execution_id) == []


async def test_a_kill_closes_what_waits(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)
    await backend.sessions.KillSession(calls.KillSessionRequest(session=session, request_id="kill"), timeout=30)
    ending = await backend.ending(session, execution_id)
    assert ending.execution_stopped.reason == "killed"
    assert (await refused(answer(backend, session, {card.interaction_id: ALLOWED}))).reason == "INTERACTION_CLOSED"
    assert journal.ran(execution_id) == []
    assert summary(await backend.run(session, "hello")).how == "cold"


async def test_w_a14_an_agent_that_dies_while_it_asks_closes_its_questions(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)
    psutil.Process(int(journal.of(execution_id, "prompt")[0]["pid"])).kill()
    ending = await backend.ending(session, execution_id)
    assert ending.execution_failed.code == "AGENT_EXITED"
    await backend.settled(session, execution_id)
    assert (await refused(answer(backend, session, {card.interaction_id: ALLOWED}))).reason == "INTERACTION_CLOSED"


async def test_inputs_wait_behind_a_question_and_run_after_it(backend: Backend) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)
    behind = await backend.send(session, "remember my name is Ada")
    assert behind.queued.rank == 1
    error = await refused(backend.send(session, "now", on_busy=sessions.ON_BUSY_REJECT))
    assert error.reason == "SESSION_BUSY"
    await answer(backend, session, {card.interaction_id: ALLOWED})
    await backend.ending(session, execution_id)

    async def it_ran() -> str | None:
        for event in await backend.events(session):
            if event.input_promoted.input_id == behind.queued.input_id:
                return event.input_promoted.execution_id
        return None

    promoted = await eventually(it_ran)
    ending = await backend.ending(session, promoted)
    assert summary(ending).how == "warm"


async def test_what_an_agent_says_while_it_asks_is_seen(backend: Backend) -> None:
    """A call that was asked for does not hold up another one."""
    session = key()
    execution_id = await sent(backend, session, "parallel ask deploy {}\nparallel run echo hello")
    (card,) = await asked(backend, session)

    async def heard() -> bool:
        tools = await tools_of(backend, session, execution_id)
        return list(tools.values()) == ["SUCCEEDED"]

    await eventually(heard)
    assert (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_WAITING
    await answer(backend, session, {card.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    said = [
        part.text.text
        for event in await backend.events(session)
        if event.message_completed.role == content_pb2.ROLE_AGENT
        for part in event.message_completed.content
    ]
    assert any("The command ended with 0: hello" in text for text in said)


async def test_w_a05_an_answer_that_fits_nothing_leaves_the_question_and_its_agent_alone(
    backend: Backend, journal: Journal
) -> None:
    session, other = key(), key()
    execution_id = await sent(backend, session, "ask deploy {}")
    await sent(backend, other, "ask remove {}")
    (card,) = await asked(backend, session)
    (foreign,) = await asked(backend, other)
    for wrong in (str(uuid.uuid4()), foreign.interaction_id, card.request.tool_call_id):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(backend, session, {wrong: ALLOWED})
        assert caught.value.code() in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}
    # Nothing of an answer is taken when a part of it cannot be.
    with pytest.raises(grpc.aio.AioRpcError):
        await answer(backend, session, {card.interaction_id: ALLOWED, foreign.interaction_id: ALLOWED})
    assert [one.interaction_id for one in await asked(backend, session)] == [card.interaction_id]
    assert await state_of(backend, session) == "AWAITING"
    await answer(backend, session, {card.interaction_id: ALLOWED})
    await backend.ending(session, execution_id)
    assert journal.ran(execution_id) == ["deploy"]
    await answer(backend, other, {foreign.interaction_id: DENIED})


async def test_w_a10_credentials_that_change_meanwhile_are_for_the_next_turn(backend: Backend) -> None:
    session = key()

    async def put(value: str) -> None:
        request = calls.PutCredentialRequest(project="acme", request_id=value, name=session.session, value=value)
        await backend.sessions.PutCredential(request, timeout=20)

    await put(f"first-{session.session}")
    spec = sessions.SessionSpec(agent=AGENT)
    spec.credentials.add(credential=session.session, target="TOKEN")
    execution_id = await sent(backend, session, "ask deploy {}", spec=spec)
    (card,) = await asked(backend, session)
    await put(f"second-{session.session}")
    await answer(backend, session, {card.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    await backend.idle_entry(session)
    assert summary(await backend.run(session, "hello")).how == "cold"


async def test_w_a11_an_agent_that_parks_after_an_answer_keeps_what_is_in_its_sandbox(backend: Backend) -> None:
    session = key()
    execution_id = await sent(backend, session, "fs-write note.txt kept\nask deploy {}")
    (card,) = await asked(backend, session)
    await answer(backend, session, {card.interaction_id: ALLOWED})
    await backend.ending(session, execution_id)
    await backend.idle_entry(session)
    after = await backend.run(session, "read note.txt")
    assert summary(after).how == "warm"
    assert "note.txt: kept" in agent_text(await backend.events(session), after.execution_id)


async def test_w_a12_a_reader_who_leaves_while_people_are_asked_changes_nothing(backend: Backend, house: House) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    async with grpc.aio.insecure_channel(house.processes["relay"].address) as channel:
        relay = relay_service_pb2_grpc.RelayServiceStub(channel)
        reading = relay.Subscribe(relay_service_pb2.SubscribeRequest(session=session))
        async for response in reading:
            if any(item.event.event.HasField("interaction_requested") for item in response.items):
                break
        reading.cancel()
    (card,) = await asked(backend, session)
    assert await state_of(backend, session) == "AWAITING"
    await answer(backend, session, {card.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
