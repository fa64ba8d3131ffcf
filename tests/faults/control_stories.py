"""How a replica of the pool comes to each of its crash points, and what the other one must have made of it afterwards.

A story leads the first replica to the point, in the middle of what a user asked for, and returns what must be true once
the other one has taken over: after the first was killed there, or was frozen there and goes on later.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Awaitable, Callable

from hearth.pool.v1 import pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.faults.control_acts import ALLOWED, DENIED, Act
from tests.faults.pool_scene import tried
from tests.support.control_stage import FIRST, SECOND, Aim

After = Callable[[], Awaitable[None]]


class Moment:
    """A replica is about to come to a point. `how` is `kill` or `stop`."""

    def __init__(self, act: Act, point: str, how: str) -> None:
        self.act = act
        self.stage = act.stage
        self._point = point
        self._how = how
        self._working: list[asyncio.Future[object]] = []
        self.pool = FIRST
        self.holder = ""
        # The session is deleted in the story.
        self.gone = False

    async def aimed(self, *, at: str = FIRST) -> Aim:
        """From now on that replica freezes or dies at the point."""
        self.pool, self.holder = at, await self.stage.holder_of(at)
        return self.stage.aim(at, self._point, how=self._how)

    async def meets(self, *work: Awaitable[object], at: str = FIRST) -> None:
        """Do something that leads a replica to the point, and return when it is there."""
        aim = await self.aimed(at=at)
        self._working += [asyncio.ensure_future(one) for one in work]
        try:
            await aim.reached()
        except TimeoutError:
            told = [one.result() for one in self._working if one.done()]
            raise AssertionError(f"{self._point} is not reached; answered was {told}") from None

    async def taken_over(self) -> None:
        """Return when the other replica has given this one up, and settled everything without it if it was frozen; then
        that one goes on."""
        process = self.stage.process(self.pool)
        if self._how == "kill":
            assert process.exit_code() == -signal.SIGKILL
        await self.stage.given_up(self.holder)
        if self._how == "stop":
            # What it says from here on comes too late for certain.
            await self.act.settled_by_others()
            process.thaw()
        await asyncio.gather(*self._working)
        if self.pool == SECOND:
            await self.all_there()

    async def all_there(self) -> None:
        """Return when both replicas serve."""
        for pool in (FIRST, SECOND):
            process = self.stage.process(pool)
            self.stage.aim_nowhere(pool)
            if not process.running:
                await process.start()
                await self.stage.forget_connections()


Story = Callable[[Moment], Awaitable[After]]
STORIES: dict[str, Story] = {}


def story(*points: str) -> Callable[[Story], Story]:
    """The story of these points."""

    def keep(told: Story) -> Story:
        STORIES.update(dict.fromkeys(points, told))
        return told

    return keep


# A turn


@story("admit.committed", "drive.picked_up", "prepare.acquired", "prepare.opened")
async def a_turn_before_its_prompt(moment: Moment) -> After:
    act, message = moment.act, moment.act.message()
    await moment.meets(act.call(message))

    async def after() -> None:
        assert await act.ended(await act.first_execution_of(message.request_id)) == "completed"

    return after


@story("prepare.checked_out")
async def a_warm_turn_before_its_prompt(moment: Moment) -> After:
    act, message = moment.act, moment.act.message()
    await act.goes_on(at=FIRST)
    await moment.stage.of(FIRST).idle_entry(act.key)
    await moment.meets(act.call(message))

    async def after() -> None:
        assert await act.ended(await act.first_execution_of(message.request_id)) == "completed"

    return after


@story("prompt.sending", "prompt.sent", "turn.answered")
async def a_turn_that_may_have_been_asked(moment: Moment) -> After:
    act, message = moment.act, moment.act.message()
    await moment.meets(act.call(message))

    async def after() -> None:
        # Nobody knows what the agent did, so nobody asks again.
        assert await act.ended(await act.first_execution_of(message.request_id)) == "lost"

    return after


@story("turn.ending_taken", "turn.settled", "park.releasing", "park.released")
async def a_turn_after_its_ending(moment: Moment) -> After:
    act, message = moment.act, moment.act.message()
    await moment.meets(act.call(message))

    async def after() -> None:
        assert await act.ended(await act.first_execution_of(message.request_id)) == "completed"

    return after


@story("close.begun", "close.agent_closed")
async def an_eviction(moment: Moment) -> After:
    act = moment.act
    await act.goes_on(at=FIRST)
    await moment.stage.of(FIRST).idle_entry(act.key)
    request = pool_service_pb2.EvictEntryRequest(session=act.key, request_id=str(uuid.uuid4()))

    async def evict() -> None:
        await tried(moment.stage.of(FIRST).pools.EvictEntry(request, timeout=30))

    await moment.meets(evict())

    async def after() -> None:
        pass

    return after


# Stop, steer, promotion


@story("stop.committed")
async def a_stop(moment: Moment) -> After:
    act = moment.act
    _, execution_id = await act.running()
    stop = act.stop(execution_id)
    await moment.meets(act.call(stop))

    async def after() -> None:
        assert await act.ended(execution_id) == "stopped"
        told = await act.must(stop, calls.StopExecutionResponse, at=SECOND)
        assert told.command.outcome == sessions.COMMAND_OUTCOME_STOPPED

    return after


@story("steer.committed")
async def a_steer(moment: Moment) -> After:
    act = moment.act
    _, execution_id = await act.running()
    steer = act.message(on_busy=sessions.ON_BUSY_STEER)
    await moment.meets(act.call(steer))

    async def after() -> None:
        assert await act.ended(execution_id) == "stopped"
        assert await act.ended(await act.first_execution_of(steer.request_id)) == "completed"

    return after


@story("promote.committed")
async def a_promotion(moment: Moment) -> After:
    act = moment.act
    label, execution_id = await act.running()
    waiting, _ = await act.queued()
    aim = await moment.aimed()
    moment.stage.let_go(label)
    await aim.reached()

    async def after() -> None:
        assert await act.ended(execution_id) == "completed"
        assert await act.ended(await act.first_execution_of(waiting)) == "completed"

    return after


@story("kill.committed")
async def a_kill(moment: Moment) -> After:
    act = moment.act
    _, execution_id = await act.running()
    _, waiting = await act.queued()
    kill = calls.KillSessionRequest(session=act.key, request_id=str(uuid.uuid4()))
    await moment.meets(act.call(kill))

    async def after() -> None:
        assert (await act.ending_in_log(execution_id)).execution_stopped.reason == "killed"
        # Who got no answer asks again.
        await act.must(kill, calls.KillSessionResponse, at=SECOND)
        assert await act.ended(execution_id) == "stopped"
        events = await moment.stage.of(SECOND).events(act.key)
        assert waiting in [event.input_removed.input_id for event in events]

    return after


@story("delete.committed", "delete.workspace_deleted")
async def a_deletion(moment: Moment) -> After:
    act = moment.act
    await act.goes_on(at=FIRST)
    request = calls.DeleteSessionRequest(session=act.key, request_id=str(uuid.uuid4()))
    moment.gone = True
    await moment.meets(act.call(request))

    async def after() -> None:
        refused = await act.call(act.message(), at=SECOND)
        assert refused.error is not None
        assert refused.error.reason == "SESSION_DELETED"

    return after


# Questions


@story("ask.committed")
async def a_question(moment: Moment) -> After:
    act, message = moment.act, moment.act.message("asks")
    await moment.meets(act.call(message))

    async def after() -> None:
        execution_id = await act.first_execution_of(message.request_id)
        assert await act.ended(execution_id) == "paused"
        await act.must(act.answer(await act.asked(1), ALLOWED), calls.AnswerInteractionsResponse, at=SECOND)
        assert await act.ended(await act.continuation(execution_id)) == "completed"

    return after


@story("answer.committed")
async def an_answer(moment: Moment) -> After:
    act = moment.act
    execution_id, asked = await act.asking()
    answer = act.answer(asked, ALLOWED, DENIED)
    await moment.meets(act.call(answer))

    async def after() -> None:
        assert await act.ended(execution_id) == "paused"
        assert await act.ended(await act.continuation(execution_id)) == "completed"
        told = await act.must(answer, calls.AnswerInteractionsResponse, at=SECOND)
        assert {one.state for one in told.interactions} == {sessions.INTERACTION_STATE_CONSUMED}

    return after


@story("gate.consumed")
async def one_of_two_answers_on_its_way_to_the_agent(moment: Moment) -> After:
    act = moment.act
    execution_id, asked = await act.asking()
    await moment.meets(act.call(act.answer(asked[:1], ALLOWED), at=SECOND))

    async def after() -> None:
        assert await act.ended(execution_id) == "paused"
        rest = await act.asked(1)
        assert [one.interaction_id for one in rest] == [asked[1].interaction_id]
        await act.must(act.answer(rest, ALLOWED), calls.AnswerInteractionsResponse, at=SECOND)
        continuation = await act.continuation(execution_id)
        assert await act.ended(continuation) == "completed"
        # Whether the first tool ran is not known, and its leave is not given again.
        (prompt,) = [one["text"] for one in moment.stage.journal() if one.get("message_id") == continuation]
        assert "result unknown" in prompt

    return after


@story("answer.telling", "answer.told")
async def all_answers_on_their_way_to_the_agent(moment: Moment) -> After:
    act = moment.act
    execution_id, asked = await act.asking()
    await moment.meets(act.call(act.answer(asked, ALLOWED), at=SECOND))

    async def after() -> None:
        assert await act.ended(execution_id) == "lost"

    return after


@story("gate.carried")
async def a_continuation_that_is_about_to_be_asked(moment: Moment) -> After:
    act = moment.act
    execution_id, asked = await act.asking()
    moment.stage.process(FIRST).kill9()
    assert await act.ended(execution_id) == "paused"
    await moment.all_there()
    await moment.meets(act.call(act.answer(asked, ALLOWED)))

    async def after() -> None:
        assert await act.ended(await act.continuation(execution_id)) == "lost"

    return after


@story("expire.committed")
async def an_expiry(moment: Moment) -> After:
    act = moment.act
    execution_id, _ = await act.asking()
    other = moment.stage.process(SECOND)
    aim = await moment.aimed()
    other.freeze()
    try:
        await moment.stage.expire(act.key.session)
        await aim.reached()
    finally:
        other.thaw()

    async def after() -> None:
        assert await act.ended(execution_id) == "paused"
        shown = await moment.stage.of(SECOND).session(act.key)
        assert (shown.open_interactions, shown.queue_paused) == (0, True)

    return after


@story("pause.draining", "pause.ending_taken", "pause.settled")
async def a_pause(moment: Moment) -> After:
    act = moment.act
    execution_id, asked = await act.asking()
    aim = await moment.aimed()
    moment.stage.process(FIRST).signal(signal.SIGTERM)
    await aim.reached()
    act.recording.shutdowns += 1

    async def after() -> None:
        assert await act.ended(execution_id) == "paused"
        await act.must(act.answer(asked, ALLOWED), calls.AnswerInteractionsResponse, at=SECOND)
        assert await act.ended(await act.continuation(execution_id)) == "completed"

    return after


# Replicas


@story("shutdown.turns_ended")
async def a_shutdown(moment: Moment) -> After:
    act = moment.act
    _, execution_id = await act.running()
    aim = await moment.aimed()
    moment.stage.process(FIRST).signal(signal.SIGTERM)
    await aim.reached()
    act.recording.shutdowns += 1

    async def after() -> None:
        assert await act.ended(execution_id) == "stopped"

    return after


@story("replica.condemned", "takeover.committed")
async def a_takeover(moment: Moment) -> After:
    act = moment.act
    _, execution_id = await act.running()
    aim = await moment.aimed(at=SECOND)
    moment.stage.process(FIRST).kill9()
    await aim.reached()
    await moment.stage.process(FIRST).start()
    await moment.stage.forget_connections()

    async def after() -> None:
        assert await act.ended(execution_id) == "lost"

    return after
