"""Races for the agent of a session: whatever comes while it is parked, evicted, built or given up, each turn gets one
sandbox that is its own, its end is told, and nothing is left running."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import ENDINGS, agent_text, eventually, key, summary
from tests.contract.pool.test_attachments import path_of, put
from tests.integration.test_pool_entries import Recorded, agent_of, recorded_house
from tests.support.servers import Servers

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(servers: Servers) -> AsyncIterator[Recorded]:
    """Services whose agents are kept for as long as a test wants."""
    async with recorded_house(servers) as found:
        yield found


async def endings(here: Recorded, session: session_pb2.SessionKey, count: int) -> list[event_pb2.Event]:
    """The endings of a session, when there are so many of them."""

    async def found() -> list[event_pb2.Event] | None:
        ended = [event for event in await here.backend.events(session) if event.WhichOneof("body") in ENDINGS]
        return ended if len(ended) == count else None

    return await eventually(found)


async def until_asked(here: Recorded, session: session_pb2.SessionKey, call: str) -> None:
    """Wait until a call about a session is under way."""

    async def found() -> bool:
        return any(str(one) == call and not one.ended for one in here.recorder.about(session))

    await eventually(found)


async def nothing_runs(here: Recorded, session: session_pb2.SessionKey) -> None:
    """Wait until no sandbox of a session runs."""

    async def found() -> bool:
        return not await here.backend.running_sandboxes(session)

    await eventually(found)


async def kill(here: Recorded, session: session_pb2.SessionKey) -> None:
    """Kill a session."""
    await here.backend.sessions.KillSession(calls.KillSessionRequest(session=session, request_id="k"), timeout=30)


async def evict(here: Recorded, session: session_pb2.SessionKey) -> None:
    """Let the agent of a session go."""
    request = pool_service_pb2.EvictEntryRequest(session=session, request_id=str(uuid.uuid4()))
    await here.backend.pools.EvictEntry(request, timeout=30)


async def test_w_d09_w_d17_two_sends_at_once_use_one_agent_one_after_the_other(here: Recorded) -> None:
    session = key()
    await here.backend.run(session, "remember my name is Ada")
    await here.backend.idle_entry(session)
    await asyncio.gather(*(here.backend.send(session, f"hello {number}") for number in range(4)))
    ended = await endings(here, session, 5)
    assert [summary(event).how for event in ended] == ["cold", "warm", "warm", "warm", "warm"]
    assert len({summary(event).sandbox_id for event in ended}) == 1
    here.check(session)


async def test_a_send_while_the_agent_is_parked_waits_and_finds_it(here: Recorded) -> None:
    session = key()
    go_on = here.recorder.hold("Release")
    first = await here.backend.send(session, "remember my name is Ada")
    await until_asked(here, session, "Release CLEAN_TURN")
    sent = await here.backend.send(session, "what is my name?")
    assert sent.HasField("started")
    assert here.recorder.told(session) == ["Acquire", "Release CLEAN_TURN"]
    go_on.set()
    ending = await here.backend.ending(session, sent.started.execution.execution_id)
    assert summary(ending).how == "warm"
    await here.until_told(session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release CLEAN_TURN")
    assert first.started.execution.execution_id != ending.execution_id


async def test_w_p10_w_d11_a_send_while_the_agent_is_evicted_waits_for_its_end(here: Recorded) -> None:
    session = key()
    await here.backend.run(session, "remember my name is Ada")
    await here.backend.idle_entry(session)
    go_on = here.recorder.hold("Release")
    evicting = asyncio.create_task(evict(here, session))
    await until_asked(here, session, "Release CAPACITY")
    sent = await here.backend.send(session, "what is my name?")
    go_on.set()
    await evicting
    ending = await here.backend.ending(session, sent.started.execution.execution_id)
    assert summary(ending).how == "restarted"
    await here.until_told(session, "Acquire", "Release CLEAN_TURN", "Release CAPACITY", "Acquire", "Release CLEAN_TURN")


async def test_w_e01_a_stop_while_the_sandbox_is_made_leaves_none(here: Recorded) -> None:
    session = key()
    go_on = here.recorder.hold("Acquire")
    sent = await here.backend.send(session, "hello")
    await until_asked(here, session, "Acquire")
    await here.backend.stop(session, sent.started.execution.execution_id)
    (ending,) = await endings(here, session, 1)
    assert ending.HasField("execution_stopped")
    go_on.set()
    await nothing_runs(here, session)
    assert (await here.backend.run(session, "hello")).HasField("execution_completed")
    here.check(session)


async def test_w_k01_a_kill_while_the_sandbox_is_restarted_leaves_none(here: Recorded) -> None:
    session = key()
    await here.backend.run(session, "hello")
    await here.backend.idle_entry(session)
    await evict(here, session)
    go_on = here.recorder.hold("Acquire")
    sent = await here.backend.send(session, "hello")
    await until_asked(here, session, "Acquire")
    await kill(here, session)
    ended = await endings(here, session, 2)
    assert ended[1].execution_id == sent.started.execution.execution_id
    assert ended[1].execution_stopped.reason == "killed"
    go_on.set()
    await nothing_runs(here, session)
    assert (session.project, session.session) not in await here.entries()
    assert summary(await here.backend.run(session, "hello")).how == "cold"


async def test_a_kill_while_the_agent_is_parked_leaves_none(here: Recorded) -> None:
    session = key()
    go_on = here.recorder.hold("Release")
    await here.backend.send(session, "hello")
    await until_asked(here, session, "Release CLEAN_TURN")
    killing = asyncio.create_task(kill(here, session))
    await until_asked(here, session, "Release KILLED")
    go_on.set()
    await killing
    await nothing_runs(here, session)

    async def forgotten() -> bool:
        return (session.project, session.session) not in await here.entries()

    await eventually(forgotten)


@pytest.mark.parametrize("with_file", [False, True], ids=["prompt", "file"])
async def test_w_d10_a_daemon_that_dies_between_acquire_and_prompt_costs_a_cold_start(
    here: Recorded, with_file: bool
) -> None:
    session = key()
    first = await here.backend.run(session, "remember my name is Ada")
    files = [await put(here.backend, session, b"a file")] if with_file else []
    await here.backend.idle_entry(session)

    async def die() -> None:
        agent = psutil.Process(agent_of(first))
        daemon = agent.parent()
        assert daemon is not None
        daemon.kill()
        agent.kill()

        async def dead() -> bool:
            return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in (daemon, agent))

        await eventually(dead)

    here.recorder.after_acquire[session.project, session.session] = die
    second = await here.backend.run(session, "what is my name?", files=files)
    assert second.HasField("execution_completed")
    assert summary(second).how == "cold"
    await here.until_told(
        session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release FAILED_TURN", "Acquire", "Release CLEAN_TURN"
    )
    if files:
        third = await here.backend.run(session, f"read {path_of(files[0])}")
        assert "a file" in agent_text(await here.backend.events(session), third.execution_id)


@pytest_asyncio.fixture(loop_scope="module")
async def hasty(servers: Servers) -> AsyncIterator[Recorded]:
    """One seat, and agents that are kept for a moment only."""
    async with recorded_house(servers, HEARTH_POOL_ENTRIES="1", HEARTH_LOCAL_WARM_WINDOW="0.3") as found:
        yield found


@pytest.mark.exhaustive
async def test_w_p02_w_p04_w_d17_turns_that_meet_the_end_of_the_window_and_each_other(hasty: Recorded) -> None:
    seed = random.randrange(2**32)
    dice, talking = random.Random(seed), [key(name) for name in "abc"]

    async def talk(session: session_pb2.SessionKey) -> list[str]:
        hows = []
        for number in range(6):
            ending = await hasty.backend.run(session, f"hello {number}")
            assert ending.HasField("execution_completed"), (seed, ending)
            hows.append(summary(ending).how)
            # About as long as the window is, so that it ends while the next turn takes the agent.
            await asyncio.sleep(dice.uniform(0.2, 0.4))
        return hows

    hows = list(itertools.chain(*await asyncio.gather(*(talk(session) for session in talking))))
    assert len(hows) == 18
    for session in talking:
        hasty.check(session)
        await nothing_runs(hasty, session)

    async def all_gone() -> bool:
        return not await hasty.entries()

    await eventually(all_gone)
    executions = [
        event.execution_id for event in await hasty.backend.events(talking[0]) if event.WhichOneof("body") in ENDINGS
    ]
    assert len(executions) == len(set(executions)) == 6


@pytest.mark.exhaustive
async def test_w_p20_a_replica_that_drains_lets_idle_agents_go_and_finishes_the_others(servers: Servers) -> None:
    async with recorded_house(servers) as draining:
        idle, busy = key("idle"), key("busy")
        await draining.backend.run(idle, "hello")
        await draining.backend.idle_entry(idle)
        sent = await draining.backend.send(busy, "sleep 2")

        async def asked() -> bool:
            execution = await draining.backend.execution(busy, sent.started.execution.execution_id)
            return execution.state == sessions.EXECUTION_STATE_RUNNING

        await eventually(asked)
        holder = (await draining.backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest())).holder
        request = pool_service_pb2.DrainReplicaRequest(holder=holder, request_id="d")
        assert (await draining.backend.pools.DrainReplica(request, timeout=30)).driving == 1
        await draining.until_told(idle, "Acquire", "Release CLEAN_TURN", "Release SHUTDOWN_IDLE")
        ending = await draining.backend.ending(busy, sent.started.execution.execution_id)
        assert ending.HasField("execution_completed")
        assert await draining.house.pool.terminate() == 0
        await draining.until_told(busy, "Acquire", "Release CLEAN_TURN", "Release SHUTDOWN_IDLE")
