"""Races for the agent of a session, decided in each order: two messages, and a message, a Stop, a Kill, a Delete or
another credential while its sandbox is made, restarted, in use, parked.

One side is frozen half done until the other has come. What must hold is S1 to S3, P1 and P2, for which see the scene.
"""

from __future__ import annotations

import asyncio
import uuid

import grpc.aio
import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import session_pb2
from tests.contract.pool.house import Backend, agent_text, key, summary
from tests.contract.pool.test_credentials import agent_of, given, put, uses
from tests.faults.pool_scene import PoolScene, all_ended, delete, evict, is_deleted, kill
from tests.support.exhaustive import sampled

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.exhaustive]


async def test_two_messages_at_once_run_one_after_the_other_in_one_sandbox(scene: PoolScene) -> None:
    session, backend = key(), scene.backend
    for turn, hows in ((0, ["cold", "warm"]), (2, ["warm", "warm"])):
        scene.pool.freeze()
        texts = [f"say {turn + number}" for number in range(2)]
        sending = await scene.arrived(scene.pool, *(backend.send(session, text) for text in texts))
        scene.pool.thaw()
        answers = await asyncio.gather(*sending)
        assert sorted(answer.HasField("started") for answer in answers) == [False, True]
        ended = await all_ended(backend, session, turn + 2)
        assert [summary(event).how for event in ended[turn:]] == hows
        await backend.idle_entry(session)
    assert len({summary(event).sandbox_id for event in ended}) == 1
    await scene.check(backend, session)


@pytest.mark.parametrize("point", sampled(["prepare.acquired", "turn.ending_taken"], every=3))
async def test_a_message_during_the_turn_of_another_runs_after_it(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    frozen = scene.aim(f"pool.{point}")
    await backend.send(session, "remember my name is Ada")
    await frozen.reached()
    (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    frozen.thaw()
    await sending
    first, second = await all_ended(backend, session, 2)
    assert (summary(first).how, summary(second).how) == ("cold", "warm")
    assert "Ada" in agent_text(await backend.events(session), second.execution_id)
    await scene.check(backend, session)


@pytest.mark.parametrize(
    "point", sampled(["pool.park.releasing", "pool.park.released", "sandbox.release.parked"], every=3)
)
async def test_a_message_while_the_agent_is_parked_finds_it_warm(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    frozen = scene.aim(point)
    await backend.run(session, "remember my name is Ada")
    await frozen.reached()
    if frozen.service is scene.pool:
        (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    else:
        # The pool has it while the sandbox service is in the middle of the park.
        sending = asyncio.ensure_future(backend.send(session, "what is my name?"))
        assert (await sending).HasField("started")
    frozen.thaw()
    await sending
    _, second = await all_ended(backend, session, 2)
    assert summary(second).how == "warm"
    assert "Ada" in agent_text(await backend.events(session), second.execution_id)
    await scene.check(backend, session)
    await scene.check_cap(backend)


@pytest.mark.parametrize(
    "point",
    sampled(
        [
            "sandbox.acquire.created",
            "sandbox.acquire.daemon_started",
            "pool.prepare.acquired",
            "pool.prepare.opened",
        ],
        every=2,
    ),
)
async def test_a_stop_during_a_create_ends_the_turn_unasked_and_leaves_nothing(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    frozen = scene.aim(point)
    sent = await backend.send(session, "hang")
    execution_id = sent.started.execution.execution_id
    await frozen.reached()
    if frozen.service is scene.pool:
        (stopping,) = await scene.arrived(scene.pool, backend.stop(session, execution_id))
        frozen.thaw()
        await stopping
        ending = await backend.ending(session, execution_id)
    else:
        # Who stops does not wait for the provider.
        await backend.stop(session, execution_id)
        ending = await backend.ending(session, execution_id)
        frozen.thaw()
    assert ending.HasField("execution_stopped")
    assert scene.handed_over(execution_id) == 0
    await scene.until_nothing_runs(backend, session)
    assert (await backend.run(session, "hello")).HasField("execution_completed")
    await scene.check(backend, session)


@pytest.mark.parametrize("point", sampled(["prompt.sending", "prompt.sent"], every=3))
async def test_a_stop_while_the_agent_is_asked_ends_it_and_the_agent_is_kept(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    await backend.run(session, "remember my name is Ada")
    frozen = scene.aim(f"pool.{point}")
    sent = await backend.send(session, "hang")
    execution_id = sent.started.execution.execution_id
    await frozen.reached()
    (stopping,) = await scene.arrived(scene.pool, backend.stop(session, execution_id))
    frozen.thaw()
    command = await stopping
    assert (await backend.ending(session, execution_id)).HasField("execution_stopped")
    await backend.settled(session, execution_id)
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    after = await backend.run(session, "what is my name?")
    assert summary(after).how == "warm"
    assert "Ada" in agent_text(await backend.events(session), after.execution_id)
    await scene.check(backend, session)


@pytest.mark.parametrize("point", sampled(["sandbox.acquire.instance_started", "pool.prepare.acquired"], every=3))
async def test_a_kill_during_a_restart_leaves_nothing(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    await backend.run(session, "remember my name is Ada")
    await evict(backend, session)
    frozen = scene.aim(point)
    sent = await backend.send(session, "hang")
    execution_id = sent.started.execution.execution_id
    await frozen.reached()
    if frozen.service is scene.pool:
        (killing,) = await scene.arrived(scene.pool, kill(backend, session))
    else:
        killing = asyncio.ensure_future(kill(backend, session))
        # Its end is told while the provider is still at it.
        await backend.ending(session, execution_id)
    frozen.thaw()
    await killing
    ending = await backend.ending(session, execution_id)
    assert ending.execution_stopped.reason == "killed"
    assert scene.handed_over(execution_id) == 0
    await scene.until_nothing_runs(backend, session)
    after = await backend.run(session, "hello")
    assert summary(after).how == "cold"
    await scene.check(backend, session)


async def test_a_kill_while_the_daemon_is_restarted_for_another_holder_leaves_nothing(scene: PoolScene) -> None:
    session = key()
    await scene.backend.run(session, "remember my name is Ada")
    await scene.backend.idle_entry(session)
    scene.pool.kill9()
    backend = await scene.pool_again()
    frozen = scene.aim("sandbox.acquire.restart_written")
    sent = await backend.send(session, "hang")
    await frozen.reached()
    killing = asyncio.ensure_future(kill(backend, session))
    await backend.ending(session, sent.started.execution.execution_id)
    frozen.thaw()
    await killing
    await scene.until_nothing_runs(backend, session)
    assert summary(await backend.run(session, "hello")).how == "cold"
    await scene.check(backend, session)


@pytest.mark.parametrize("point", sampled(["pool.kill.committed", "sandbox.delete.written"], every=3))
async def test_a_message_during_a_kill_gets_a_sandbox_of_its_own(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    before = (await scene.sandboxes(backend, session))[0].sandbox_id
    frozen = scene.aim(point)
    killing = asyncio.ensure_future(kill(backend, session))
    await frozen.reached()
    if frozen.service is scene.pool:
        (sending,) = await scene.arrived(scene.pool, backend.send(session, "what is my name?"))
    else:
        sending = asyncio.ensure_future(backend.send(session, "what is my name?"))
        await sending
    frozen.thaw()
    await killing
    ending = await backend.ending(session, (await sending).started.execution.execution_id)
    assert ending.HasField("execution_completed")
    assert summary(ending).sandbox_id != before
    await scene.check(backend, session)


@pytest.mark.parametrize(
    "point", sampled(["pool.prepare.acquired", "pool.prompt.sent", "pool.park.releasing"], every=3)
)
async def test_a_delete_during_a_turn_leaves_nothing(scene: PoolScene, point: str) -> None:
    session, backend = key(), scene.backend
    frozen = scene.aim(point)
    await backend.send(session, "say something" if "turn" in point or "park" in point else "hang")
    await frozen.reached()
    (deleting,) = await scene.arrived(scene.pool, delete(backend, session))
    frozen.thaw()
    await deleting
    assert await is_deleted(backend, session)
    await scene.until_nothing_runs(backend, session)
    assert not scene.workspace(session).exists()
    assert await scene.sandboxes(backend, session) == []


async def sent_unless_deleted(backend: Backend, session: session_pb2.SessionKey) -> None:
    """Send to a session that is being deleted."""
    try:
        await backend.send(session, "hang")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
            raise


@pytest.mark.parametrize("delete_first", sampled([True, False], every=3))
async def test_a_delete_and_a_message_at_once_leave_nothing(scene: PoolScene, delete_first: bool) -> None:
    session, backend = key(), scene.backend
    await backend.run(session, "hello")
    await backend.idle_entry(session)
    scene.pool.freeze()
    both = [delete(backend, session), sent_unless_deleted(backend, session)]
    if not delete_first:
        both.reverse()
    done = await scene.arrived(scene.pool, *both)
    scene.pool.thaw()
    await asyncio.gather(*done)
    assert await is_deleted(backend, session)
    await scene.until_nothing_runs(backend, session)
    assert not scene.workspace(session).exists()


@pytest.mark.parametrize("point", sampled(["prepare.checked_out", "prompt.sent"], every=3))
async def test_a_credential_that_changes_during_a_turn_reaches_the_next_and_no_agent_keeps_the_old_one(
    scene: PoolScene, point: str
) -> None:
    session, backend, name = key(), scene.backend, f"key-{uuid.uuid4().hex[:8]}"
    await put(backend, name, "old")
    first = await backend.run(session, "remember my name is Ada", spec=uses(name))
    await backend.idle_entry(session)
    assert given(first) == "old"
    frozen = scene.aim(f"pool.{point}")
    sent = await backend.send(session, "say on")
    await frozen.reached()
    (rotating,) = await scene.arrived(scene.pool, put(backend, name, "new"))
    frozen.thaw()
    await rotating
    second = await backend.ending(session, sent.started.execution.execution_id)
    await backend.idle_entry(session)
    # What was read before the change is what the turn runs with; it fails for nothing.
    if point == "prepare.checked_out":
        assert given(second) in ("old", "new")
    else:
        assert (given(second), summary(second).how) == ("old", "warm")
    third = await backend.run(session, "what is my name?")
    assert given(third) == "new"
    assert agent_of(third) != agent_of(first)
    assert "Ada" in agent_text(await backend.events(session), third.execution_id)
    await scene.check(backend, session)
