"""C4, H6: the pool may die at any moment. What it had accepted is run or ended once, and the next message runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, session_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, is_ending, key, summary
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """Services that the tests kill, and start again."""
    env = {"HEARTH_SHUTDOWN_GRACE": "12"}
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest_asyncio.fixture
async def backend(house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(house)
    yield found
    await found.close()


async def running(backend: Backend, session: session_pb2.SessionKey, execution_id: str) -> None:
    """Wait until readers have seen some of it."""

    async def asked() -> bool:
        return (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING

    await eventually(asked)
    await asyncio.sleep(0.3)


async def endings(backend: Backend, session: session_pb2.SessionKey, execution_id: str) -> list[str]:
    """The endings of an execution in the log."""
    return [event.type for event in await backend.events(session) if is_ending(event, execution_id)]


async def test_killed_in_the_middle_of_a_turn(house: House, backend: Backend) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    sent = await backend.send(session, "stream 4000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    waiting = await backend.send(session, "waits")
    await running(backend, session, execution_id)

    house.pool.kill9()
    await house.pool.start()

    ending = await backend.ending(session, execution_id)
    assert ending.HasField("execution_lost")
    assert summary(ending).manifest.incomplete
    assert ending.epoch > sent.started.execution.epoch
    settled = await backend.settled(session, execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_LOST
    shown = await backend.session(session)
    assert (shown.queue_paused, shown.queued_inputs) == (True, 1)

    after = await backend.run(session, "what is my name?")
    assert after.HasField("execution_completed")
    assert "Ada" in agent_text(await backend.events(session), after.execution_id)

    async def the_other_ran() -> bool:
        events = await backend.events(session)
        return any(event.input_promoted.input_id == waiting.queued.input_id for event in events)

    await eventually(the_other_ran)
    assert await endings(backend, session, execution_id) == ["execution.lost"]


async def test_killed_before_the_prompt(house: House, backend: Backend) -> None:
    session = key()
    house.processes["sandbox"].freeze()
    sent = await backend.send(session, "hello", request_id="r")
    execution_id = sent.started.execution.execution_id
    await asyncio.sleep(0.2)
    house.pool.kill9()
    house.processes["sandbox"].thaw()
    await house.pool.start()

    ending = await backend.ending(session, execution_id)
    assert ending.HasField("execution_completed")
    settled = await backend.settled(session, execution_id)
    assert settled.epoch > sent.started.execution.epoch
    again = await backend.send(session, "hello", request_id="r")
    assert again.started.execution.execution_id == execution_id
    started = [event for event in await backend.events(session) if event.HasField("execution_started")]
    assert len(started) == 1


@pytest.mark.exhaustive
async def test_killed_again_and_again_before_the_prompt(house: House, backend: Backend) -> None:
    session = key()
    house.processes["sandbox"].freeze()
    sent = await backend.send(session, "hello")
    execution_id = sent.started.execution.execution_id
    for tries in (1, 2, 3):

        async def picked_up(tries: int = tries) -> bool:
            return (await backend.execution(session, execution_id)).tries == tries

        await eventually(picked_up)
        house.pool.kill9()
        await house.pool.start()
    house.processes["sandbox"].thaw()
    ending = await backend.ending(session, execution_id)
    assert ending.execution_failed.code == "START_FAILED"
    assert (await backend.run(session, "hello")).HasField("execution_completed")


async def test_n44_killed_while_stopping(house: House, backend: Backend) -> None:
    session = key()
    sent = await backend.send(session, "hang-hard")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    command = await backend.stop(session, execution_id)
    house.pool.kill9()
    await house.pool.start()
    ending = await backend.ending(session, execution_id)
    assert ending.execution_stopped.reason == "runner lost"
    assert ending.execution_stopped.command_id == command.command_id
    await backend.settled(session, execution_id)
    assert (await backend.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    assert not await backend.running_sandboxes(session)
    assert (await backend.run(session, "hello")).HasField("execution_completed")


async def test_n47_n109_killed_between_the_ending_and_its_settlement(house: House, backend: Backend) -> None:
    """The ending that the log has is the one that counts, whatever the row says."""
    session = key()
    connection = await asyncpg.connect(house.dsn)
    sent = await backend.send(session, "sleep 0.5")
    execution_id = sent.started.execution.execution_id
    await running(backend, session, execution_id)
    # Whoever settles has to wait for this lock.
    async with connection.transaction():
        await connection.execute("SELECT 1 FROM pool.session WHERE session = $1 FOR UPDATE", session.session)
        await backend.ending(session, execution_id)
        house.pool.kill9()
    await connection.close()
    await house.pool.start()
    settled = await backend.settled(session, execution_id)
    assert settled.outcome == sessions.EXECUTION_OUTCOME_COMPLETED
    assert await endings(backend, session, execution_id) == ["execution.completed"]
    assert (await backend.run(session, "hello")).HasField("execution_completed")


@pytest.mark.exhaustive
async def test_killed_at_any_moment_of_many_turns(house: House, backend: Backend) -> None:
    """Sends of many sessions, and a pool that is killed in the middle of them: each runs or ends, once."""
    keys = [key(str(number)) for number in range(6)]
    sent: dict[str, list[str]] = {session.session: [] for session in keys}
    accepted: dict[tuple[str, str], session_pb2.SessionKey] = {}

    async def talk(session: session_pb2.SessionKey) -> None:
        for number in range(4):
            request_id = f"r{number}"
            while True:
                try:
                    await backend.send(session, f"stream 20 words at 60/s\nsay {number}", request_id=request_id)
                    break
                except Exception:  # noqa: BLE001 - the pool is being killed; the same request is sent again
                    await asyncio.sleep(0.1)
            accepted[session.session, request_id] = session
            sent[session.session].append(request_id)
            await asyncio.sleep(0.05)

    talking = asyncio.gather(*(talk(session) for session in keys))
    for pause in (0.7, 0.9):
        await asyncio.sleep(pause)
        house.pool.kill9()
        await house.pool.start()
    await talking

    for session in keys:
        # A queue that a lost turn paused goes on with the next message.
        async def all_done(session: session_pb2.SessionKey = session) -> bool:
            shown = await backend.session(session)
            if shown.queue_paused and shown.execution.state == sessions.EXECUTION_STATE_TERMINAL:
                await backend.run(session, "go on")
            return not shown.queued_inputs and shown.execution.state == sessions.EXECUTION_STATE_TERMINAL

        await eventually(all_done, timeout=60, every=0.1)
        events = await backend.events(session)
        said = [
            event.message_completed.content[0].text.text
            for event in events
            if event.message_completed.role == content_pb2.ROLE_USER
        ]
        assert [text for text in said if text != "go on"] == [
            f"stream 20 words at 60/s\nsay {number}" for number in range(4)
        ]
        started = [event.execution_id for event in events if event.HasField("execution_started")]
        assert len(started) == len(set(started))
        for execution_id in started:
            assert len([event for event in events if is_ending(event, execution_id)]) == 1


async def test_stopped_in_order_leaves_nothing_running(house: House, backend: Backend) -> None:
    idle, busy = key("idle"), key("busy")
    await backend.run(idle, "remember my name is Ada")
    await backend.idle_entry(idle)
    sent = await backend.send(busy, "stream 5000 words at 50/s")
    execution_id = sent.started.execution.execution_id
    await running(backend, busy, execution_id)
    assert await house.pool.terminate() == 0
    assert not await backend.running_sandboxes(idle)
    assert not await backend.running_sandboxes(busy)
    ending = await backend.ending(busy, execution_id)
    assert ending.execution_stopped.reason == "shutdown"
    await house.pool.start()
    assert (await backend.settled(busy, execution_id)).outcome == sessions.EXECUTION_OUTCOME_STOPPED
    after = await backend.run(idle, "what is my name?")
    assert summary(after).how == "restarted"
    assert "Ada" in agent_text(await backend.events(idle), after.execution_id)


async def test_history_away_for_a_while(house: House, backend: Backend) -> None:
    """A Send is accepted and starts when history is back; what runs goes on and ends late."""
    session, other = key(), key()
    sent = await backend.send(other, "stream 30 words at 50/s")
    await running(backend, other, sent.started.execution.execution_id)
    house.processes["history"].kill9()
    accepted = await backend.send(session, "hello")
    assert accepted.HasField("started")
    await asyncio.sleep(3)
    waiting = await backend.execution(session, accepted.started.execution.execution_id)
    assert waiting.state == sessions.EXECUTION_STATE_PENDING
    # Waiting for history is no try.
    assert waiting.tries == 0
    await house.processes["history"].start()
    assert (await backend.ending(session, waiting.execution_id)).HasField("execution_completed")
    assert (await backend.ending(other, sent.started.execution.execution_id)).HasField("execution_completed")
    assert (await backend.settled(session, waiting.execution_id)).tries == 1


async def test_relay_and_sandbox_service_away_for_a_while(house: House, backend: Backend) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    await backend.idle_entry(session)
    house.processes["relay"].kill9()
    house.processes["sandbox"].kill9()
    sent = await backend.send(session, "what is my name?")
    await asyncio.sleep(1)
    await house.processes["sandbox"].start()
    ending = await backend.ending(session, sent.started.execution.execution_id)
    assert ending.HasField("execution_completed")
    await house.processes["relay"].start()
    assert (await backend.run(session, "hello")).HasField("execution_completed")
