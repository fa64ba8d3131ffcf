"""A replica of the pool is killed in the middle of turns: how long until readers hear `lost`, and whether the next
message is answered at once after."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks import machine, warm_turns
from benchmarks.control_stops import RATE, Talk
from benchmarks.figures import Figures
from benchmarks.report import Target, most
from benchmarks.rig import Rig
from benchmarks.runs import Part
from benchmarks.warm_turns import House, ending_of

# How fast a replica is seen to be dead, in what the tests use.
FAST = {
    "HEARTH_REPLICA_BEAT_EVERY": "0.3",
    "HEARTH_REPLICA_BEAT_FAILING": "0.3",
    "HEARTH_REPLICA_LOOK_EVERY": "0.3",
    "HEARTH_REPLICA_GAP": "1.5",
    "HEARTH_REPLICA_DEAD_AFTER": "3",
}
_FRAMES_BEFORE = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """`kills` one after the other, each with so many turns under way on the replica that dies. A turn is given up for
    after `patience` seconds."""

    kills: int
    turns: int = 4
    patience: float = 120.0


FEW = Shape(kills=1, turns=2)


@dataclass(slots=True)
class Killed:
    """Seconds of one turn of a replica that was killed: until its ending was read, and what the next message took."""

    lost: float
    ending: str
    next: float
    next_ending: str


async def part(rig: Rig, shape: Shape, prefix: str, settings: Mapping[str, str]) -> Part:
    """Two replicas with these settings; figures are named `<prefix>...`."""
    async with warm_turns.house(rig, 2, **settings) as house:
        with machine.measured(rig.pids(*house.services.values())) as usage:
            killed = [one for _ in range(shape.kills) for one in await _kill(house, shape)]
    return Part(figures_of(killed, prefix), usage.others_cores, check(killed))


async def _kill(house: House, shape: Shape) -> list[Killed]:
    victim = house.pools[0]
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(house.client_of(victim))
        talks: list[tuple[Talk, str]] = []
        for number in range(shape.turns):
            name = f"kill-{number}-{uuid.uuid4().hex[:6]}"
            # The replica that accepts a turn is the one that drives it.
            talk = await stack.enter_async_context(Talk(direct, name))
            talks.append((talk, await talk.send(f"stream 100000 words at {RATE:g}/s")))
        for talk, execution_id in talks:
            await talk.frames(execution_id, _FRAMES_BEFORE)
        at = time.time_ns()
        await victim.stop(signal.SIGKILL)
        try:
            return list(await asyncio.gather(*(_after(house, *talk, at, shape.patience) for talk in talks)))
        finally:
            await victim.start()


async def _after(house: House, talk: Talk, execution_id: str, at: int, patience: float) -> Killed:
    """What one session sees; the next message goes to the address of all replicas, one of which is gone."""
    event, seen = await talk.ending(execution_id, patience)
    sent = time.time_ns()
    answer = await house.client.send(talk.key, "hello")
    next_event, next_seen = await talk.ending(answer.started.execution.execution_id)
    return Killed((seen - at) / 1e9, ending_of(event), (next_seen - sent) / 1e9, ending_of(next_event))


def check(killed: list[Killed]) -> list[str]:
    """What is wrong with turns whose driver was killed. Pure."""
    problems = [f"a turn whose driver died ended as {one.ending}" for one in killed if one.ending != "execution_lost"]
    return problems + [
        f"the turn after that ended as {one.next_ending}" for one in killed if one.next_ending != "execution_completed"
    ]


def figures_of(killed: list[Killed], prefix: str) -> Figures:
    """The slowest of them. Pure."""
    return {
        f"{prefix}lost_most_s": max(one.lost for one in killed),
        f"{prefix}lost_least_s": min(one.lost for one in killed),
        f"{prefix}next_most_s": max(one.next for one in killed),
    }


def targets(figures: Mapping[str, float]) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "fast_lost_most_s", 5, "s"),
        most(figures, "fast_next_most_s", 5, "s until the next message is answered"),
        most(figures, "default_lost_most_s", 60, "s"),
        most(figures, "default_next_most_s", 5, "s until the next message is answered"),
    ]
