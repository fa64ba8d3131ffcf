"""SendInputNow: an input that waits runs before all others, by one cancel, and nobody else loses a place."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from hearth.session.v1 import session_pb2 as sessions
from tests.contract.pool.control import (
    Database,
    busy,
    quiet,
    remove,
    send_now,
    started,
    steer,
    waiting,
)
from tests.contract.pool.house import Backend, House, frozen, key
from tests.contract.pool.refusals import refused


@pytest.fixture(scope="module")
def house(shared_house: House) -> House:
    """The one that modules share."""
    return shared_house


async def test_n119_one_of_a_queue_runs_next_and_the_others_keep_their_order(backend: Backend, house: House) -> None:
    session = key()
    running = await busy(backend, session)
    queued = [(await backend.send(session, f"waits {number}")).queued.input_id for number in range(4)]
    with frozen(house, "history"):
        answers = await asyncio.gather(*(send_now(backend, session, queued[2]) for _ in range(3)))
        assert {answer.steered.input_id for answer in answers} == {queued[2]}
        assert len({answer.steered.command.command_id for answer in answers}) == 1
        order = [queued[2], queued[0], queued[1], queued[3]]
        assert await waiting(backend, session) == order
        # Another one is not put before it, and stays where it was.
        error = await refused(send_now(backend, session, queued[3]))
        assert (error.reason, error.metadata["input_id"]) == ("SESSION_BUSY", queued[2])
        assert await waiting(backend, session) == order
    ending = await backend.ending(session, running.execution_id)
    assert ending.execution_stopped.reason == "steer"
    assert started(await quiet(backend, session, 5))[1:] == order


async def test_n119_two_that_race_to_be_next_are_one_and_an_unchanged_other(backend: Backend, house: House) -> None:
    session = key()
    await busy(backend, session)
    queued = [(await backend.send(session, f"waits {number}")).queued.input_id for number in range(3)]
    with frozen(house, "history"):
        answers = await asyncio.gather(*(send_now(backend, session, one) for one in queued[1:]), return_exceptions=True)
        (won,) = [answer for answer in answers if not isinstance(answer, BaseException)]
        first = won.steered.input_id
        rest = [one for one in queued if one != first]
        assert await waiting(backend, session) == [first, *rest]
    assert started(await quiet(backend, session, 4))[1:] == [first, *rest]


async def test_an_input_of_a_paused_queue_runs_at_once_and_wakes_the_others(
    backend: Backend, database: Database
) -> None:
    session = key()
    running = await busy(backend, session)
    queued = [(await backend.send(session, f"waits {number}")).queued.input_id for number in range(3)]
    await backend.stop(session, running.execution_id)
    await backend.settled(session, running.execution_id)
    answer = await send_now(backend, session, queued[1], request_id="now")
    assert answer.started.input_id == queued[1]
    # A retry, and another click, start nothing more.
    again = await send_now(backend, session, queued[1], request_id="now")
    assert again.started.execution.execution_id == answer.started.execution.execution_id
    late = await refused(send_now(backend, session, queued[1]))
    assert (late.reason, late.metadata["state"]) == ("INPUT_NOT_PENDING", "PROMOTED")
    events = await quiet(backend, session, 4)
    assert started(events)[1:] == [queued[1], queued[0], queued[2]]
    outcome = await database.fetchval(
        "SELECT outcome FROM pool.command WHERE session = $1 AND kind = 'STEER'", session.session
    )
    assert outcome == "STARTED"


async def test_n36_what_cannot_be_sent_at_once_is_refused_and_stops_nothing(
    backend: Backend, database: Database
) -> None:
    session = key()
    gone = (await backend.run(session, "hello")).execution_id
    running = await busy(backend, session)
    queued = (await backend.send(session, "waits")).queued.input_id
    removed = (await backend.send(session, "not this")).queued.input_id
    await remove(backend, session, removed)
    unknown = await refused(send_now(backend, session, str(uuid.uuid4())))
    assert unknown.reason == "INPUT_NOT_FOUND"
    was_removed = await refused(send_now(backend, session, removed))
    assert (was_removed.reason, was_removed.metadata["state"]) == ("INPUT_NOT_PENDING", "REMOVED")
    other = await refused(send_now(backend, session, queued, meant=gone))
    assert (other.reason, other.metadata["execution_id"]) == ("EXECUTION_MISMATCH", running.execution_id)
    foreign = await refused(send_now(backend, key(), queued))
    assert foreign.reason == "SESSION_NOT_FOUND"
    assert await database.fetchval("SELECT count(*) FROM pool.command WHERE session = $1", session.session) == 0
    assert (await backend.execution(session, running.execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    answer = await send_now(backend, session, queued, meant=running.execution_id)
    assert answer.steered.input_id == queued
    await quiet(backend, session, 3)


async def test_a_retry_follows_an_input_whose_cancel_was_taken_back(backend: Backend, house: House) -> None:
    session = key()
    running = await busy(backend, session)
    queued = (await backend.send(session, "waits")).queued.input_id
    with frozen(house, "history"):
        assert (await send_now(backend, session, queued, request_id="now")).HasField("steered")
        # A message that steers finds the cancel taken.
        assert (await steer(backend, session, "and this")).queued.rank == 2
        await backend.stop(session, running.execution_id)
        assert (await send_now(backend, session, queued, request_id="now")).queued.rank == 1
        await remove(backend, session, queued)
        assert (await send_now(backend, session, queued, request_id="now")).removed.input_id == queued
    await backend.settled(session, running.execution_id)
    assert (await backend.session(session)).queue_paused
