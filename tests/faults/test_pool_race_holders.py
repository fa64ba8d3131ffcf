"""A pool process that dies, freezes or is told to end, and the one that comes after it.

One process drives the sessions of a database. A second one waits for the lock of the first; it gets it when that one is
gone, or when the database has given up its connection, as it does with a machine that answers no more. A holder that is
thawed after that believes for a while that all of it is still its own. None of its prompts, output, endings or releases
may reach anybody, and nothing that it held may be left running.
"""

from __future__ import annotations

import signal

import asyncpg
import pytest

from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, agent_text, key, summary
from tests.faults.pool_scene import PoolScene, all_ended, tried
from tests.support.exhaustive import sampled

# Starts several processes one after the other, each of which takes long on a busy machine.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.exhaustive]

# Of the lock that only one pool process of a database holds; a bigint lies in two columns.
_END_HOLDER = """
SELECT pg_terminate_backend(pid) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ((classid::bigint << 32) | objid::bigint) = hashtextextended('hearth/pool/single', 0)
"""


async def lock_is_lost(scene: PoolScene) -> None:
    """The database gives up the connection by which a process holds its place."""
    connection = await asyncpg.connect(scene.house.dsn)
    try:
        assert len(await connection.fetch(_END_HOLDER)) == 1
    finally:
        await connection.close()


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


async def test_a_second_pool_waits_and_takes_over_what_a_killed_one_left(scene: PoolScene) -> None:
    first = scene.backend
    kept, busy = await met(first, "kept"), await met(first, "busy")
    second = await scene.another_pool()
    lost = await hanging(scene, busy)
    await knows_ada(first, kept)
    assert not second.pool.serving()
    scene.pool.kill9()
    backend = await scene.serving(second)
    assert (await backend.ending(busy, lost)).HasField("execution_lost")
    await backend.settled(busy, lost)
    for session in (kept, busy):
        assert summary(await knows_ada(backend, session)).how in ("restarted", "cold")
        await scene.check(backend, session)
    await scene.check_cap(backend)


@pytest.mark.parametrize("point", sampled(["prompt.sending", "prepare.acquired", "park.releasing"], every=3))
async def test_a_holder_that_thaws_after_another_took_over_reaches_nobody(scene: PoolScene, point: str) -> None:
    first, frozen_pool = scene.backend, scene.pool
    kept, busy = await met(first, "kept"), key("busy")
    lost = await hanging(scene, busy, "stream 100000 words at 20/s")
    session = key("frozen")
    frozen = scene.aim(f"pool.{point}")
    sent = await first.send(session, "remember my name is Ada")
    execution_id = sent.started.execution.execution_id
    await frozen.reached()
    await lock_is_lost(scene)
    second = await scene.another_pool()
    backend = await scene.serving(second)

    # What was asked may have been done; what was not asked yet is asked by the second one.
    ending = await backend.ending(session, execution_id)
    expected = {"prepare.acquired": "execution_completed", "park.releasing": "execution_completed"}
    assert ending.WhichOneof("body") == expected.get(point, "execution_lost")
    assert (await backend.ending(busy, lost)).HasField("execution_lost")
    for each in (session, busy, kept):
        await backend.run(each, "remember my name is Ada")
        await backend.idle_entry(each)
    before = {each.session: (len(await backend.events(each)), scene.daemons(each)) for each in (session, busy, kept)}
    assert all(len(daemons) == 1 for _, daemons in before.values())
    prompts = scene.journal()

    frozen.thaw()
    # It sees by itself that its place is taken.
    assert await frozen_pool.wait(120) == 0
    # It asked no agent, told nothing, and its last act did not take what is the second one's.
    assert scene.journal() == prompts
    for each in (session, busy, kept):
        assert (len(await backend.events(each)), scene.daemons(each)) == before[each.session]
        assert summary(await knows_ada(backend, each)).how == "warm"
        await scene.check(backend, each)
    await scene.check_cap(backend)


@pytest.mark.exhaustive
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


async def test_a_message_at_the_door_of_a_holder_that_thaws_runs_once(scene: PoolScene) -> None:
    first = scene.backend
    session = await met(first)
    scene.pool.freeze()
    await lock_is_lost(scene)
    second = await scene.another_pool()
    backend = await scene.serving(second)
    await knows_ada(backend, session)
    await backend.idle_entry(session)
    # For as long as it does not know better, the first one takes what is sent to it.
    (sending,) = await scene.arrived(scene.pool, first.send(session, "say it once", request_id="r"))
    scene.pool.thaw()
    answer = await tried(sending)
    assert await scene.pool.wait(120) == 0
    again = await backend.send(session, "say it once", request_id="r")
    assert answer is None or again.started.execution.execution_id == answer.started.execution.execution_id
    await backend.ending(session, again.started.execution.execution_id)
    await backend.settled(session, again.started.execution.execution_id)
    await knows_ada(backend, session)
    await scene.check(backend, session)
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
