"""How what agents ask comes to its end without being used: by the end of its execution, a Stop, a Kill, a takeover, or
time; on real rows, where the test is the turn. And how it is listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.chassis.errors import FailedPrecondition
from services.pool.rows import CommandOutcome, ExecutionState, Gate, GateState
from tests.support.gates import ALLOW, HOLDER, Rows, approval, begin, new_key, refusal, rows_on, states

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows(module_postgres_dsn: str) -> AsyncIterator[Rows]:
    """The rows, shared by tests that use sessions of their own."""
    async with rows_on(module_postgres_dsn) as found:
        yield found


# The end of an execution


@pytest.mark.parametrize("outcome", ["completed", "stopped", "failed", "lost"])
async def test_n110_an_ending_closes_what_its_execution_has_asked(rows: Rows, outcome: str) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.settle(execution, outcome)
    assert states(await rows.gates(one, two)) == ["CLOSED", "CLOSED"]
    assert await rows.told(one) == ["requested", "answered", "EXECUTION_ENDED by "]
    assert await rows.told(two) == ["requested", "EXECUTION_ENDED by "]
    assert (await refusal(rows, key, two)).metadata["resolution"] == "EXECUTION_ENDED"
    assert await rows.active(key) is None
    assert (await rows.send(key)).execution is not None


async def test_an_ending_closes_nothing_of_another_execution(rows: Rows) -> None:
    key = new_key()
    _, (gate,) = await rows.paused(key)
    await rows.answer(key, (gate, ALLOW))
    continuation, _ = await begin(rows, key)
    (own,) = await rows.interactions.ask(continuation, HOLDER, [approval("again")]) or []
    await rows.settle(continuation, "completed")
    assert (await rows.gates(gate))[0].state is GateState.CONSUMED
    assert await rows.told(own) == ["requested", "EXECUTION_ENDED by "]


async def test_n106_a_stop_closes_what_is_asked_and_a_later_answer_learns_it(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.stop(execution)
    assert (await refusal(rows, key, two)).metadata["resolution"] == "CANCELLED"
    assert await rows.told(one) == ["requested", "answered", "CANCELLED by stop"]
    assert await rows.told(two) == ["requested", "CANCELLED by stop"]
    assert await rows.interactions.take(execution, HOLDER) is None


@pytest.mark.parametrize("attempt", range(5))
async def test_of_stop_and_answer_both_learn_the_truth(rows: Rows, attempt: int) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    answered, command = await asyncio.gather(
        rows.answer(key, (gate, ALLOW)), rows.stop(execution), return_exceptions=True
    )
    assert not isinstance(command, BaseException)
    assert await rows.interactions.take(execution, HOLDER) is None
    if isinstance(answered, BaseException):
        assert isinstance(answered, FailedPrecondition)
        assert await rows.told(gate) == ["requested", "CANCELLED by stop"]
    else:
        assert await rows.told(gate) == ["requested", "answered", "CANCELLED by stop"]


async def test_a_stop_of_a_paused_execution_closes_what_it_asks(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.paused(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.send(key)
    command = await rows.stop(execution)
    assert command.outcome is CommandOutcome.NOT_RUNNING
    assert await rows.told(one) == ["requested", "answered", "CANCELLED by stop"]
    assert await rows.told(two) == ["requested", "CANCELLED by stop"]
    session = await rows.store.session(key)
    assert session is not None
    assert session.queue_paused
    assert await rows.active(key) is None


async def test_a_kill_closes_everything(rows: Rows) -> None:
    key = new_key()
    _, gates = await rows.asking(key, 2)
    await rows.answer(key, (gates[0], ALLOW))
    await rows.commands.kill(key, "k", b"fp")
    assert await rows.told(gates[0]) == ["requested", "answered", "CANCELLED by kill"]
    assert await rows.told(gates[1]) == ["requested", "CANCELLED by kill"]
    await rows.commands.kill(key, "k2", b"fp")
    assert await rows.told(gates[1]) == ["requested", "CANCELLED by kill"]


async def test_a_takeover_of_a_waiting_execution_leaves_what_it_asks_open(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.takeovers.take(execution, why="the test says so")
    (ending,) = [event for event in await rows.events(key) if event.HasField("execution_paused")]
    assert list(ending.execution_paused.interaction_ids) == [one.interaction_id, two.interaction_id]
    # Before its ending has reached the log.
    answered = await rows.answer(key, (two, ALLOW))
    assert answered.still_open == 0
    assert (await rows.active(key) or execution).source_execution_id is None
    settled = await rows.settle(execution, "paused")
    assert settled is not None
    assert settled.promoted is not None
    assert settled.promoted.source_execution_id == execution.execution_id


# What the next agent is told of


async def test_what_was_passed_on_in_vain_is_told_until_an_agent_hears_of_it(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    await rows.answer(key, (gate, ALLOW))
    await rows.interactions.take(execution, HOLDER)
    await rows.settle(execution, "lost")

    async def next_is_told(*, unasked: bool = False, outcome: str) -> list[str]:
        sent = await rows.send(key)
        assert sent.execution is not None
        picked = await rows.pick_up(key)
        if unasked:
            assert await rows.store.run(picked.execution, HOLDER, "scripted", "session-2")
            await rows.store.unasked(picked.execution, HOLDER)
        elif outcome == "completed":
            assert await rows.store.run(picked.execution, HOLDER, "scripted", "session-2")
        await rows.settle(picked.execution, outcome)
        return [one.interaction_id for one in picked.continued]

    # One that could not be started, and one that was stopped before its agent was asked, have told nobody.
    assert await next_is_told(outcome="failed") == [gate.interaction_id]
    assert await next_is_told(unasked=True, outcome="stopped") == [gate.interaction_id]
    assert await next_is_told(outcome="completed") == [gate.interaction_id]
    assert await next_is_told(outcome="completed") == []


async def test_what_a_continuation_could_not_tell_the_next_turn_does(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.interactions.take(execution, HOLDER)
    await rows.takeovers.take(execution, why="the test says so")
    await rows.settle(execution, "paused")
    await rows.answer(key, (two, ALLOW))
    continuation = await rows.pick_up(key)
    assert continuation.execution.source_execution_id == execution.execution_id
    told = {one.interaction_id, two.interaction_id}
    assert {gate.interaction_id for gate in continuation.continued} == told
    await rows.settle(continuation.execution, "failed")
    await rows.send(key)
    assert {gate.interaction_id for gate in (await rows.pick_up(key)).continued} == told


# Time


async def test_what_nobody_answers_in_time_is_closed_and_the_queue_is_paused(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    waiting = await rows.send(key)
    await rows.settle(execution, "paused")
    await rows.late(gate)
    error = await refusal(rows, key, gate)
    assert (error.reason, error.metadata["resolution"]) == ("INTERACTION_CLOSED", "EXPIRED")
    assert states(await rows.gates(gate)) == ["PENDING"]
    rows.woken.clear()
    await rows.interactions.expire()
    assert key in rows.woken
    assert await rows.told(gate) == ["requested", "EXPIRED by expiry"]
    session = await rows.store.session(key)
    assert session is not None
    assert session.queue_paused
    assert await rows.active(key) is None
    assert [one.input_id for one in await rows.store.queue(key, offset=0, limit=9)] == [waiting.input_id]
    sent = await rows.send(key)
    assert (sent.execution is not None, list(sent.resumed)) == (True, [waiting.input_id])


async def test_when_the_last_one_expires_it_goes_on_with_the_answers_that_there_are(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.paused(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.late(two)
    await rows.interactions.expire()
    picked = await rows.pick_up(key)
    assert picked.execution.source_execution_id == execution.execution_id
    assert states(list(picked.continued)) == ["ANSWERED", "CLOSED"]
    passed_on = await rows.interactions.begin(picked.execution, HOLDER, "scripted", "s", picked.continued)
    assert [gate.interaction_id for gate in passed_on or []] == [one.interaction_id]


async def test_a_live_agent_is_told_of_what_expired(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.late(one)
    await rows.interactions.expire()
    assert key in await rows.store.unheard_gates(HOLDER, 1000)
    assert states(await rows.interactions.take(execution, HOLDER)) == ["CLOSED"]
    assert (await rows.execution(execution)).state is ExecutionState.WAITING
    await rows.late(two)
    await rows.interactions.expire()
    assert states(await rows.interactions.take(execution, HOLDER, told=[one.interaction_id])) == ["CLOSED"]
    assert (await rows.execution(execution)).state is ExecutionState.RUNNING
    session = await rows.store.session(key)
    assert session is not None
    assert not session.queue_paused


async def test_a_turn_that_is_paused_when_all_has_expired_pauses_the_queue(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    await rows.send(key)
    await rows.late(gate)
    await rows.interactions.expire()
    await rows.settle(execution, "paused")
    session = await rows.store.session(key)
    assert session is not None
    assert session.queue_paused
    assert await rows.active(key) is None


async def test_an_answer_that_nothing_uses_goes_by_time_too(rows: Rows) -> None:
    key = new_key()
    _, (gate,) = await rows.paused(key)
    await rows.answer(key, (gate, ALLOW))
    await rows.late(gate)
    # Its continuation is about to use it.
    await rows.interactions.expire()
    assert states(await rows.gates(gate)) == ["ANSWERED"]
    await rows.settle((await rows.pick_up(key)).execution, "failed")
    await rows.interactions.expire()
    assert await rows.told(gate) == ["requested", "answered", "EXPIRED by expiry"]
    assert await rows.store.expired_gates(10) == []


async def test_an_answer_that_its_turn_is_about_to_take_stays(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.late(one, two)
    await rows.interactions.expire()
    assert states(await rows.gates(one, two)) == ["ANSWERED", "CLOSED"]
    assert states(await rows.interactions.take(execution, HOLDER)) == ["CONSUMED", "CLOSED"]


async def test_what_expires_after_the_continuation_makes_no_other_one(rows: Rows) -> None:
    key = new_key()
    _, (one, two) = await rows.paused(key, 2)
    await rows.answer(key, (one, ALLOW), (two, ALLOW))
    await rows.settle((await rows.pick_up(key)).execution, "failed")
    await rows.late(one)
    await rows.interactions.expire()
    assert states(await rows.gates(one, two)) == ["CLOSED", "ANSWERED"]
    assert await rows.active(key) is None
    await rows.send(key)
    assert [gate.interaction_id for gate in (await rows.pick_up(key)).continued] == [two.interaction_id]


# Reading


async def test_pages_of_what_was_asked(rows: Rows) -> None:
    key = new_key()
    _, gates = await rows.asking(key, 5)
    await rows.answer(key, (gates[1], ALLOW))
    await rows.late(gates[3])
    found: list[Gate] = []
    while page := await rows.store.list_gates(
        key, pending_only=False, after=(found[-1].created_at, found[-1].interaction_id) if found else None, limit=2
    ):
        found += page
    assert [gate.interaction_id for gate in found] == [gate.interaction_id for gate in gates]
    pending = await rows.store.list_gates(key, pending_only=True, after=None, limit=10)
    assert [gate.tool_call_id for gate in pending] == ["call-0", "call-2", "call-4"]
