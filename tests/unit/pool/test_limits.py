"""The limits of a turn: which one trips, when, and once; and that no time passes while a person is asked.

`w_t01` is behaviour T1 of the catalogue of warm sandboxes.
"""

from __future__ import annotations

import asyncio
import dataclasses

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


async def test_w_t01_the_first_output_is_waited_for(clock: ManualClock) -> None:
    assert await tripped(LimitWatch(LIMITS, clock), clock, 4.9) is None
    assert await tripped(LimitWatch(LIMITS, clock), clock, 5.1) == "FIRST_RESPONSE_LIMIT"


async def test_w_t01_output_ends_that_and_progress_ends_a_silence(
    clock: ManualClock,
) -> None:
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


async def test_w_t01_each_tool_call_has_its_own_time(clock: ManualClock) -> None:
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


async def test_w_t01_what_is_no_output_does_not_count_as_the_first(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    watch.progress(output=False)
    assert await tripped(watch, clock, 5.1) == "FIRST_RESPONSE_LIMIT"


async def test_w_t01_what_is_no_output_is_no_silence_either(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    watch.progress()
    task = asyncio.create_task(watch.tripped())
    await clock.advance(19)
    watch.progress(output=False)
    await clock.advance(19)
    assert not task.done()
    await clock.advance(1.1)
    assert task.result() == "IDLE_LIMIT"


async def test_w_t01_a_limit_trips_once_and_the_first_reason_stands(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    assert await tripped(watch, clock, 6) == "FIRST_RESPONSE_LIMIT"
    watch.progress()
    watch.running_tools(["a"])
    assert await tripped(watch, clock, 200) == "FIRST_RESPONSE_LIMIT"


@pytest.mark.parametrize("begun", [False, True])
async def test_w_t01_nothing_passes_while_a_person_is_asked(clock: ManualClock, begun: bool) -> None:
    watch = LimitWatch(LIMITS, clock)
    if begun:
        watch.progress()
        watch.running_tools(["a"])
    task = asyncio.create_task(watch.tripped())
    await clock.advance(4)
    with watch.frozen():
        await clock.advance(10_000)
        assert not task.done()
        watch.running_tools(["a", "b"] if begun else [])
        # Two may be asked at a time.
        with watch.frozen():
            await clock.advance(10_000)
        await clock.advance(10_000)
        assert not task.done()
    # What was left before is left now: 1 s to the first output, or 6 s to the end of the first tool call.
    left = 6 if begun else 1
    await clock.advance(left - 0.1)
    assert not task.done()
    await clock.advance(0.2)
    assert task.result() == ("TOOL_LIMIT" if begun else "FIRST_RESPONSE_LIMIT")


async def test_w_t01_the_whole_turn_is_frozen_too(clock: ManualClock) -> None:
    watch = LimitWatch(dataclasses.replace(LIMITS, idle=90), clock)
    watch.progress()
    task = asyncio.create_task(watch.tripped())
    await clock.advance(50)
    with watch.frozen():
        await clock.advance(1_000)
    watch.progress()
    await clock.advance(49)
    assert not task.done()
    await clock.advance(1.1)
    assert task.result() == "TURN_LIMIT"


async def test_w_t01_a_watch_that_nobody_awaits_does_nothing(clock: ManualClock) -> None:
    watch = LimitWatch(LIMITS, clock)
    task = asyncio.create_task(watch.tripped())
    await clock.advance(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clock.advance(1_000)
    assert clock.sleeping == 0


async def test_w_t01_no_delay_is_nothing(clock: ManualClock) -> None:
    """What is left of a sum of floats must not become a busy loop."""
    watch = LimitWatch(TurnLimits(0.1 + 0.2, 0.3, 0.30000000000000004, 0.3), clock)
    task = asyncio.create_task(watch.tripped())
    await clock.advance(0.3)
    await clock.advance(0.001)
    assert task.done()
    assert min(clock.asked) >= 0.001


def test_w_t01_limits_of_a_spec_stand_over_those_of_the_deployment_and_make_sense() -> None:
    given = sessions.TurnLimits()
    given.idle.FromSeconds(30)
    given.tool_call.FromMilliseconds(1500)
    assert LIMITS.with_spec(given) == TurnLimits(turn=100, idle=30, first_response=5, tool_call=1.5)
    given.turn.FromSeconds(20)
    # A silence longer than the turn would never be noticed.
    assert LIMITS.with_spec(given).idle == 10
    given.turn.FromSeconds(10**9)
    assert LIMITS.with_spec(given).turn == 4 * 24 * 3600
