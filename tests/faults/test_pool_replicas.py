"""Three replicas of the pool, of which one is killed, frozen, cut off or told to end in the middle of what it does.

The others notice by its beats, and each execution goes the way of its state: one that no agent has seen starts
elsewhere, one at work is lost, one that was being stopped is stopped, and one that waits for people waits on. What was
frozen and thaws again reaches nobody: no agent, no reader, no sandbox.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Iterator

import asyncpg
import grpc.aio
import pytest
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, agent_text, eventually, key, summary
from tests.contract.pool.people import ALLOWED, answer, asked, interactions
from tests.faults.trio import Trio, waits
from tests.support.exhaustive import sampled
from tests.support.relay_reader import reading
from tests.support.replicas import holder_of, replicas_by
from tests.support.servers import Servers

pytestmark = [pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def started(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[Trio]:
    """Three replicas, shared by the tests of this module."""
    trio = Trio(servers, module_postgres_dsn, module_valkey_url)
    with trio.house.running():
        yield trio


@pytest_asyncio.fixture
async def trio(started: Trio) -> AsyncIterator[Trio]:
    """The same for one test."""
    await started.use()
    yield started
    await started.clean_up()


async def quiet(backend: Backend, session: session_pb2.SessionKey) -> list[event_pb2.Event]:
    """The log of a session, once a turn more has run in it: whatever was on its way is there."""
    before = len(await backend.events(session))
    ending = await backend.run(session, "say anything else")
    assert ending.HasField("execution_completed"), ending
    return (await backend.events(session))[:before]


async def test_n39_n42_a_replica_that_is_killed_in_a_turn_loses_it_and_the_next_message_runs(trio: Trio) -> None:
    """H6, C4; the input behind it waits until somebody sends again."""
    one, two, three = trio.backends
    session, kept = key("busy"), key("kept")
    await one.run(kept, "remember my name is Ada")
    lost = await trio.at_work(one, session, "hang")
    queued = (await two.send(session, "say it after")).queued.input_id
    trio.replicas[0].kill9()

    ending = await three.ending(session, lost)
    assert ending.HasField("execution_lost"), ending
    assert ending.execution_lost.summary.manifest.incomplete
    assert (await two.settled(session, lost)).outcome == sessions.EXECUTION_OUTCOME_LOST
    found = await three.session(session)
    assert (found.queue_paused, found.queued_inputs, found.holder) == (True, 1, "")
    # The agent that it left at work was ended.
    assert (await two.run(session, "say it now")).HasField("execution_completed")

    async def promoted() -> str | None:
        events = [event for event in await two.events(session) if event.input_promoted.input_id == queued]
        return events[0].input_promoted.execution_id if events else None

    assert (await two.ending(session, await eventually(promoted))).HasField("execution_completed")
    # What it only kept goes on at once, too.
    ending = await two.run(kept, "what is my name?")
    assert "Ada" in agent_text(await two.events(kept), ending.execution_id)
    for each in (session, kept):
        await trio.check(two, each)
    assert trio.handed_over(lost) == 1


@pytest.mark.parametrize("point", sampled(["prepare.acquired", "admit.committed", "prepare.opened"], every=3))
async def test_a_replica_that_is_killed_before_the_prompt_leaves_the_execution_to_another_one(
    trio: Trio, point: str
) -> None:
    one, two, _ = trio.backends
    session = key()
    trio.aim(0, point, how="kill")
    sending = asyncio.ensure_future(one.send(session, "say hello", request_id="r"))
    await trio.reached(0)
    await asyncio.wait([sending])
    sending.exception()
    sent = await two.send(session, "say hello", request_id="r")
    execution_id = sent.started.execution.execution_id
    ending = await two.ending(session, execution_id)
    assert ending.HasField("execution_completed"), ending
    found = await two.settled(session, execution_id)
    assert (found.epoch, found.tries) == (2, 2)
    assert trio.handed_over(execution_id) == 1
    await trio.check(two, session)


async def test_n35_n44_a_stop_of_a_frozen_replica_is_told_once_its_agent_is_proven_dead(trio: Trio) -> None:
    one, two, three = trio.backends
    session = key()
    stopped = await trio.at_work(one, session, "stream 100000 words at 20/s")
    trio.replicas[0].freeze()
    command = await two.stop(session, stopped)
    ending = await three.ending(session, stopped)
    assert ending.execution_stopped.reason == "runner lost"
    assert ending.execution_stopped.command_id == command.command_id
    await three.settled(session, stopped)
    assert (await three.command(session, command.command_id)).outcome == sessions.COMMAND_OUTCOME_STOPPED
    assert await two.running_sandboxes(session) == []

    trio.replicas[0].thaw()
    await trio.back(0, two)
    log = await quiet(two, session)
    assert (await two.events(session))[: len(log)] == log
    await trio.check(two, session)


async def test_n41_n103_a_card_stays_when_its_replica_dies_and_its_answer_starts_one_continuation(trio: Trio) -> None:
    """C1, C2, C5."""
    one, two, three = trio.backends
    session = key()
    await one.send(session, 'ask search {"for": "x"}')
    (card,) = await asked(one, session)
    trio.replicas[0].kill9()

    execution_id = card.execution_id
    ending = await two.ending(session, execution_id)
    assert ending.HasField("execution_paused"), ending
    await two.settled(session, execution_id)
    (still,) = await asked(three, session)
    assert still.interaction_id == card.interaction_id
    await answer(three, session, {still.interaction_id: ALLOWED}, request_id="a")

    async def continued() -> str | None:
        events = [event for event in await two.events(session) if event.execution_started.source_execution_id]
        return events[0].execution_id if events else None

    continuation = await eventually(continued)
    await answer(two, session, {still.interaction_id: ALLOWED}, request_id="a")
    assert (await two.ending(session, continuation)).HasField("execution_completed")
    events = await two.events(session)
    sources = [event.execution_started.source_execution_id for event in events if event.HasField("execution_started")]
    assert sources.count(execution_id) == 1
    states = {found.interaction_id: found.state for found in await interactions(two, session)}
    assert states[card.interaction_id] == sessions.INTERACTION_STATE_CONSUMED
    assert [line["tool"] for line in trio.journal("tool")][-1:] == ["search"]
    await trio.check(two, session)


async def test_n90_a_replica_that_thaws_before_its_prompt_asks_nobody(trio: Trio) -> None:
    """C4, H7, S1: it holds a sandbox and an agent that are not its own any more, and was about to use them."""
    one, two, _ = trio.backends
    session = key()
    trio.aim(0, "prompt.sending")
    lost = (await one.send(session, "say what must not be said")).started.execution.execution_id
    await trio.reached(0)
    ending = await two.ending(session, lost)
    assert ending.HasField("execution_lost"), ending
    # Nothing is waited for: it thaws while its agent may still be there.
    trio.replicas[0].thaw()
    await trio.back(0, two)
    log = await quiet(two, session)
    assert trio.handed_over(lost) == 0
    assert (await two.events(session))[: len(log)] == log
    # And it is one of them again.
    assert (await one.run(key(), "say hello")).HasField("execution_completed")
    await trio.check(two, session)


@pytest.mark.parametrize("point", sampled(["prepare.acquired", "park.releasing", "turn.answered"], every=3))
async def test_n48_n92_a_replica_that_thaws_in_the_middle_of_a_turn_changes_nothing_of_it(
    trio: Trio, point: str
) -> None:
    one, two, _ = trio.backends
    session = key()
    trio.aim(0, point)
    execution_id = (await one.send(session, "remember my name is Ada")).started.execution.execution_id
    await trio.reached(0)
    await trio.given_up(0, two)
    ending = await two.ending(session, execution_id)
    expected = "execution_lost" if point == "turn.answered" else "execution_completed"
    assert ending.WhichOneof("body") == expected
    await two.settled(session, execution_id)
    again = await two.run(session, "what is my name?")
    assert again.HasField("execution_completed")
    await trio.parked(two, session)
    log, prompts = await two.events(session), trio.journal()
    sandboxes = await two.running_sandboxes(session)
    assert len(sandboxes) == 1

    trio.replicas[0].thaw()
    await trio.back(0, two)
    # Its last acts come to nothing: the agent of the other one is still there.
    assert await two.events(session) == log
    assert trio.journal() == prompts
    assert summary(await one.run(session, "say hello")).how == "warm"
    assert [one.sandbox_id for one in await two.running_sandboxes(session)] == [sandboxes[0].sandbox_id]
    assert trio.handed_over(execution_id) == 1
    await trio.check(two, session)


@pytest.mark.exhaustive
async def test_what_a_thawed_replica_still_streams_is_shown_to_nobody(trio: Trio) -> None:
    """H7, L1: neither frames nor events of a turn that has ended."""
    one, two, _ = trio.backends
    session = key()
    lost = await trio.at_work(one, session, "stream 100000 words at 50/s")
    trio.replicas[0].freeze()
    assert (await two.ending(session, lost)).HasField("execution_lost")
    log = await two.events(session)
    relay = trio.house.processes["relay"].address
    async with grpc.aio.insecure_channel(relay) as channel, reading(channel, session) as reader:
        await reader.until_type("execution.lost")
        seen = len(reader.frames)
        trio.replicas[0].thaw()
        await trio.back(0, two)
        after = await two.run(session, "stream 20 words at 100/s")
        await reader.until(lambda: any(item.event.event_id == after.event_id for item in reader.events))
        assert {frame.execution_id for frame in reader.frames[seen:]} <= {after.execution_id}
    assert (await two.events(session))[: len(log)] == log
    await trio.check(two, session)


@pytest.mark.exhaustive
async def test_a_message_at_the_door_of_a_frozen_replica_runs_once(trio: Trio) -> None:
    one, two, _ = trio.backends
    session = key()
    await one.run(session, "remember my name is Ada")
    await one.idle_entry(session)
    trio.replicas[0].freeze()
    sending = asyncio.ensure_future(one.send(session, "say it once", request_id="r"))
    await waits(sending, trio.replicas[0])
    await trio.given_up(0, two)
    assert (await two.run(session, "what is my name?")).HasField("execution_completed")
    trio.replicas[0].thaw()
    await asyncio.wait([sending])
    answered = None if sending.exception() else sending.result()
    again = await two.send(session, "say it once", request_id="r")
    execution_id = again.started.execution.execution_id
    assert answered is None or answered.started.execution.execution_id == execution_id
    assert (await two.ending(session, execution_id)).HasField("execution_completed")
    assert trio.handed_over(execution_id) == 1
    await trio.check(two, session)


@pytest.mark.exhaustive
async def test_an_execution_that_its_living_driver_does_not_drive_is_lost(trio: Trio) -> None:
    """As after a pick-up whose answer never reached the replica that asked for it."""
    one, two, three = trio.backends
    session = key()
    execution_id = await trio.at_work(one, session, "hang")
    connection = await asyncpg.connect(trio.house.dsn)
    try:
        change = "UPDATE pool.execution SET driver = $2 WHERE execution_id = $1"
        await connection.execute(change, uuid.UUID(execution_id), uuid.UUID(await holder_of(two.pools)))
    finally:
        await connection.close()
    assert (await three.ending(session, execution_id)).HasField("execution_lost")
    await three.settled(session, execution_id)
    assert (await one.run(session, "say hello")).HasField("execution_completed")
    await trio.check(two, session)


@pytest.mark.exhaustive
async def test_a_replica_that_is_told_to_end_leaves_nothing_behind_and_the_others_go_on(trio: Trio) -> None:
    one, two, _ = trio.backends
    kept, busy, session = key("kept"), key("busy"), key("unstarted")
    await one.run(kept, "remember my name is Ada")
    await one.idle_entry(kept)
    cut = await trio.at_work(one, busy, "hang")
    trio.aim(0, "prepare.acquired")
    unstarted = (await one.send(session, "say hello")).started.execution.execution_id
    await trio.reached(0)
    trio.replicas[0].signal(signal.SIGTERM)
    trio.replicas[0].thaw()
    assert await trio.replicas[0].wait(60) == 0
    assert (await two.ending(busy, cut)).execution_stopped.reason == "shutdown"
    # What no agent has seen is given back, and is started elsewhere.
    assert (await two.ending(session, unstarted)).HasField("execution_completed")
    assert trio.replicas[0].address not in await replicas_by(two.pools)
    ending = await two.run(kept, "what is my name?")
    assert summary(ending).how == "restarted"
    assert "Ada" in agent_text(await two.events(kept), ending.execution_id)
    for each in (kept, busy, session):
        await trio.check(two, each)


@pytest.mark.exhaustive
async def test_a_queue_goes_through_the_deaths_of_its_replicas(trio: Trio) -> None:
    """C4: whoever dies, each message is started once, or is there to be seen."""
    one, two, three = trio.backends
    session = key()
    await trio.at_work(one, session, "hang")
    before = len(trio.journal())
    known = {}
    for number in range(4):
        sent = await trio.backends[number % 3].send(session, f"say {number}", request_id=f"r{number}")
        known[sent.queued.input_id] = number
    trio.replicas[0].kill9()
    listed = await two.sessions.ListInputs(calls.ListInputsRequest(session=session), timeout=20)
    assert [known[one.input_id] for one in listed.inputs] == [0, 1, 2, 3]

    async def paused() -> bool:
        return (await three.session(session)).queue_paused

    await eventually(paused)
    await three.sessions.ResumeQueue(calls.ResumeQueueRequest(session=session, request_id="q"), timeout=20)

    async def all_ended() -> bool:
        events = await two.events(session)
        return sum(event.HasField("execution_completed") for event in events) == 4

    await eventually(all_ended, timeout=60)
    # A cold agent is given what was said before, too.
    said = [line["text"].splitlines()[-1] for line in trio.journal()[before:]]
    assert said == [f"say {number}" for number in range(4)]
    await trio.check(two, session)


@pytest.mark.exhaustive
async def test_what_neither_its_holder_nor_who_admitted_it_starts_is_started_by_a_third(
    servers: Servers, migrated_dsn: str, valkey_url: str
) -> None:
    """C4, long before anybody is declared dead."""
    trio = Trio(servers, migrated_dsn, valkey_url, {"HEARTH_REPLICA_DEAD_AFTER": "600"})
    with trio.house.running():
        one, two, three = await trio.use()
        session = key()
        await two.run(session, "remember my name is Ada")
        await two.idle_entry(session)
        trio.replicas[1].freeze()
        trio.aim(0, "admit.committed", how="kill")
        sending = asyncio.ensure_future(one.send(session, "what is my name?", request_id="r"))
        await trio.reached(0)
        await asyncio.wait([sending])
        sending.exception()
        again = await three.send(session, "what is my name?", request_id="r")
        execution_id = again.started.execution.execution_id
        ending = await three.ending(session, execution_id)
        assert "Ada" in agent_text(await three.events(session), ending.execution_id)
        found = await three.settled(session, execution_id)
        # Picked up, not taken over.
        assert (found.epoch, found.tries) == (2, 1)
        assert (await three.session(session)).holder == await holder_of(three.pools)
        trio.replicas[1].thaw()
        await trio.replicas[0].start()
        assert summary(await two.run(session, "say hello")).how == "warm"
        await trio.check(three, session)
        for backend in trio.backends:
            await backend.close()
