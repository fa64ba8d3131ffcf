"""Two replicas of the pool on one database: whichever is asked, the one that has the session does it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_pb2, pool_service_pb2, replica_service_pb2, replica_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House, agent_text, eventually, is_ending, key, summary
from tests.contract.pool.people import ALLOWED, DENIED, answer, asked
from tests.contract.pool.refusals import refused
from tests.support.replicas import holder_of, replicas_by
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """Services with two replicas of the pool, as they are set by default."""
    env = {"HEARTH_SECRET_KEY": new_key(), "HEARTH_SHUTDOWN_GRACE": "12"}
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env, pools=2).running() as found:
        yield found


@pytest_asyncio.fixture
async def one(house: House) -> AsyncIterator[Backend]:
    """Calls to the first replica."""
    found = Backend(house)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def two(house: House) -> AsyncIterator[Backend]:
    """Calls to the second one."""
    found = Backend(house, pool="pool-2")
    yield found
    await found.close()


@pytest_asyncio.fixture
async def either(house: House) -> AsyncIterator[Backend]:
    """Calls that go around."""
    found = Backend(house, pool="")
    yield found
    await found.close()


async def running(backend: Backend, session: session_pb2.SessionKey, text: str) -> str:
    """Send a message, and wait until its agent was asked; its execution."""
    execution_id = (await backend.send(session, text)).started.execution.execution_id

    async def asked() -> bool:
        return (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    return execution_id


async def nudge(
    house: House,
    session: session_pb2.SessionKey,
    *,
    holder: str,
    epoch: int = 1,
    reason: pool_pb2.NudgeReason.ValueType = pool_pb2.NUDGE_REASON_EXECUTION,
) -> pool_pb2.NudgeReceipt.ValueType:
    """Nudge the first replica."""
    request = replica_service_pb2.NudgeRequest(session=session, epoch=epoch, reason=reason, holder=holder)
    async with grpc.aio.insecure_channel(house.pool.address) as channel:
        answer = await replica_service_pb2_grpc.ReplicaServiceStub(channel).Nudge(request, timeout=20)
    found: pool_pb2.NudgeReceipt.ValueType = answer.receipt
    return found


async def test_both_beat_and_each_knows_of_the_other(house: House, one: Backend, two: Backend) -> None:
    addresses = {house.processes[name].address for name in house.pools}
    assert set(await replicas_by(one.pools)) == set(await replicas_by(two.pools)) == addresses
    assert await holder_of(one.pools) != await holder_of(two.pools)


async def test_a_message_at_another_replica_is_taken_up_by_the_one_that_keeps_the_agent(
    one: Backend, two: Backend
) -> None:
    session = key()
    await one.run(session, "remember my name is Ada")
    await one.idle_entry(session)
    ending = await two.run(session, "what is my name?")
    assert summary(ending).how == "warm"
    assert "Ada" in agent_text(await two.events(session), ending.execution_id)
    assert (await two.session(session)).holder == await holder_of(one.pools)


async def test_w_t04_a_stop_at_another_replica_reaches_the_agent(one: Backend, two: Backend) -> None:
    session = key()
    execution_id = await running(one, session, "stream 100000 words at 50/s")
    command = await two.stop(session, execution_id)
    assert (await one.ending(session, execution_id)).HasField("execution_stopped")
    await two.settled(session, execution_id)
    assert (await two.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    # It was the agent that stopped, and it can go on.
    await one.idle_entry(session)
    assert summary(await two.run(session, "hello")).how == "warm"


async def test_an_answer_at_another_replica_reaches_the_agent_that_waits(one: Backend, two: Backend) -> None:
    session = key()
    policy = sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ASK)
    text = "ask edit {}\nask remove {}"
    sent = await one.send(session, text, spec=sessions.SessionSpec(permissions=policy))
    execution_id = sent.started.execution.execution_id
    for decision in (ALLOWED, DENIED):
        (gate,) = await asked(two, session)
        response = await answer(two, session, {gate.interaction_id: decision})
        assert response.execution.execution_id == execution_id
    assert (await one.ending(session, execution_id)).HasField("execution_completed")
    tools = {
        e.tool_completed.name: e.tool_completed.status
        for e in await one.events(session)
        if e.HasField("tool_completed")
    }
    assert tools == {"edit": event_pb2.TOOL_STATUS_SUCCEEDED, "remove": event_pb2.TOOL_STATUS_DENIED}


async def test_what_is_told_at_another_replica_comes_in_its_order_with_what_the_agent_does(
    one: Backend, two: Backend
) -> None:
    session = key()
    execution_id = await running(one, session, "stream 60 words at 30/s")
    first = (await two.send(session, "first")).queued.input_id
    second = (await one.send(session, "second")).queued.input_id
    request = calls.RemoveInputRequest(session=session, request_id=str(uuid.uuid4()), input_id=first)
    await two.sessions.RemoveInput(request, timeout=20)

    async def told() -> list[str] | None:
        events = await one.events(session)
        found = [event.type for event in events if event.entity_id in {first, second}]
        return found if len(found) >= 3 else None

    # Long before the turn ends: whoever drives it was told of them.
    assert await eventually(told) == ["input.queued", "input.queued", "input.removed"]
    await one.ending(session, execution_id)

    async def promoted() -> str | None:
        events = [event for event in await two.events(session) if event.HasField("input_promoted")]
        return events[0].input_promoted.execution_id if events else None

    after = await two.ending(session, await eventually(promoted))
    assert summary(after).how == "warm"


async def test_a_kill_at_another_replica_ends_the_turn_and_the_agent(one: Backend, two: Backend) -> None:
    session = key()
    execution_id = await running(one, session, "stream 100000 words at 50/s")
    await two.sessions.KillSession(calls.KillSessionRequest(session=session, request_id="k"), timeout=30)
    ending = await two.ending(session, execution_id)
    assert ending.execution_stopped.reason == "killed"

    async def forgotten() -> bool:
        entries = (await one.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)).entries
        return all(entry.session != session for entry in entries)

    await eventually(forgotten)

    async def gone() -> bool:
        return not await one.running_sandboxes(session)

    await eventually(gone)
    await two.settled(session, execution_id)
    assert (await two.run(session, "hello")).HasField("execution_completed")
    events = await two.events(session)
    assert [event.execution_id for event in events if is_ending(event, execution_id)] == [execution_id]


async def test_a_deletion_at_another_replica_leaves_nothing_here(one: Backend, two: Backend) -> None:
    kept, busy = key("kept"), key("busy")
    await one.run(kept, "hello")
    await one.idle_entry(kept)
    await running(one, busy, "hang")
    for session in (kept, busy):
        request = calls.DeleteSessionRequest(session=session, request_id="d")
        await two.sessions.DeleteSession(request, timeout=30)

    async def forgotten() -> bool:
        entries = (await one.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)).entries
        return all(entry.session not in (kept, busy) for entry in entries)

    await eventually(forgotten)
    for session in (kept, busy):
        assert (await refused(one.send(session, "hello"))).reason == "SESSION_DELETED"
        assert await two.running_sandboxes(session) == []


async def test_a_nudge_says_what_becomes_of_it(house: House, one: Backend) -> None:
    me, session = await holder_of(one.pools), key()
    assert await nudge(house, session, holder=me) == pool_pb2.NUDGE_RECEIPT_NOT_HELD
    execution_id = await running(one, session, "stream 100000 words at 50/s")
    assert await nudge(house, session, holder=str(uuid.uuid4())) == pool_pb2.NUDGE_RECEIPT_NOT_HELD
    assert await nudge(house, session, holder=me) == pool_pb2.NUDGE_RECEIPT_DUPLICATE
    command = pool_pb2.NUDGE_REASON_COMMAND
    assert await nudge(house, session, holder=me, reason=command) == pool_pb2.NUDGE_RECEIPT_ACCEPTED
    # Nothing comes of it where there is nothing to do.
    assert (await one.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    await one.stop(session, execution_id)
    await one.settled(session, execution_id)
    await one.idle_entry(session)
    assert await nudge(house, session, holder=me) == pool_pb2.NUDGE_RECEIPT_ACCEPTED
    # An entry of the epoch itself is not what is to go.
    evict = pool_pb2.NUDGE_REASON_EVICT
    assert await nudge(house, session, holder=me, reason=evict) == pool_pb2.NUDGE_RECEIPT_NOT_HELD
    await one.idle_entry(session)
    error = await refused(nudge(house, session, holder="nobody"))
    assert [field for field, _ in error.field_violations] == ["holder"]


async def test_one_address_stands_for_all_of_them(either: Backend) -> None:
    answering = {await holder_of(either.pools) for _ in range(8)}
    assert len(answering) == 2
    session = key()
    for turn in range(4):
        ending = await either.run(session, f"say {turn}")
        assert ending.HasField("execution_completed")
        assert turn == 0 or summary(ending).how == "warm"
        # Readers see an ending before its agent is parked.
        await eventually(lambda: _parked(either, session))


async def _parked(either: Backend, session: session_pb2.SessionKey) -> bool:
    found = await either.running_sandboxes(session)
    return [one.tenure for one in found] == [sandbox_pb2.TENURE_PARKED]


async def test_many_at_once_at_both_start_each_message_once(one: Backend, two: Backend) -> None:
    """C4, H6."""
    session = key()

    async def send(number: int) -> str:
        backend = (one, two)[number % 2]
        sent = await backend.send(session, f"say number {number}", request_id=f"r{number}")
        again = await (two, one)[number % 2].send(session, f"say number {number}", request_id=f"r{number}")
        known = sent.started.input_id or sent.queued.input_id
        assert known == (again.started.input_id or again.queued.input_id)
        return known

    inputs = await asyncio.gather(*(send(number) for number in range(10)))
    assert len(set(inputs)) == 10

    async def all_ended() -> list[str] | None:
        events = await one.events(session)
        ended = [event.execution_id for event in events if event.HasField("execution_completed")]
        return ended if len(ended) == 10 else None

    ended = await eventually(all_ended, timeout=60)
    assert len(set(ended)) == 10
    events = await two.events(session)
    messages = [event.message_completed.message_id for event in events if event.message_completed.role == 1]
    assert sorted(messages) == sorted(inputs)


async def test_n93_an_idle_session_of_a_holder_that_does_not_answer_goes_on_at_once(
    house: House, one: Backend, two: Backend
) -> None:
    """Nobody waits for it to be declared dead, which takes longer than this test may."""
    frozen, killed = key("frozen"), key("killed")
    for session in (frozen, killed):
        await two.run(session, "remember my name is Ada")
        await two.idle_entry(session)
    holder, second = await holder_of(two.pools), house.processes["pool-2"]
    second.freeze()
    try:
        ending = await one.run(frozen, "what is my name?")
        assert "Ada" in agent_text(await one.events(frozen), ending.execution_id)
        assert holder in {found.holder for found in (await replicas_by(one.pools)).values()}
    finally:
        second.thaw()
    second.kill9()
    ending = await one.run(killed, "what is my name?")
    assert "Ada" in agent_text(await one.events(killed), ending.execution_id)
    assert holder in {found.holder for found in (await replicas_by(one.pools)).values()}
    # Whoever comes to the place of one that is gone knows that it is.
    await second.start()
    assert holder not in {found.holder for found in (await replicas_by(one.pools)).values()}
    assert (await one.session(killed)).holder == await holder_of(one.pools)


async def test_a_replica_that_drains_hands_everything_to_the_other_one(
    house: House, one: Backend, two: Backend, either: Backend
) -> None:
    """The last test of the module: what is drained stays so until its process ends."""
    idle, busy = key("idle"), key("busy")
    await two.run(idle, "remember my name is Ada")
    await two.idle_entry(idle)
    execution_id = await running(two, busy, "stream 40 words at 20/s")
    queued = (await one.send(busy, "after it")).queued.input_id
    holder = await holder_of(two.pools)
    request = pool_service_pb2.DrainReplicaRequest(holder=holder, request_id="d")
    assert (await refused(one.pools.DrainReplica(request, timeout=30))).reason == "NOT_FOUND"
    assert (await two.pools.DrainReplica(request, timeout=30)).driving == 1
    assert (await two.pools.DrainReplica(request, timeout=30)).driving <= 1
    assert (await replicas_by(one.pools))[house.processes["pool-2"].address].draining
    assert (await refused(two.send(key(), "hello"))).reason == "SHUTTING_DOWN"
    # Its idle agents are let go, what it drives ends well, and what waits goes on elsewhere.
    ending = await one.run(idle, "what is my name?")
    assert summary(ending).how in {"restarted", "cold"}
    assert "Ada" in agent_text(await one.events(idle), ending.execution_id)
    assert (await one.ending(busy, execution_id)).HasField("execution_completed")

    async def promoted() -> str | None:
        events = [event for event in await one.events(busy) if event.input_promoted.input_id == queued]
        return events[0].input_promoted.execution_id if events else None

    after = await one.ending(busy, await eventually(promoted))
    assert after.HasField("execution_completed")
    assert (await one.session(busy)).holder == await holder_of(one.pools)
    # And whoever calls by the address of both does not notice.
    for _ in range(4):
        assert (await either.run(key(), "hello")).HasField("execution_completed")
    assert await house.processes["pool-2"].terminate() == 0
    assert set(await replicas_by(one.pools)) == {house.pool.address}
    for _ in range(4):
        assert (await either.run(key(), "hello")).HasField("execution_completed")
