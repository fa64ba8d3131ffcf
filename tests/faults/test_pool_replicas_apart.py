"""Replicas of the pool without their database: an outage takes nothing from anybody, and one that is cut off alone
loses what it drives without harm.

An observer cannot tell the others' silence from its own deafness, so it judges only what it saw without a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import session_pb2
from services.chassis.errors import Unavailable
from tests.contract.pool.house import eventually, key, summary, text_content
from tests.contract.pool.refusals import refused
from tests.faults.trio import Trio
from tests.support.door import Door, door_to, through
from tests.support.replicas import FAST, holder_of, replicas_by
from tests.support.servers import Servers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

DEAD = "replica is dead"


class Apart(Trio):
    """Replicas of which each has a door to the database of its own."""

    doors: list[Door]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> AsyncIterator[Apart]:
    """They, for the tests of this module."""
    async with AsyncExitStack() as stack:
        trio = Apart(servers, module_postgres_dsn, module_valkey_url)
        trio.doors = [await stack.enter_async_context(door_to(module_postgres_dsn)) for _ in trio.replicas]
        for replica, door in zip(trio.replicas, trio.doors, strict=True):
            replica.env["HEARTH_POSTGRES_DSN"] = through(door, module_postgres_dsn)
        try:
            await asyncio.to_thread(trio.house.start_blocking)
            yield trio
        finally:
            for door in trio.doors:
                door.open()
            await asyncio.to_thread(trio.house.stop)


@pytest_asyncio.fixture(loop_scope="module")
async def apart(started: Apart) -> AsyncIterator[Apart]:
    """The same for one test."""
    await started.use()
    yield started
    for door in started.doors:
        door.open()
    await started.clean_up()


def _message(session: session_pb2.SessionKey, text: str) -> calls.SendInputRequest:
    return calls.SendInputRequest(session=session, request_id="again", content=text_content(text))


@pytest.mark.exhaustive
async def test_an_outage_for_longer_than_the_dead_are_waited_for_takes_nobody_over(apart: Apart) -> None:
    """H6, C1: what runs ends well, what is kept is kept, and what was refused can be asked for again."""
    one, two, _ = apart.backends
    kept, busy = key("kept"), key("busy")
    await one.run(kept, "remember my name is Ada")
    await one.idle_entry(kept)
    execution_id = await apart.at_work(two, busy, "stream 300 words at 20/s")
    held = [await holder_of(backend.pools) for backend in apart.backends]
    for door in apart.doors:
        door.shut()
    for replica in apart.replicas:
        await replica.logs("beats do not land", timeout=30)
    error = await refused(one.sessions.SendInput(_message(kept, "say it"), timeout=30))
    assert isinstance(error, Unavailable)
    # As long as it takes to be declared dead, and longer: here the time itself is what is tested.
    await asyncio.sleep(2 * float(FAST["HEARTH_REPLICA_DEAD_AFTER"]))
    for door in apart.doors:
        door.open()

    assert (await two.ending(busy, execution_id)).HasField("execution_completed")
    settled = await two.settled(busy, execution_id)
    assert (settled.epoch, settled.outcome) == (1, sessions.EXECUTION_OUTCOME_COMPLETED)
    assert [await holder_of(backend.pools) for backend in apart.backends] == held
    assert {found.holder for found in (await replicas_by(one.pools)).values()} == set(held)
    sent = await one.sessions.SendInput(_message(kept, "say it"), timeout=30)
    ending = await one.ending(kept, sent.started.execution.execution_id)
    assert summary(ending).how == "warm"
    assert not any(DEAD in replica.log() for replica in apart.replicas)
    for session in (kept, busy):
        await apart.check(two, session)


@pytest.mark.exhaustive
async def test_a_replica_that_is_cut_off_alone_is_given_up_and_comes_back_without_what_it_had(apart: Apart) -> None:
    """H7, S1."""
    one, two, _ = apart.backends
    kept, busy = key("kept"), key("busy")
    await one.run(kept, "remember my name is Ada")
    await one.idle_entry(kept)
    lost = await apart.at_work(one, busy, "stream 100000 words at 20/s")
    apart.doors[0].shut()
    await apart.given_up(0, two)
    assert (await two.ending(busy, lost)).HasField("execution_lost")
    await two.settled(busy, lost)
    log = await two.events(busy)
    # It is reached as ever, but it takes nothing up.
    assert summary(await two.run(kept, "what is my name?")).how in {"restarted", "cold"}
    await apart.parked(two, kept)

    apart.doors[0].open()
    await apart.back(0, two)
    await apart.replicas[0].logs("this replica was given up by another one")

    async def has_let_go() -> bool:
        return not (await one.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)).entries

    await eventually(has_let_go)
    assert await two.events(busy) == log
    assert summary(await one.run(kept, "say hello")).how == "warm"
    assert (await one.run(key(), "say hello")).HasField("execution_completed")
    for session in (kept, busy):
        await apart.check(two, session)
