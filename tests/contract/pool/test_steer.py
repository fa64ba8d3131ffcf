"""Steering: a message that is to run instead of what runs is saved first, waits for one cancel, and is started by that
cancel alone; whatever becomes of it, it stays visible until it runs or is removed."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.contract.pool.control import (
    Database,
    busy,
    edit,
    inputs,
    quiet,
    remove,
    resume,
    send_now,
    started,
    steer,
    waiting,
)
from tests.contract.pool.house import Backend, House, eventually, frozen, key, summary, text_content
from tests.contract.pool.refusals import refused


@pytest.fixture(scope="module")
def house(shared_house: House) -> House:
    """The one that modules share."""
    return shared_house


async def test_n115_n116_a_steer_is_saved_first_and_its_stop_starts_exactly_it(backend: Backend) -> None:
    session = key()
    await backend.run(session, "hello")
    running = await busy(backend, session)
    queued = [(await backend.send(session, f"waits {number}")).queued.input_id for number in range(2)]
    answer = (await steer(backend, session, "instead")).steered
    assert (answer.command.kind, answer.command.execution_id) == (sessions.COMMAND_KIND_STEER, running.execution_id)
    assert answer.command.outcome == sessions.COMMAND_OUTCOME_UNSPECIFIED

    ending = await backend.ending(session, running.execution_id)
    assert ending.execution_stopped.reason == "steer"
    assert ending.execution_stopped.command_id == answer.command.command_id
    # It did not pause the queue, so that goes on behind it.
    events = await quiet(backend, session, 5)
    assert started(events)[2:] == [answer.input_id, *queued]
    assert not (await backend.session(session)).queue_paused
    command = await backend.command(session, answer.command.command_id)
    assert (command.state, command.outcome) == (sessions.COMMAND_STATE_APPLIED, sessions.COMMAND_OUTCOME_STOPPED)
    told = {event.input_queued.input_id: event.input_queued.steer for event in events if event.HasField("input_queued")}
    assert told == {answer.input_id: True, queued[0]: False, queued[1]: False}
    # And its agent was kept: the turn that made way cost nobody a cold start.
    hows = [summary(event).how for event in events if event.HasField("execution_completed")]
    assert hows == ["cold", "warm", "warm", "warm"]


async def test_n115_a_steer_stays_first_and_visible_while_its_cancel_has_no_answer(
    backend: Backend, house: House
) -> None:
    session = key()
    running = await busy(backend, session)
    other = (await backend.send(session, "waits")).queued.input_id
    with frozen(house, "history"):
        answer = (await steer(backend, session, "instead", request_id="steer")).steered
        assert await waiting(backend, session) == [answer.input_id, other]
        listed = {one.input_id: one.steer for one in await inputs(backend, session)}
        assert listed == {answer.input_id: True, other: False}
        # A retry says the same, and stops nothing twice.
        again = (await steer(backend, session, "instead", request_id="steer")).steered
        assert (again.input_id, again.command.command_id) == (answer.input_id, answer.command.command_id)
        # A second one waits in the queue, and says so.
        second = await steer(backend, session, "or rather")
        assert (second.queued.rank, await waiting(backend, session)) == (
            3,
            [answer.input_id, other, second.queued.input_id],
        )
        shown = await backend.session(session)
        assert shown.execution.execution_id == running.execution_id
        assert shown.execution.state == sessions.EXECUTION_STATE_STOPPING
    events = await quiet(backend, session, 4)
    assert started(events)[1:] == [answer.input_id, other, second.queued.input_id]
    # The retry of one that has run names the execution that ran it.
    ran = (await steer(backend, session, "instead", request_id="steer")).started
    assert (ran.input_id, ran.execution.outcome) == (answer.input_id, sessions.EXECUTION_OUTCOME_COMPLETED)


async def test_n114_a_plain_stop_takes_a_steer_back_and_promotes_nothing(backend: Backend, house: House) -> None:
    session = key()
    running = await busy(backend, session)
    other = (await backend.send(session, "waits")).queued.input_id
    with frozen(house, "history"):
        steered = (await steer(backend, session, "instead")).steered
        command = await backend.stop(session, running.execution_id)
        assert command.command_id == steered.command.command_id
        assert command.kind == sessions.COMMAND_KIND_CANCEL
    await backend.settled(session, running.execution_id)
    shown = await backend.session(session)
    assert (shown.queue_paused, shown.execution.execution_id) == (True, running.execution_id)
    assert await waiting(backend, session) == [steered.input_id, other]
    assert not any(one.steer for one in await inputs(backend, session))
    # As any input of a paused queue it may be removed, and the queue resumed.
    assert (await remove(backend, session, steered.input_id)).state == sessions.INPUT_STATE_REMOVED
    assert (await resume(backend, session)).started.input_id == other
    await quiet(backend, session, 2)


async def test_a_steer_joins_a_plain_stop_that_is_under_way(backend: Backend, house: House) -> None:
    """The next message after a Stop runs first; this one says so before the Stop has its answer."""
    session = key()
    running = await busy(backend, session)
    other = (await backend.send(session, "waits")).queued.input_id
    with frozen(house, "history"):
        command = await backend.stop(session, running.execution_id)
        steered = (await steer(backend, session, "instead")).steered
        assert steered.command.command_id == command.command_id
        assert (await backend.session(session)).queue_paused
    events = await quiet(backend, session, 3)
    assert started(events)[1:] == [steered.input_id, other]
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    assert not (await backend.session(session)).queue_paused


async def test_n117_a_steer_that_comes_after_the_end_of_what_it_meant_waits_first_and_stops_nothing(
    backend: Backend, house: House, database: Database
) -> None:
    session = key()
    gone = (await backend.run(session, "hello")).execution_id
    running = await busy(backend, session)
    other = (await backend.send(session, "waits")).queued.input_id
    answer = await steer(backend, session, "instead of what has ended", meant=gone)
    assert answer.queued.rank == 1
    assert await waiting(backend, session) == [answer.queued.input_id, other]
    found = await database.fetchval("SELECT count(*) FROM pool.command WHERE session = $1", session.session)
    assert found == 0
    assert (await backend.execution(session, running.execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)
    assert (await resume(backend, session)).started.input_id == answer.queued.input_id
    await quiet(backend, session, 4)


async def test_n113_n117_a_steer_and_the_end_of_the_turn_race(backend: Backend) -> None:
    """Whichever is first: it runs next, or after what the end had started already, and nothing that it cannot have
    meant is stopped."""
    session, answers = key(), set()
    await backend.run(session, "hello")
    seen = 0
    for number in range(10):
        first = (await backend.send(session, "hello")).started
        sent = await backend.send(session, "waits")
        # It waits, or runs if the first turn is over by now.
        queued = sent.queued.input_id or sent.started.input_id
        await asyncio.sleep(0.015 * number)
        answer = await steer(backend, session, "instead")
        answers.add(answer.WhichOneof("result"))
        mine = answer.steered.input_id or answer.queued.input_id or answer.started.input_id
        events = (await quiet(backend, session, 4 + 3 * number))[seen:]
        seen += len(events)
        assert sorted(started(events)[-3:]) == sorted([first.input_id, mine, queued])
        stopped = [event.execution_id for event in events if event.HasField("execution_stopped")]
        if answer.HasField("steered"):
            command = await backend.command(session, answer.steered.command.command_id)
            assert stopped in ([], [command.execution_id])
            expected = sessions.COMMAND_OUTCOME_STOPPED if stopped else sessions.COMMAND_OUTCOME_NOT_RUNNING
            assert command.outcome == expected
            # It is next after what was to make way for it.
            order = [event.execution_started.input_id for event in events if event.HasField("execution_started")]
            target = next(
                event.execution_started.input_id
                for event in events
                if event.HasField("execution_started") and event.execution_id == command.execution_id
            )
            assert order.index(mine) == order.index(target) + 1
        else:
            assert not stopped
    assert answers


async def test_a_steer_of_an_execution_that_no_agent_has_seen_ends_that_one_without_any(
    backend: Backend, house: House
) -> None:
    session = key()
    with frozen(house, "sandbox"):
        sent = await backend.send(session, "hello")
        steered = (await steer(backend, session, "instead")).steered
        ending = await backend.ending(session, sent.started.execution.execution_id, timeout=10)
        assert ending.execution_stopped.reason == "steer"
    events = await quiet(backend, session, 2)
    assert started(events) == [sent.started.input_id, steered.input_id]


async def test_n111_n118_a_steer_that_finds_nothing_to_stop_runs_at_once(backend: Backend, database: Database) -> None:
    session = key()
    first = await steer(backend, session, "hello", request_id="first")
    assert first.HasField("started")
    await quiet(backend, session, 1)
    again = await steer(backend, session, "hello", request_id="first")
    assert again.started.execution.execution_id == first.started.execution.execution_id
    row = await database.fetchrow(
        "SELECT kind, state, outcome, execution_id::text FROM pool.command WHERE session = $1", session.session
    )
    assert tuple(row or ()) == ("STEER", "APPLIED", "STARTED", first.started.execution.execution_id)
    # One whose words differ is refused, as any other.
    reused = await refused(steer(backend, session, "other", request_id="first"))
    assert reused.reason == "REQUEST_ID_REUSED"
    wrong = calls.SendInputRequest(
        session=session, request_id="x", content=text_content("y"), steer_execution_id=str(uuid.uuid4())
    )
    assert (await refused(backend.sessions.SendInput(wrong))).reason == "INVALID_FIELD"


async def test_n120_n121_an_input_that_waits_for_its_cancel_is_neither_removed_nor_edited(
    backend: Backend, house: House
) -> None:
    session = key()
    running = await busy(backend, session)
    with frozen(house, "history"):
        steered = (await steer(backend, session, "instead")).steered
        for call in (
            remove(backend, session, steered.input_id),
            edit(backend, session, steered.input_id, "other words"),
        ):
            error = await refused(call)
            assert error.reason == "INPUT_NOT_PENDING"
            assert error.metadata["command_id"] == steered.command.command_id
        # A Stop takes it back; from then on it is an input like any other.
        await backend.stop(session, running.execution_id)
        assert (await edit(backend, session, steered.input_id, "other words")).rank == 1
        assert (await remove(backend, session, steered.input_id)).state == sessions.INPUT_STATE_REMOVED
    await quiet(backend, session, 1)


async def test_kill_takes_the_steer_with_it(backend: Backend, house: House) -> None:
    session = key()
    running = await busy(backend, session)
    with frozen(house, "history"):
        steered = (await steer(backend, session, "instead")).steered
        kill = calls.KillSessionRequest(session=session, request_id="kill")
        killing = asyncio.create_task(_kill(backend, kill))

        async def removed() -> bool:
            return not await waiting(backend, session)

        await eventually(removed)
    await killing
    events = await quiet(backend, session, 1)
    assert started(events) == [events[0].execution_started.input_id]
    assert [e.input_removed.input_id for e in events if e.HasField("input_removed")] == [steered.input_id]
    assert (await backend.execution(session, running.execution_id)).outcome == sessions.EXECUTION_OUTCOME_STOPPED
    command = await backend.command(session, steered.command.command_id)
    assert command.outcome == sessions.COMMAND_OUTCOME_STOPPED


async def _kill(backend: Backend, request: calls.KillSessionRequest) -> None:
    await backend.sessions.KillSession(request, timeout=30)


async def test_n119_send_now_of_an_input_that_waits_for_its_cancel_is_that_cancel(
    backend: Backend, house: House
) -> None:
    session = key()
    await busy(backend, session)
    with frozen(house, "history"):
        steered = (await steer(backend, session, "instead")).steered
        now = (await send_now(backend, session, steered.input_id)).steered
        assert now.command.command_id == steered.command.command_id
    await quiet(backend, session, 2)
