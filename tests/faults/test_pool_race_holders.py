"""A pool process that is frozen for long, or told to end, in the middle of what it does.

What happens while another replica takes over is told in `test_pool_replicas`.
"""

from __future__ import annotations

import signal

import pytest

from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, agent_text, key, summary
from tests.faults.pool_scene import PoolScene, all_ended
from tests.support.exhaustive import sampled

# Starts several processes one after the other, each of which takes long on a busy machine.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.exhaustive]


async def knows_ada(backend: Backend, session: session_pb2.SessionKey) -> event_pb2.Event:
    """P1: a turn that goes on with the conversation; its ending."""
    ending = await backend.run(session, "what is my name?")
    assert ending.HasField("execution_completed"), ending
    assert "Ada" in agent_text(await backend.events(session), ending.execution_id)
    return ending


async def met(backend: Backend, name: str = "") -> session_pb2.SessionKey:
    """A session whose agent is kept."""
    session = key(name)
    await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    return session


async def hanging(scene: PoolScene, session: session_pb2.SessionKey, text: str = "hang") -> str:
    """A turn whose agent is at work; its execution."""
    execution_id = (await scene.backend.send(session, text)).started.execution.execution_id
    await scene.until_handed_over(execution_id)
    return execution_id


async def test_a_holder_that_was_frozen_for_longer_than_its_leases_goes_on_without_what_was_ended(
    scene: PoolScene,
) -> None:
    backend = scene.backend
    kept, busy, session = await met(backend, "kept"), key("busy"), await met(backend, "frozen")
    # A first turn: of one that an agent that was kept has begun, the next attempt may follow.
    cut = await hanging(scene, busy)
    # It has the answer that its agent is still there, and has not asked it anything yet.
    frozen = scene.aim("pool.prepare.acquired")
    sent = await backend.send(session, "what is my name?")
    await frozen.reached()
    async with scene.hasty_leases():
        await scene.until_all_ended()
    frozen.thaw()
    # P2: that costs a start, not the turn.
    ending = await backend.ending(session, sent.started.execution.execution_id)
    assert ending.HasField("execution_completed"), ending
    assert "Ada" in agent_text(await backend.events(session), ending.execution_id)
    assert (await backend.ending(busy, cut)).HasField("execution_failed")
    await backend.settled(busy, cut)
    assert summary(await knows_ada(backend, kept)).how == "restarted"
    assert (await backend.run(busy, "hello")).HasField("execution_completed")
    for each in (kept, busy, session):
        await scene.check(backend, each, failed=each is busy)
    await scene.check_cap(backend)


@pytest.mark.parametrize("point", sampled(["prepare.acquired", "close.begun"], every=2))
async def test_a_shutdown_ends_what_runs_lets_go_what_is_kept_and_leaves_nothing(scene: PoolScene, point: str) -> None:
    backend = scene.backend
    kept, busy, session = await met(backend, "kept"), await met(backend, "busy"), key("third")
    cut = await hanging(scene, busy)
    frozen = scene.aim(f"pool.{point}")
    if point == "close.begun":
        # It is only reached by the end of the process itself.
        scene.pool.signal(signal.SIGTERM)
    else:
        await backend.send(session, "remember my name is Ada")
    await frozen.reached()
    if point != "close.begun":
        scene.pool.signal(signal.SIGTERM)
    frozen.thaw()
    assert await scene.pool.wait(120) == 0
    # All of it is stopped or deleted before the process ends.
    assert scene.witness.alive() == []

    backend = await scene.pool_again()
    ended = await backend.ending(busy, cut)
    assert ended.execution_stopped.reason == "shutdown"
    if point != "close.begun":
        (done,) = await all_ended(backend, session, 1)
        assert done.HasField("execution_completed")
        await scene.check(backend, session)
    for each in (kept, busy):
        await knows_ada(backend, each)
        await scene.check(backend, each)
    assert summary((await all_ended(backend, kept, 2))[1]).how == "restarted"
    await scene.check_cap(backend)
