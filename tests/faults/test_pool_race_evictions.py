"""Races with the eviction of an agent that is kept: by the end of its window, for want of a seat or of a slot, by an
operator. In each order: the eviction has begun when the message comes, and the message has the agent when it begins.

No turn fails for it, no prompt is handed over twice, and what is kept stays within the cap.
"""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import from_rpc_error
from tests.contract.pool.house import Backend, agent_text, eventually, key, summary
from tests.faults.pool_scene import PoolScene, all_ended, evict
from tests.support.exhaustive import sampled

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.exhaustive]

# So long that a message comes within it mostly, and so short that a test can wait for its end.
WINDOW = 1.0


async def remembers(backend: Backend, session: session_pb2.SessionKey, ending: event_pb2.Event) -> None:
    """P1: the turn went on with the conversation of its session."""
    assert ending.HasField("execution_completed"), ending
    assert "Ada" in agent_text(await backend.events(session), ending.execution_id)


async def parked(backend: Backend, name: str = "") -> session_pb2.SessionKey:
    """A session whose agent is kept."""
    session = key(name)
    await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    return session


@pytest.mark.parametrize("point", sampled(["pool.close.begun", "sandbox.stop.written"], every=3))
async def test_a_message_while_an_operator_evicts_waits_and_restarts_it(scene: PoolScene, point: str) -> None:
    backend = scene.backend
    session = await parked(backend)
    frozen = scene.aim(point)
    evicting = asyncio.ensure_future(evict(backend, session))
    await frozen.reached()
    if frozen.service is scene.pool:
        (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    else:
        sending = asyncio.ensure_future(backend.send(session, "what is my name?"))
        await sending
    frozen.thaw()
    await evicting
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how == "restarted"
    await remembers(backend, session, second)
    await scene.check(backend, session)


@pytest.mark.parametrize("point", sampled(["pool.prepare.checked_out", "sandbox.acquire.attached_written"], every=3))
async def test_an_operator_who_comes_after_the_message_is_refused(scene: PoolScene, point: str) -> None:
    backend = scene.backend
    session = await parked(backend)
    frozen = scene.aim(point)
    sent = await backend.send(session, "what is my name?")
    await frozen.reached()
    if frozen.service is scene.pool:
        (evicting,) = await scene.arrived(scene.pool, evict(backend, session))
    else:
        evicting = asyncio.ensure_future(evict(backend, session))
        await asyncio.wait([evicting])
    frozen.thaw()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await evicting
    assert from_rpc_error(refused.value).reason == "SESSION_BUSY"
    second = await backend.ending(session, sent.started.execution.execution_id)
    assert summary(second).how == "warm"
    await remembers(backend, session, second)
    await scene.check(backend, session)


async def test_a_message_while_the_window_ends_waits_and_restarts_it(scene: PoolScene) -> None:
    backend = await scene.pool_again(HEARTH_LOCAL_WARM_WINDOW=str(WINDOW))
    session = key()
    frozen = scene.aim("pool.close.begun")
    await backend.run(session, "remember my name is Ada")
    await frozen.reached()
    (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    frozen.thaw()
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how == "restarted"
    await remembers(backend, session, second)
    await scene.check(backend, session)
    # The window ends in the middle of a turn that has taken the agent: that turn, and the next, know nothing of it.
    await _window_ends_during_checkout(scene, backend)
    # It ends while the process is frozen, and a message waits at its door: whichever of them comes first.
    session = await parked(backend)
    scene.pool.freeze()
    (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    await asyncio.sleep(WINDOW)
    scene.pool.thaw()
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how in ("warm", "restarted")
    await remembers(backend, session, second)
    await scene.check(backend, session)


async def _window_ends_during_checkout(scene: PoolScene, backend: Backend) -> None:
    for _ in range(10):
        session = await parked(backend)
        frozen = scene.aim("pool.prepare.checked_out")
        sent = await backend.send(session, "what is my name?")
        reached = asyncio.ensure_future(frozen.reached())
        ended = asyncio.ensure_future(backend.ending(session, sent.started.execution.execution_id))
        await asyncio.wait([reached, ended], return_when=asyncio.FIRST_COMPLETED)
        if reached.done():
            break
        # Too late: it was over before the message came.
        reached.cancel()
        scene.aim_nowhere()
    else:
        raise AssertionError("no message came within the window")
    await asyncio.sleep(WINDOW)
    frozen.thaw()
    second = await ended
    assert summary(second).how == "warm"
    await remembers(backend, session, second)
    await scene.check(backend, session)


async def test_turns_that_want_the_only_seat(scene: PoolScene) -> None:
    backend = await scene.pool_again(HEARTH_POOL_ENTRIES="1")
    # The agent is being closed for another session when its own message comes.
    session, other = await parked(backend), key("other")
    frozen = scene.aim("pool.close.begun")
    await backend.send(other, "hello")
    await frozen.reached()
    (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    frozen.thaw()
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how == "restarted"
    await remembers(backend, session, second)
    (ended,) = await all_ended(backend, other, 1)
    assert ended.HasField("execution_completed")
    await scene.check(backend, session)
    await scene.check(backend, other)
    # It is taken by its own session when the other one comes: that one runs without a seat.
    session, third = await parked(backend), key("third")
    frozen = scene.aim("pool.prepare.checked_out")
    await backend.send(session, "what is my name?")
    await frozen.reached()
    (sending,) = await scene.arrived(scene.pool, backend.send(third, "hello"))
    frozen.thaw()
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how == "warm"
    await remembers(backend, session, second)
    (ended,) = await all_ended(backend, third, 1)
    assert ended.HasField("execution_completed")
    await scene.check(backend, third)
    await at_most_one_idle(backend)


async def at_most_one_idle(backend: Backend) -> None:
    """Wait until nothing is under way, and at most one agent is kept."""

    async def found() -> bool:
        entries = (await backend.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)).entries
        return [entry.state for entry in entries] in ([], [pool_pb2.ENTRY_STATE_IDLE])

    await eventually(found)


async def test_a_message_while_its_sandbox_loses_the_slot_restarts_it(scene: PoolScene) -> None:
    backend = scene.backend
    victim, *kept = [await parked(backend, name) for name in ("victim", "kept", "kept")]
    newcomer = key("newcomer")
    frozen = scene.aim("sandbox.stop.written")
    await backend.run(newcomer, "hello")
    await frozen.reached()
    # The slots are taken, and the one that was used the longest ago is being stopped.
    sent = await backend.send(victim, "what is my name?")
    frozen.thaw()
    second = await backend.ending(victim, sent.started.execution.execution_id)
    assert summary(second).how == "restarted"
    await remembers(backend, victim, second)
    for session in (victim, *kept, newcomer):
        await scene.check(backend, session)
    await scene.check_cap(backend)


async def test_a_sandbox_that_a_message_has_taken_loses_no_slot(scene: PoolScene) -> None:
    backend = scene.backend
    newcomer = key("newcomer")
    hanging = (await backend.send(newcomer, "hang")).started.execution.execution_id
    await scene.until_handed_over(hanging)
    taken, *kept = [await parked(backend, name) for name in ("taken", "kept", "kept")]
    frozen = scene.aim("sandbox.acquire.attached_written")
    sent = await backend.send(taken, "what is my name?")
    await frozen.reached()
    await backend.stop(newcomer, hanging)
    await backend.ending(newcomer, hanging)
    frozen.thaw()
    second = await backend.ending(taken, sent.started.execution.execution_id)
    assert summary(second).how == "warm"
    await remembers(backend, taken, second)
    await backend.idle_entry(newcomer)
    for session in (taken, *kept, newcomer):
        await scene.check(backend, session)
    await scene.check_cap(backend)
