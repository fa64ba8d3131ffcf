"""What agents ask, on real rows: stored once, answered once, passed on once, and gone on with by one continuation,
whatever comes first and whoever has died. The test is the turn, so that each order can be had."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hearth.types.v1 import event_pb2
from services.chassis.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from services.pool.control.admission import OnBusy
from services.pool.control.gates import input_digest
from services.pool.control.interactions import NewGate
from services.pool.rows import ExecutionState, GateKind, GateState, Key, Outcome
from tests.support.gates import ALLOW, DENY, HOLDER, OTHER, Rows, approval, begin, new_key, refusal, rows_on, states

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows(module_postgres_dsn: str) -> AsyncIterator[Rows]:
    """The rows, shared by tests that use sessions of their own."""
    async with rows_on(module_postgres_dsn) as found:
        yield found


# Asking


async def test_what_is_asked_is_stored_and_told_once_in_its_order(rows: Rows) -> None:
    key = new_key()
    execution = await rows.running(key)
    asked = [approval(f"call-{one}") for one in range(5)]
    first = await rows.interactions.ask(execution, HOLDER, asked)
    assert states(first) == ["PENDING"] * 5
    assert (await rows.execution(execution)).state is ExecutionState.WAITING
    # As after a connection that broke before the answer came, and with one more.
    again = await rows.interactions.ask(execution, HOLDER, [*asked, approval("call-5")])
    assert again is not None
    assert first is not None
    assert [gate.interaction_id for gate in again[:5]] == [gate.interaction_id for gate in first]
    listed = await rows.store.list_gates(key, pending_only=False, after=None, limit=10)
    assert [gate.tool_call_id for gate in listed] == [f"call-{one}" for one in range(6)]
    requested = [event for event in await rows.events(key) if event.HasField("interaction_requested")]
    assert [event.interaction_requested.tool_call_id for event in requested] == [f"call-{one}" for one in range(6)]


async def test_both_ids_and_the_digest_of_the_arguments_are_told(rows: Rows) -> None:
    key = new_key()
    execution = await rows.running(key)
    new = NewGate("call-7", "key-1", GateKind.APPROVAL, "rm", '{"b": 1, "a": "x"}')
    (gate,) = await rows.interactions.ask(execution, HOLDER, [new]) or []
    assert (gate.tool_call_id, gate.request_key, gate.kind) == ("call-7", "key-1", GateKind.APPROVAL)
    assert gate.input_digest == input_digest('{"a":"x","b":1}')
    body = event_pb2.InteractionRequested.FromString(gate.request)
    assert (body.interaction_id, body.tool_call_id, body.tool_name) == (gate.interaction_id, "call-7", "rm")
    assert (body.input_json, body.input_digest) == ('{"b": 1, "a": "x"}', gate.input_digest.hex())
    assert body.expires_at.ToDatetime(gate.expires_at.tzinfo) == gate.expires_at
    assert (gate.expires_at - gate.created_at).total_seconds() == pytest.approx(60.0, abs=1.0)
    assert (await rows.events(key))[-1].interaction_requested == body


async def test_an_agent_may_ask_twice_for_one_call(rows: Rows) -> None:
    key = new_key()
    execution = await rows.running(key)
    asked = [dataclasses.replace(approval("call"), request_key=key_) for key_ in ("one", "two")]
    gates = await rows.interactions.ask(execution, HOLDER, asked)
    assert gates is not None
    assert len({gate.interaction_id for gate in gates}) == 2
    await rows.answer(key, (gates[0], ALLOW))
    assert states(await rows.gates(*gates)) == ["ANSWERED", "PENDING"]


async def test_one_request_with_other_arguments_is_refused(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    with pytest.raises(Aborted):
        await rows.interactions.ask(execution, HOLDER, [approval("new"), approval("call-0", '{"path": "b"}')])
    assert await rows.store.gates(execution.execution_id) == [gate]
    # White space is no difference.
    assert await rows.interactions.ask(execution, HOLDER, [approval("call-0", '{"path":"a"}')]) == [gate]


async def test_what_no_event_can_hold_is_not_asked(rows: Rows) -> None:
    execution = await rows.running(new_key())
    with pytest.raises(InvalidArgument) as caught:
        await rows.interactions.ask(execution, HOLDER, [approval("call", '"' + "x" * (1024 * 1024) + '"')])
    assert caught.value.reason == "TOO_LARGE"
    assert (await rows.execution(execution)).state is ExecutionState.RUNNING


async def test_only_who_drives_an_execution_asks_for_it(rows: Rows) -> None:
    key = new_key()
    execution = await rows.running(key)
    asked = [approval("call")]
    assert await rows.interactions.ask(execution, OTHER, asked) is None
    assert await rows.interactions.ask(dataclasses.replace(execution, epoch=execution.epoch + 1), HOLDER, asked) is None
    await rows.stop(execution)
    assert await rows.interactions.ask(execution, HOLDER, asked) is None
    assert await rows.store.gates(execution.execution_id) == []
    assert (await rows.execution(execution)).state is ExecutionState.STOPPING


# Answers to a live agent


async def test_answered_ones_are_passed_on_and_the_others_stay(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    answered = await rows.answer(key, (two, DENY))
    assert (states(list(answered.gates)), answered.still_open) == (["ANSWERED"], 1)
    assert answered.execution is not None
    assert answered.execution.execution_id == execution.execution_id
    assert key in await rows.store.unheard_gates(HOLDER, 1000)
    taken = await rows.interactions.take(execution, HOLDER)
    assert states(taken) == ["CONSUMED"]
    assert taken is not None
    assert (taken[0].interaction_id, taken[0].decision) == (two.interaction_id, DENY)
    assert (taken[0].answered_by, taken[0].consumed_by) == ("ann", execution.execution_id)
    assert (await rows.execution(execution)).state is ExecutionState.WAITING
    assert key not in await rows.store.unheard_gates(HOLDER, 1000)
    # Asked again because its answer was lost on the way, it is the same; what was told is not told again.
    assert await rows.interactions.take(execution, HOLDER) == taken
    assert await rows.interactions.take(execution, HOLDER, told=[two.interaction_id]) == []
    await rows.answer(key, (one, ALLOW))
    last = await rows.interactions.take(execution, HOLDER, told=[two.interaction_id])
    assert states(last) == ["CONSUMED"]
    assert (await rows.execution(execution)).state is ExecutionState.RUNNING
    assert await rows.told(one) == ["requested", "answered", "CONSUMED by ann"]
    assert await rows.told(two) == ["requested", "answered", "CONSUMED by ann"]


async def test_a_decision_is_told_with_who_made_it(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    await rows.answer(key, (gate, ALLOW))
    await rows.interactions.take(execution, HOLDER)
    answered, resolved = (await rows.events(key))[-2:]
    assert answered.interaction_answered.tool_call_id == resolved.interaction_resolved.tool_call_id == "call-0"
    assert answered.interaction_answered.answered_by == resolved.interaction_resolved.decided_by == "ann"
    assert answered.interaction_answered.decision == event_pb2.DECISION_ALLOWED
    assert resolved.interaction_resolved.decision == event_pb2.DECISION_ALLOWED


async def test_only_who_drives_an_execution_passes_answers_on(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    await rows.answer(key, (gate, ALLOW))
    assert await rows.interactions.take(execution, OTHER) is None
    taken = await rows.takeovers.take(execution, why="the test says so")
    assert taken is not None
    # The one who was thought dead comes back.
    assert await rows.interactions.take(execution, HOLDER) is None
    assert states(await rows.gates(gate)) == ["ANSWERED"]


async def test_n100_the_first_answer_stands(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    await rows.answer(key, (gate, DENY))
    error = await refusal(rows, key, gate)
    assert (error.reason, error.metadata["state"], error.metadata["decision"]) == (
        "INTERACTION_CLOSED",
        "ANSWERED",
        "DENIED",
    )
    await rows.interactions.take(execution, HOLDER)
    assert (await refusal(rows, key, gate)).metadata["state"] == "CONSUMED"
    assert (await rows.gates(gate))[0].decision is DENY


@pytest.mark.parametrize("attempt", range(5))
async def test_of_two_answers_at_once_one_wins(rows: Rows, attempt: int) -> None:
    key = new_key()
    _, (gate,) = await rows.asking(key)
    results = await asyncio.gather(
        *(rows.answer(key, (gate, decision)) for decision in (ALLOW, DENY)), return_exceptions=True
    )
    won = [result for result in results if not isinstance(result, BaseException)]
    lost = [result for result in results if isinstance(result, FailedPrecondition)]
    assert (len(won), len(lost)) == (1, 1)
    assert lost[0].reason == "INTERACTION_CLOSED"
    decisions = {0: ALLOW, 1: DENY}
    assert (await rows.gates(gate))[0].decision is decisions[results.index(won[0])]
    assert (await rows.told(gate)).count("answered") == 1


async def test_a_repeated_answer_says_how_it_stands(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    first = await rows.answer(key, (gate, ALLOW), request_id="r")
    assert await rows.answer(key, (gate, ALLOW), request_id="r") == first
    await rows.interactions.take(execution, HOLDER)
    later = await rows.answer(key, (gate, ALLOW), request_id="r")
    assert states(list(later.gates)) == ["CONSUMED"]
    await rows.settle(execution, "completed")
    last = await rows.answer(key, (gate, ALLOW), request_id="r")
    assert last.execution == await rows.execution(execution)
    with pytest.raises(AlreadyExists) as caught:
        await rows.answer(key, (gate, ALLOW), request_id="r", fingerprint=b"other")
    assert caught.value.reason == "REQUEST_ID_REUSED"
    assert (await rows.told(gate)).count("answered") == 1


async def test_none_or_all_of_the_answers_are_taken(rows: Rows) -> None:
    key, other = new_key(), new_key()
    _, (one, two) = await rows.asking(key, 2)
    _, (foreign,) = await rows.asking(other)
    with pytest.raises(NotFound) as caught:
        await rows.answer(key, (one, ALLOW), (foreign, ALLOW))
    assert caught.value.reason == "INTERACTION_NOT_FOUND"
    with pytest.raises(NotFound):
        await rows.answer(Key("elsewhere", key.session), (one, ALLOW))
    assert states(await rows.gates(one, two)) == ["PENDING", "PENDING"]
    assert states(await rows.gates(foreign)) == ["PENDING"]
    await rows.answer(key, (one, ALLOW))
    with pytest.raises(FailedPrecondition):
        await rows.answer(key, (two, ALLOW), (one, ALLOW))
    assert states(await rows.gates(one, two)) == ["ANSWERED", "PENDING"]
    both = await rows.answer(key, (two, DENY))
    assert both.still_open == 0


# Paused


async def test_n100_the_last_answer_makes_the_one_continuation(rows: Rows) -> None:
    key = new_key()
    paused, (one, two) = await rows.paused(key, 2)
    assert (paused.outcome, states(await rows.gates(one, two))) == (Outcome.PAUSED, ["PENDING", "PENDING"])
    first = await rows.answer(key, (one, ALLOW), request_id="first")
    assert (first.still_open, first.execution) == (1, None)
    assert await rows.active(key) is None
    last = await rows.answer(key, (two, DENY))
    assert last.execution is not None
    assert (last.still_open, last.execution.source_execution_id) == (0, paused.execution_id)
    assert (last.execution.input_id, last.execution.state) == (None, ExecutionState.PENDING)
    assert last.execution.epoch > paused.epoch
    # Who asks again about the first one learns of it, and makes nothing.
    assert (await rows.answer(key, (one, ALLOW), request_id="first")).execution == last.execution
    started = [event for event in await rows.events(key) if event.HasField("execution_started")]
    assert [event.execution_started.source_execution_id for event in started] == ["", paused.execution_id]
    assert started[1].epoch == last.execution.epoch


async def test_n101_one_request_may_answer_all(rows: Rows) -> None:
    key = new_key()
    paused, gates = await rows.paused(key, 3)
    answered = await rows.answer(key, *((gate, ALLOW) for gate in reversed(gates)))
    assert [gate.interaction_id for gate in answered.gates] == [gate.interaction_id for gate in reversed(gates)]
    assert answered.execution is not None
    assert answered.execution.source_execution_id == paused.execution_id


async def test_a_settlement_that_comes_after_the_answers_makes_it(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    answered = await rows.answer(key, (one, ALLOW), (two, ALLOW))
    assert answered.execution is not None
    assert answered.execution.execution_id == execution.execution_id
    settled = await rows.settle(execution, "paused")
    assert settled is not None
    assert settled.promoted is not None
    assert settled.promoted.source_execution_id == execution.execution_id
    assert states(await rows.gates(one, two)) == ["ANSWERED", "ANSWERED"]
    # Repeated, as after a crash.
    again = await rows.settle(execution, "paused")
    assert again is not None
    assert (again.first, again.promoted) == (False, None)


@pytest.mark.parametrize("attempt", range(5))
async def test_of_answer_and_settlement_whichever_comes_second_makes_it(rows: Rows, attempt: int) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await asyncio.gather(
        rows.answer(key, (one, ALLOW)), rows.settle(execution, "paused"), rows.answer(key, (two, DENY))
    )
    continuation = await rows.active(key)
    assert continuation is not None
    assert continuation.source_execution_id == execution.execution_id
    count = await rows.pool.fetchval("SELECT count(*) FROM pool.execution WHERE project = $1 AND session = $2", *key)
    assert count == 2


async def test_a_continuation_leaves_the_queue_as_it_is(rows: Rows) -> None:
    key = new_key()
    execution, (gate,) = await rows.asking(key)
    waiting = await rows.send(key)
    await rows.settle(execution, "paused")
    with pytest.raises(FailedPrecondition) as caught:
        await rows.send(key, OnBusy.REJECT)
    assert caught.value.reason == "SESSION_BUSY"
    await rows.answer(key, (gate, ALLOW))
    assert [one.input_id for one in await rows.store.queue(key, offset=0, limit=9)] == [waiting.input_id]
    continuation = await rows.active(key)
    assert continuation is not None
    settled = await rows.settle(continuation, "completed")
    assert settled is not None
    assert settled.promoted is not None
    assert settled.promoted.input_id == waiting.input_id


# What a continuation carries


async def test_n105_a_continuation_passes_on_what_was_decided_as_it_begins(rows: Rows) -> None:
    key = new_key()
    _, (one, two) = await rows.paused(key, 2)
    await rows.answer(key, (one, ALLOW), (two, DENY))
    picked = await rows.pick_up(key)
    assert [(gate.interaction_id, gate.decision) for gate in picked.continued] == [
        (one.interaction_id, ALLOW),
        (two.interaction_id, DENY),
    ]
    assert await rows.interactions.begin(picked.execution, OTHER, "scripted", "s", picked.continued) is None
    assert states(await rows.gates(one, two)) == ["ANSWERED", "ANSWERED"]
    passed_on = await rows.interactions.begin(picked.execution, HOLDER, "scripted", "s", picked.continued)
    assert states(passed_on) == ["CONSUMED", "CONSUMED"]
    assert (await rows.execution(picked.execution)).state is ExecutionState.RUNNING
    assert {gate.consumed_by for gate in passed_on or []} == {picked.execution.execution_id}
    assert await rows.interactions.begin(picked.execution, HOLDER, "scripted", "s", picked.continued) == passed_on
    assert await rows.told(one) == ["requested", "answered", "CONSUMED by ann"]


async def test_a_continuation_that_is_stopped_as_it_begins_passes_nothing_on(rows: Rows) -> None:
    key = new_key()
    _, (gate,) = await rows.paused(key)
    await rows.answer(key, (gate, ALLOW))
    picked = await rows.pick_up(key)
    await rows.stop(picked.execution)
    assert await rows.interactions.begin(picked.execution, HOLDER, "scripted", "s", picked.continued) is None
    # Who stops what was about to go on does not want what was approved either.
    assert await rows.told(gate) == ["requested", "answered", "CANCELLED by stop"]
    await rows.settle(picked.execution, "stopped")
    await rows.send(key)
    assert [one.state for one in (await rows.pick_up(key)).continued] == []


async def test_n104_answers_that_reached_no_agent_go_with_the_next_execution(rows: Rows) -> None:
    key = new_key()
    _, (one, two) = await rows.paused(key, 2)
    await rows.answer(key, (one, ALLOW), (two, ALLOW))
    failed = (await rows.pick_up(key)).execution
    await rows.settle(failed, "failed")
    assert states(await rows.gates(one, two)) == ["ANSWERED", "ANSWERED"]
    await rows.send(key)
    execution, passed_on = await begin(rows, key)
    assert execution.source_execution_id is None
    assert [gate.interaction_id for gate in passed_on or []] == [one.interaction_id, two.interaction_id]
    # And with no other after that.
    await rows.settle(execution, "completed")
    await rows.send(key)
    assert list((await rows.pick_up(key)).continued) == []


async def test_n107_an_answer_that_was_passed_on_is_never_passed_on_again(rows: Rows) -> None:
    key = new_key()
    _, (gate,) = await rows.paused(key)
    await rows.answer(key, (gate, ALLOW))
    execution, passed_on = await begin(rows, key)
    assert states(passed_on) == ["CONSUMED"]
    await rows.settle(execution, "lost")
    # The next one has to know that nobody knows what came of it; it is not its to apply.
    await rows.send(key)
    picked = await rows.pick_up(key)
    assert [(one.state, one.consumed_by) for one in picked.continued] == [(GateState.CONSUMED, execution.execution_id)]
    assert await rows.interactions.begin(picked.execution, HOLDER, "scripted", "s", picked.continued) == []
    await rows.settle(picked.execution, "completed")
    await rows.send(key)
    assert list((await rows.pick_up(key)).continued) == []


async def test_a_call_that_was_approved_and_whose_turn_was_then_paused_is_known_to_the_continuation(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    await rows.answer(key, (one, ALLOW))
    await rows.interactions.take(execution, HOLDER)
    await rows.takeovers.take(execution, why="the test says so")
    await rows.settle(execution, "paused")
    await rows.answer(key, (two, ALLOW))
    picked = await rows.pick_up(key, OTHER)
    assert [(gate.interaction_id, gate.state) for gate in picked.continued] == [
        (one.interaction_id, GateState.CONSUMED),
        (two.interaction_id, GateState.ANSWERED),
    ]
    passed_on = await rows.interactions.begin(picked.execution, OTHER, "scripted", "s", picked.continued)
    assert [gate.interaction_id for gate in passed_on or []] == [two.interaction_id]


async def test_what_nobody_has_answered_is_passed_on_by_nothing(rows: Rows) -> None:
    key = new_key()
    execution, (one, two) = await rows.asking(key, 2)
    assert await rows.interactions.begin(execution, HOLDER, "scripted", "s", [one, two]) == []
    assert await rows.interactions.take(execution, HOLDER) == []
    assert states(await rows.gates(one, two)) == ["PENDING", "PENDING"]
