"""The limits of a turn: which one trips, when, and once."""

from __future__ import annotations

import asyncio

import pytest

from hearth.session.v1 import session_pb2 as sessions
from services.pool.turns.limits import LimitWatch, TurnLimits
from tests.unit.pool.clocks import ManualClock

LIMITS = TurnLimits(turn=100, idle=20, first_response=5, tool_call=10)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def tripped(watch: LimitWatch, clock: ManualClock, *steps: float) -> str | None:
    task = asyncio.create_task(watch.tripped())
    for step in steps:
        await clock.advance(step)
    found = task.result() if task.done() else None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return found


async def test_the_first_output_is_waited_for(clock: ManualClock) -> None:
    assert await tripped(LimitWatch(LIMITS, clock), clock, 4.9) is None
    assert await tripped(LimitWatch(LIMITS, clock), clock, 5.1) == "FIRST_RESPONSE_LIMIT"


async def test_output_ends_that_and_starts_the_silence(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    task = asyncio.create_task(watch.tripped())
    await clock.advance(4)
    watch.progress()
    await clock.advance(19)
    assert not task.done()
    watch.progress()
    await clock.advance(19)
    assert not task.done()
    await clock.advance(1.1)
    assert task.result() == "IDLE_LIMIT"


async def test_each_tool_call_has_its_own_time(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    task = asyncio.create_task(watch.tripped())
    watch.progress()
    watch.running_tools(["a"])
    await clock.advance(6)
    watch.progress()
    watch.running_tools(["a", "b"])
    await clock.advance(3)
    watch.running_tools(["b"])
    await clock.advance(5)
    assert not task.done()
    await clock.advance(2.1)
    assert task.result() == "TOOL_LIMIT"


async def test_output_does_not_stretch_the_turn(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    task = asyncio.create_task(watch.tripped())
    for _ in range(10):
        watch.progress()
        await clock.advance(10)
    assert task.result() == "TURN_LIMIT"


def test_limits_of_a_spec_stand_over_those_of_the_deployment_and_make_sense() -> None:
    given = sessions.TurnLimits()
    given.idle.FromSeconds(30)
    given.tool_call.FromMilliseconds(1500)
    assert LIMITS.with_spec(given) == TurnLimits(turn=100, idle=30, first_response=5, tool_call=1.5)
    given.turn.FromSeconds(20)
    # A silence longer than the turn would never be noticed.
    assert LIMITS.with_spec(given).idle == 10
    given.turn.FromSeconds(10**9)
    assert LIMITS.with_spec(given).turn == 4 * 24 * 3600
