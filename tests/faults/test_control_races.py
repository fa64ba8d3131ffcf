"""The race table of control: what is asked of one session at the same time is decided in each order, and each time one
wins, everybody is told so, and the checkers of C1 to C5, P1 and H6 find nothing wrong.

Nothing is left to luck. Where both sides change the row of the session, a transaction of the test holds it until both
wait for it, in the order wanted (`Stage.barrier`). Where one side is an ending, the replica that drives the turn is
frozen before or after history has taken that, and the other side comes through the other replica.

| race | decided first | how it is forced |
|---|---|---|
| stop ‖ answer | either | row |
| stop ‖ completion | the Stop, before or after the agent has answered; the completion; its settlement | freeze |
| answer ‖ answer | either | row |
| the same answer twice | either | row |
| answer ‖ expiry | either | row, clock of the row |
| steer ‖ completion | either, with and without others in the queue | freeze |
| stop ‖ steer | either | row |
| stop ‖ stop | either | row |
| kill ‖ stop, kill ‖ answer | either | row |
| remove ‖ promotion, edit ‖ promotion, send now ‖ promotion | either | row |
| send ‖ send, of two people, under two specs, and of one who asks again | either | row |
| new value of a credential ‖ promotion | the value, before or after the turn with the old one has ended | freeze |
| takeover ‖ late output | either | freeze, in `test_control_crash_points.py` |
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.faults.control_acts import ALLOWED, DENIED, Act
from tests.support.control_recording import Call
from tests.support.control_stage import FIRST, SECOND, Stage, specs
from tests.support.servers import Servers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

STOPPED, NOT_RUNNING = sessions.COMMAND_OUTCOME_STOPPED, sessions.COMMAND_OUTCOME_NOT_RUNNING
EITHER = pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in this order", "the other way round"])


@pytest.fixture(scope="module")
def services(servers: Servers) -> Iterator[Stage]:
    """Two replicas; one that is frozen is not taken for dead."""
    found = Stage(servers, {"HEARTH_REPLICA_DEAD_AFTER": "120"})
    with found.house.running():
        yield found


@pytest.fixture(scope="module")
def sound() -> dict[str, Act]:
    """The session that the tests use one after the other, as long as nothing is wrong with it."""
    return {}


@pytest_asyncio.fixture(loop_scope="module")
async def act(services: Stage, sound: dict[str, Act]) -> AsyncIterator[Act]:
    """A session; after the test everything that ever happened in it is checked."""
    found = sound.pop("act", None) or Act(services)
    try:
        yield found
    finally:
        for pool in services.house.pools:
            services.aim_nowhere(pool)
            services.process(pool).thaw()
    await found.check()
    sound["act"] = found
    await services.forget_connections()


def reason(call: Call) -> str:
    """What a call was refused for; empty when it was not."""
    return call.error.reason if call.error is not None else ""


async def at_the_row(act: Act, order: tuple[int, int], *asked: Message) -> list[Call]:
    """Two requests, the first to the first replica, the second to the other one, decided in this order; the calls as
    they were given."""
    made: list[asyncio.Future[Call]] = [asyncio.get_running_loop().create_future()] * len(asked)
    async with act.stage.barrier(act.key) as barrier:
        for place in order:
            pool = (FIRST, SECOND)[place]
            made[place] = await barrier.arrives(act.call(asked[place], at=pool), pool=pool)
    return list(await asyncio.gather(*made))


async def with_an_ending(act: Act, order: tuple[int, int], execution_id: str, label: str, asked: Message) -> Call:
    """A request (0), and the settlement of the turn of a held message (1), decided in this order."""
    calling: asyncio.Future[Call] | None = None
    driver = await act.driver_of(execution_id)
    async with act.stage.barrier(act.key) as barrier:
        for side in order:
            if side == 0:
                calling = await barrier.arrives(act.call(asked, at=SECOND), pool=SECOND)
            else:
                before = await barrier.waiting(driver)
                act.stage.let_go(label)
                await barrier.grows(before, pool=driver)
    assert calling is not None
    return await calling


async def while_frozen(act: Act, execution_id: str, point: str, label: str, asked: Message) -> Call:
    """Let the turn of a held message end, freeze the replica that drives it at a point, ask something of the other one,
    and let the first go on."""
    driver = await act.driver_of(execution_id)
    aim = act.stage.aim(driver, point)
    act.stage.let_go(label)
    await aim.reached()
    made = await act.call(asked, at=FIRST if driver == SECOND else SECOND)
    act.stage.process(driver).thaw()
    return made


# Stop


@EITHER
async def test_stop_and_answer(act: Act, order: tuple[int, int]) -> None:
    execution_id, asked = await act.asking()
    stop, answer = await at_the_row(act, order, act.stop(execution_id), act.answer(asked, ALLOWED))
    assert stop.accepted
    assert reason(answer) == ("INTERACTION_CLOSED" if order == (0, 1) else "")
    assert await act.ended(execution_id) == "stopped"
    assert not any(line["event"] == "tool" and line["tool"] in ("t1", "t2") for line in act.lines(execution_id))


@pytest.mark.parametrize("point", ["turn.answered", "turn.ending_taken"])
async def test_stop_and_completion(act: Act, point: str) -> None:
    label, execution_id = await act.running()
    _, waiting = await act.queued()
    stop = await while_frozen(act, execution_id, point, label, act.stop(execution_id))
    # The agent had answered before it heard of the Stop, and its answer counts; but nothing goes on by itself.
    assert isinstance(stop.response, calls.StopExecutionResponse)
    assert await act.ended(execution_id) == "completed"
    command = await act.stage.of(SECOND).command(act.key, stop.response.command.command_id)
    assert command.outcome == NOT_RUNNING
    shown = await act.stage.of(SECOND).session(act.key)
    assert (shown.queue_paused, shown.queued_inputs) == (True, 1)
    await act.must(calls.ResumeQueueRequest(session=act.key, request_id=str(uuid.uuid4())), calls.ResumeQueueResponse)
    assert await act.ended(await act.started_later(waiting)) == "completed"


async def test_stop_before_the_completion(act: Act) -> None:
    label, execution_id = await act.running()
    stop = await act.must(act.stop(execution_id), calls.StopExecutionResponse, at=SECOND)
    assert await act.ended(execution_id) == "stopped"
    act.stage.let_go(label)
    assert (await act.stage.of(SECOND).command(act.key, stop.command.command_id)).outcome == STOPPED


async def test_stop_after_the_settlement(act: Act) -> None:
    label, execution_id = await act.running()
    _, waiting = await act.queued()
    stop = await while_frozen(act, execution_id, "promote.committed", label, act.stop(execution_id))
    # What runs by now was not meant.
    assert reason(stop) == "EXECUTION_MISMATCH"
    assert await act.ended(execution_id) == "completed"
    assert await act.ended(await act.started_later(waiting)) == "completed"


@EITHER
async def test_stop_and_stop(act: Act, order: tuple[int, int]) -> None:
    _, execution_id = await act.running()
    made = await at_the_row(act, order, act.stop(execution_id), act.stop(execution_id))
    told = [call.response.command.command_id for call in made if isinstance(call.response, calls.StopExecutionResponse)]
    assert len(told) == 2
    assert len(set(told)) == 1
    assert await act.ended(execution_id) == "stopped"


@EITHER
async def test_stop_and_steer(act: Act, order: tuple[int, int]) -> None:
    _, execution_id = await act.running()
    steer = act.message(on_busy=sessions.ON_BUSY_STEER)
    stop, steered = await at_the_row(act, order, act.stop(execution_id), steer)
    assert isinstance(stop.response, calls.StopExecutionResponse)
    assert isinstance(steered.response, calls.SendInputResponse)
    assert await act.ended(execution_id) == "stopped"
    if steered.response.HasField("steered"):
        assert steered.response.steered.command.command_id == stop.response.command.command_id
    waiting = getattr(steered.response, steered.response.WhichOneof("result") or "").input_id
    shown = await act.stage.of(SECOND).session(act.key)
    if shown.queued_inputs:
        # The Stop came last, and wanted nothing to run instead.
        assert shown.queue_paused
        await act.must(
            calls.ResumeQueueRequest(session=act.key, request_id=str(uuid.uuid4())), calls.ResumeQueueResponse
        )
    assert await act.ended(await act.started_later(waiting)) == "completed"


@EITHER
async def test_kill_and_stop(act: Act, order: tuple[int, int]) -> None:
    _, execution_id = await act.running()
    _, waiting = await act.queued()
    kill, stop = await at_the_row(
        act, order, calls.KillSessionRequest(session=act.key, request_id=str(uuid.uuid4())), act.stop(execution_id)
    )
    assert kill.accepted
    assert stop.accepted
    assert await act.ended(execution_id) == "stopped"
    assert (await act.ending_in_log(execution_id)).execution_stopped.reason == "killed"
    removed = [event.input_removed.input_id for event in await act.stage.of(SECOND).events(act.key)]
    assert waiting in removed


@EITHER
async def test_kill_and_answer(act: Act, order: tuple[int, int]) -> None:
    execution_id, asked = await act.asking()
    kill, answer = await at_the_row(
        act, order, calls.KillSessionRequest(session=act.key, request_id=str(uuid.uuid4())), act.answer(asked, ALLOWED)
    )
    assert kill.accepted
    assert reason(answer) == ("INTERACTION_CLOSED" if order == (0, 1) else "")
    assert await act.ended(execution_id) == "stopped"
    assert not any(line["event"] == "tool" for line in act.lines(execution_id))


# Answers


@EITHER
async def test_answer_and_another_answer(act: Act, order: tuple[int, int]) -> None:
    execution_id, asked = await act.asking()
    made = await at_the_row(act, order, act.answer(asked, ALLOWED), act.answer(asked, DENIED))
    assert reason(made[order[0]]) == ""
    assert reason(made[order[1]]) == "INTERACTION_CLOSED"
    assert await act.ended(execution_id) == "completed"
    ran = [line["tool"] for line in act.lines(execution_id) if line["event"] == "tool" and line["tool"] != "run"]
    assert sorted(ran) == (["t1", "t2"] if order == (0, 1) else [])


@pytest.mark.parametrize("same_request", [True, False])
async def test_a_double_click_on_approve(act: Act, same_request: bool) -> None:
    execution_id, asked = await act.asking()
    click = str(uuid.uuid4())
    first = act.answer(asked, ALLOWED, request_id=click)
    second = act.answer(asked, ALLOWED, request_id=click if same_request else f"{click} again")
    made = await at_the_row(act, (0, 1), first, second)
    assert [reason(call) for call in made] == ["", "" if same_request else "INTERACTION_CLOSED"]
    assert await act.ended(execution_id) == "completed"
    ran = [line["tool"] for line in act.lines(execution_id) if line["event"] == "tool"]
    assert sorted(ran) == ["t1", "t2"]


@EITHER
async def test_answer_and_expiry(act: Act, order: tuple[int, int]) -> None:
    execution_id, asked = await act.asking()
    answer: asyncio.Future[Call] | None = None
    async with act.stage.barrier(act.key) as barrier:
        for side in order:
            if side == 0:
                answer = await barrier.arrives(act.call(act.answer(asked, ALLOWED)), pool=FIRST)
            else:
                before = await barrier.waiting()
                await act.stage.expire(act.key.session)
                await barrier.grows(before)
    assert answer is not None
    # Its time was over before it was decided, whoever comes first.
    assert reason(await answer) == "INTERACTION_CLOSED"
    assert await act.ended(execution_id) == "completed"
    assert not any(line["event"] == "tool" for line in act.lines(execution_id))


# Steer


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("steer_first", [True, False])
async def test_steer_and_completion(act: Act, steer_first: bool, others: bool) -> None:
    label, execution_id = await act.running()
    waiting = [(await act.queued())[1]] if others else []
    point = "turn.answered" if steer_first else "turn.ending_taken"
    made = await while_frozen(act, execution_id, point, label, act.message(on_busy=sessions.ON_BUSY_STEER))
    assert isinstance(made.response, calls.SendInputResponse)
    result = made.response.WhichOneof("result") or ""
    assert result == ("steered" if steer_first else "queued" if others else "started")
    steered = getattr(made.response, result).input_id
    assert await act.ended(execution_id) == "completed"
    executions = [await act.started_later(one) for one in [steered, *waiting]]
    assert [await act.ended(one) for one in executions] == ["completed"] * len(executions)
    if steer_first:
        command = await act.stage.of(SECOND).command(act.key, made.response.steered.command.command_id)
        assert command.outcome == NOT_RUNNING
    events = await act.stage.of(SECOND).events(act.key)
    order = [event.execution_started.input_id for event in events if event.HasField("execution_started")]
    order = order[-1 - len(waiting) :]
    assert order == ([steered, *waiting] if steer_first else [*waiting, steered])


# Queue


@EITHER
async def test_remove_and_promotion(act: Act, order: tuple[int, int]) -> None:
    label, execution_id = await act.running()
    _, waiting = await act.queued()
    request = calls.RemoveInputRequest(session=act.key, request_id=str(uuid.uuid4()), input_id=waiting)
    removed = await with_an_ending(act, order, execution_id, label, request)
    assert await act.ended(execution_id) == "completed"
    if order == (0, 1):
        assert removed.accepted
    else:
        assert reason(removed) == "INPUT_NOT_PENDING"
        assert await act.ended(await act.started_later(waiting)) == "completed"


@EITHER
async def test_edit_and_promotion(act: Act, order: tuple[int, int]) -> None:
    label, execution_id = await act.running()
    _, waiting = await act.queued()
    request = calls.UpdateInputRequest(session=act.key, request_id=str(uuid.uuid4()), input_id=waiting)
    request.content.add().text.text = "edited"
    edited = await with_an_ending(act, order, execution_id, label, request)
    assert await act.ended(execution_id) == "completed"
    started = await act.started_later(waiting)
    assert await act.ended(started) == "completed"
    (prompt,) = [line["text"] for line in act.lines(started) if line["event"] == "prompt"]
    assert reason(edited) == ("" if order == (0, 1) else "INPUT_NOT_PENDING")
    assert (prompt == "edited") == (order == (0, 1))


@EITHER
async def test_send_now_and_promotion(act: Act, order: tuple[int, int]) -> None:
    label, execution_id = await act.running()
    (_, first), (_, second) = await act.queued(), await act.queued()
    request = calls.SendInputNowRequest(
        session=act.key, request_id=str(uuid.uuid4()), input_id=second, execution_id=execution_id
    )
    made = await with_an_ending(act, order, execution_id, label, request)
    assert await act.ended(execution_id) == "completed"
    # What was to make way has ended, and what runs instead was not meant: who asks looks twice.
    assert reason(made) == "EXECUTION_MISMATCH"
    for waiting in (first, second):
        assert await act.ended(await act.started_later(waiting)) == "completed"


@EITHER
async def test_two_messages(act: Act, order: tuple[int, int]) -> None:
    await act.goes_on(at=FIRST)
    made = await at_the_row(act, order, act.message(), act.message())
    results = [
        call.response.WhichOneof("result") for call in made if isinstance(call.response, calls.SendInputResponse)
    ]
    assert [results[place] for place in order] == ["started", "queued"]
    inputs = [getattr(call.response, str(result)).input_id for call, result in zip(made, results, strict=True)]
    executions = [await act.started_later(inputs[place]) for place in order]
    assert [await act.ended(one) for one in executions] == ["completed", "completed"]


@pytest.mark.parametrize("order", [(0, 1), pytest.param((1, 0), marks=pytest.mark.exhaustive)])
async def test_two_messages_under_two_specs(act: Act, order: tuple[int, int]) -> None:
    before, names = "defaults", ("brief", "defaults")
    await act.goes_on(at=FIRST, spec=specs()[before])
    made = await at_the_row(act, order, *(act.message(spec=specs()[name]) for name in names))
    for place in order:
        sent = made[place].response
        assert isinstance(sent, calls.SendInputResponse)
        execution_id = await act.started_later(getattr(sent, sent.WhichOneof("result") or "").input_id)
        assert await act.ended(execution_id) == "completed"
        assert names[place] == before or await act.how(execution_id) != "warm"
        before = names[place]
    await act.goes_on()


@pytest.mark.parametrize("point", ["turn.answered", pytest.param("promote.committed", marks=pytest.mark.exhaustive)])
async def test_a_new_value_and_the_promotion(act: Act, point: str) -> None:
    await act.must(act.rotation(), calls.PutCredentialResponse)
    label, execution_id = await act.running(spec=specs()["keyed"])
    _, waiting = await act.queued()
    assert (await while_frozen(act, execution_id, point, label, act.rotation())).accepted
    assert await act.ended(execution_id) == "completed"
    started = await act.started_later(waiting)
    assert await act.ended(started) == "completed"
    # Whoever has the old value goes, with all that it runs in.
    assert await act.how(started) == "cold"
    await act.goes_on(spec=specs()["defaults"])


@EITHER
async def test_the_same_message_twice(act: Act, order: tuple[int, int]) -> None:
    await act.goes_on(at=FIRST)
    message = act.message(label=f"twice-{uuid.uuid4().hex[:8]}")
    made = await at_the_row(act, order, message, message)
    executions = {
        call.response.started.execution.execution_id
        for call in made
        if isinstance(call.response, calls.SendInputResponse)
    }
    assert len(executions) == 1
    assert await act.ended(executions.pop()) == "completed"
