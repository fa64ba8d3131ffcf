"""kill -9 of the pool at every point at which something is half done: what was accepted runs or ends once, the next
message works, and nothing is left running.

The points come from the registry of the code. Each has a story here that leads a real pool to it, or in
`control_stories`, where another replica takes over; a point without a story, and a story that does not reach its point,
fail.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

import services.pool.__main__  # noqa: F401 - declares the points
from hearth.history.v1 import history_service_pb2
from services.chassis import crashpoints
from tests.contract.pool.house import Backend, agent_text, eventually, key
from tests.faults import control_stories
from tests.faults.pool_scene import Aim, PoolScene, delete, evict, is_deleted, kill, tried
from tests.support.exhaustive import sampled

# Starts several processes one after the other, each of which takes long on a busy machine.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SAY = "remember my name is Ada"


class Stage:
    """A session, and the pool that is to die at a point while something is done to it."""

    def __init__(self, scene: PoolScene, point: str) -> None:
        self.scene = scene
        self.point = point
        self.session = key()

    @property
    def backend(self) -> Backend:
        """Calls to the pool."""
        return self.scene.backend

    def doomed(self) -> Aim:
        """From now on the pool dies when it comes to the point."""
        return self.scene.aim(self.point, how="kill")

    async def dies(self, call: Awaitable[object]) -> None:
        """Make a call of which the pool dies."""
        aim = self.doomed()
        calling = asyncio.ensure_future(tried(call))
        await aim.reached()
        await calling

    async def met(self) -> None:
        """A first turn, whose agent is kept."""
        await self.backend.run(self.session, SAY)
        await self.backend.idle_entry(self.session)

    async def ended(self, request_id: str, text: str = SAY) -> str:
        """How the execution of a message ended that was sent before, by the same request sent again."""
        again = await self.backend.send(self.session, text, request_id=request_id)
        assert again.HasField("started"), again
        execution_id = again.started.execution.execution_id
        ending = await self.backend.ending(self.session, execution_id)
        await self.backend.settled(self.session, execution_id)
        return ending.WhichOneof("body") or ""

    async def goes_on(self) -> None:
        """The next message works, and knows what was said."""
        ending = await self.backend.run(self.session, "what is my name?")
        assert ending.HasField("execution_completed"), ending
        assert "Ada" in agent_text(await self.backend.events(self.session), ending.execution_id)
        await self.scene.check(self.backend, self.session)
        await self.scene.check_cap(self.backend)


Story = Callable[[Stage], Awaitable[Callable[[], Awaitable[None]]]]
STORIES: dict[str, Story] = {}


def story(*points: str) -> Callable[[Story], Story]:
    """The story of these points: it ends with the death of the pool, and returns what must be true of the next one."""

    def keep(told: Story) -> Story:
        STORIES.update({f"pool.{point}": told for point in points})
        return told

    return keep


@story("admit.committed", "drive.picked_up", "prepare.acquired", "prepare.opened")
async def a_first_turn_before_its_prompt(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.dies(stage.backend.send(stage.session, SAY, request_id="r"))

    async def after() -> None:
        assert await stage.ended("r") == "execution_completed"
        await stage.goes_on()

    return after


@story("prompt.sending", "prompt.sent", "turn.answered")
async def a_first_turn_that_may_have_been_asked(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.dies(stage.backend.send(stage.session, SAY, request_id="r"))

    async def after() -> None:
        # Nobody knows what the agent did, so nobody asks again.
        assert await stage.ended("r") == "execution_lost"
        await stage.goes_on()

    return after


@story("turn.ending_taken", "turn.settled", "park.releasing", "park.released")
async def a_first_turn_after_its_ending(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.dies(stage.backend.send(stage.session, SAY, request_id="r"))

    async def after() -> None:
        assert await stage.ended("r") == "execution_completed"
        await stage.goes_on()

    return after


@story("prepare.checked_out")
async def a_warm_turn(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.met()
    await stage.dies(stage.backend.send(stage.session, "say on", request_id="r"))

    async def after() -> None:
        assert await stage.ended("r", "say on") == "execution_completed"
        await stage.goes_on()

    return after


@story("close.begun", "close.agent_closed")
async def an_eviction(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.met()
    await stage.dies(evict(stage.backend, stage.session))
    return stage.goes_on


@story("kill.committed")
async def a_kill(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.met()
    sent = await stage.backend.send(stage.session, "hang")
    execution_id = sent.started.execution.execution_id
    await stage.scene.until_handed_over(execution_id)
    await stage.dies(kill(stage.backend, stage.session, "k"))

    async def after() -> None:
        ending = await stage.backend.ending(stage.session, execution_id)
        assert ending.execution_stopped.reason == "killed"
        # Who got no answer asks again.
        await kill(stage.backend, stage.session, "k")
        await stage.scene.until_nothing_runs(stage.backend, stage.session)
        await stage.goes_on()

    return after


@story("delete.committed", "delete.workspace_deleted")
async def a_deletion(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.met()
    await stage.dies(delete(stage.backend, stage.session))

    async def after() -> None:
        # It goes on by itself, when nobody can be at it any more.
        await stage.scene.a_minute_after_deletion(stage.session)
        assert await is_deleted(stage.backend, stage.session)
        await stage.scene.until_nothing_runs(stage.backend, stage.session)

        async def all_gone() -> bool:
            heads = await stage.backend.history.GetHeads(
                history_service_pb2.GetHeadsRequest(sessions=[stage.session]), timeout=20
            )
            return not stage.scene.workspace(stage.session).exists() and not any(head.oldest for head in heads.heads)

        await eventually(all_gone)
        stage.session = key()
        await stage.met()
        await stage.goes_on()

    return after


@story("shutdown.turns_ended")
async def a_shutdown(stage: Stage) -> Callable[[], Awaitable[None]]:
    await stage.met()
    sent = await stage.backend.send(stage.session, "hang")
    await stage.scene.until_handed_over(sent.started.execution.execution_id)
    aim = stage.doomed()
    stage.scene.pool.signal(signal.SIGTERM)
    await aim.reached()

    async def after() -> None:
        ending = await stage.backend.ending(stage.session, sent.started.execution.execution_id)
        assert ending.execution_stopped.reason == "shutdown"
        await stage.goes_on()

    return after


async def test_every_point_has_its_story() -> None:
    elsewhere = {f"pool.{point}" for point in control_stories.STORIES}
    assert set(STORIES) | elsewhere == set(crashpoints.declared("pool"))


@pytest.mark.parametrize("point", sampled([one for one in crashpoints.declared("pool") if one in STORIES], every=4))
async def test_killed_at_a_point_it_settles_and_serves(scene: PoolScene, point: str) -> None:
    stage = Stage(scene, point)
    after = await STORIES[point](stage)
    assert scene.pool.exit_code() == -signal.SIGKILL
    await scene.pool_again()
    await after()


async def test_what_a_killed_pool_kept_and_used_is_ended_by_nobody_renewing_it(scene: PoolScene) -> None:
    """S2 for what no pool comes back for: sandboxes in use, parked, and in the making at every stage of a turn."""
    busy, making = key("busy"), key("making")
    sent = await scene.backend.send(busy, "hang")
    await scene.until_handed_over(sent.started.execution.execution_id)
    kept = key("kept")
    await scene.backend.run(kept, SAY)
    await scene.backend.idle_entry(kept)
    aim = scene.aim("pool.prepare.opened", how="kill")
    await tried(scene.backend.send(making, SAY, request_id="r"))
    await aim.reached()
    assert len(scene.witness.alive()) == 3
    async with scene.hasty_leases():
        await scene.until_all_ended()
    await scene.pool_again()
    for session in (busy, kept, making):
        ending = await scene.backend.run(session, "what is my name?")
        assert ending.HasField("execution_completed")
        await scene.check(scene.backend, session)
