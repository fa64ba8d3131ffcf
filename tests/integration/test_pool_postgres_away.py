"""C1, H6: the pool without its database. What runs goes on and is settled later; what is asked gets UNAVAILABLE."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from tests.contract.pool.house import Backend, House, agent_text, eventually, key, summary
from tests.contract.pool.people import ALLOWED, answer, asked, state_of, tools_of
from tests.contract.pool.refusals import refused
from tests.support.door import Door, door_to, through
from tests.support.servers import Servers


@pytest_asyncio.fixture
async def door(migrated_dsn: str) -> AsyncIterator[Door]:
    """Between the pool and its database."""
    async with door_to(migrated_dsn) as found:
        yield found


@pytest_asyncio.fixture
async def house(servers: Servers, door: Door, migrated_dsn: str, valkey_url: str) -> AsyncIterator[House]:
    """Services of which the pool reaches the database through the door."""
    found = House(servers.scratch(), migrated_dsn, valkey_url, {"HEARTH_SHUTDOWN_GRACE": "12"})
    found.pool.env["HEARTH_POSTGRES_DSN"] = through(door, migrated_dsn)
    try:
        await asyncio.to_thread(found.start_blocking)
        yield found
    finally:
        door.open()
        await asyncio.to_thread(found.stop)


@pytest_asyncio.fixture
async def backend(house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(house)
    yield found
    await found.close()


async def test_a_turn_goes_on_and_is_settled_later(backend: Backend, door: Door) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    sent = await backend.send(session, "stream 60 words at 40/s")
    execution_id = sent.started.execution.execution_id

    async def asked() -> bool:
        return (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    door.shut()

    error = await refused(backend.send(session, "hello", request_id="later"))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE")
    # Readers get all of it from history, which is not the pool's.
    ending = await backend.ending(session, execution_id)
    assert ending.HasField("execution_completed")

    door.open()

    async def accepted() -> bool:
        try:
            answer = await backend.send(session, "hello", request_id="later")
        except grpc.aio.AioRpcError as refusal:
            if refusal.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return answer.HasField("started") or answer.HasField("queued")

    await eventually(accepted)
    settled = await backend.settled(session, execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_COMPLETED

    async def the_next_ran() -> bool:
        shown = await backend.session(session)
        return shown.execution.execution_id != execution_id and bool(shown.execution.ending_sequence)

    await eventually(the_next_ran)
    last = (await backend.events(session))[-1]
    assert summary(last).how == "warm"


async def test_what_an_agent_asks_meanwhile_is_asked_later(backend: Backend, door: Door) -> None:
    session = key()
    policy = sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ASK)
    spec = sessions.SessionSpec(permissions=policy)
    sent = await backend.send(session, "stream 60 words at 40/s\nask deploy {}", spec=spec)
    execution_id = sent.started.execution.execution_id

    async def at_work() -> bool:
        return (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING

    await eventually(at_work)
    door.shut()

    async def waits() -> bool:
        return await state_of(backend, session) == "AWAITING"

    await eventually(waits)
    # What was said before is there for readers; the question is not, before it is stored.
    events = await backend.events(session)
    assert "word-60" in agent_text(events, execution_id)
    assert not any(event.HasField("interaction_requested") for event in events)
    door.open()
    (card,) = await asked(backend, session)
    await answer(backend, session, {card.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    assert await tools_of(backend, session, execution_id) == {card.request.tool_call_id: "SUCCEEDED"}
