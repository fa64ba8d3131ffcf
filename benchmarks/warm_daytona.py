"""Turns on the stand-in of Daytona with the delays that were measured on the real service: cold, warm and restarted.

The stand-in's journal tells when the ball was in its court: a sandbox of the session on its way into a state, a call
under way, a daemon that was started and does not listen yet. The rest of the way to the agent is Hearth's own time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import machine, warm_turns
from benchmarks.figures import Figures
from benchmarks.report import Target, most
from benchmarks.rig import Rig
from benchmarks.runs import Part
from benchmarks.warm_turns import PAUSE_SECONDS, House, Talk, Turn
from hearth.cli.stand_in import AGENTD
from hearth.pool.v1 import pool_service_pb2
from tests.support.daytona import remote
from tests.support.daytona.journal import Entry
from tests.support.daytona.remote import RemoteStandIn

HOWS = ("cold", "warm", "restarted")
ADDED_MS = 60
_MOVING = frozenset({"creating", "starting", "pending_build", "building_snapshot", "pulling_snapshot", "restoring"})
_STOP_SECONDS = 30.0
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many sessions go through all three, and how many warm turns each has."""

    sessions: int = 2
    warm: int = 5


async def measure(rig: Rig, shape: Shape, *delays: str) -> Part:
    """Sessions one after the other: a cold turn, warm ones, and one in a sandbox that was stopped meanwhile."""
    environment = {**os.environ, "HEARTH_ADDRESS_FILE": str(rig.directory / "daytona.address")}
    async with (
        remote.started(rig.directory / "daytona", *delays, env=environment) as stand_in,
        warm_turns.house(rig, **_settings(rig, stand_in)) as house,
    ):
        try:
            with machine.measured(rig.pids(*house.services.values())) as usage:
                # The first one makes the volume of the deployment, and loads what a process loads once.
                turns = [await _ladder(house, shape) for _ in range(shape.sessions + 1)][1:]
            of_how = {how: [turn for ladder in turns for turn in ladder[how]] for how in HOWS}
            await warm_turns.settle([turn for found in of_how.values() for turn in found], house.trace_file)
            entries = await stand_in.log()
        finally:
            # While there still is a Daytona for them.
            for service in reversed(list(house.services.values())):
                await service.stop()
    problems = [problem for how, found in of_how.items() for problem in warm_turns.check(found, how)]
    return Part(figures_of(of_how, entries), usage.others_cores, problems)


async def _ladder(house: House, shape: Shape) -> dict[str, list[Turn]]:
    async with Talk(house.client, f"daytona-{uuid.uuid4().hex[:8]}") as talk:
        cold = await talk.turn()
        warm = []
        for _ in range(shape.warm):
            await asyncio.sleep(4 * PAUSE_SECONDS)
            warm.append(await talk.turn())
        evict = pool_service_pb2.EvictEntryRequest(session=talk.key, request_id=str(uuid.uuid4()))
        await house.client.pools.EvictEntry(evict, timeout=_STOP_SECONDS)
        return {"cold": [cold], "warm": warm, "restarted": [await talk.turn()]}


def figures_of(of_how: dict[str, list[Turn]], entries: Sequence[Entry]) -> Figures:
    """Whole pipelines, and what Hearth added, in milliseconds; and how they compare. Pure."""
    figures: Figures = {}
    for how, turns in of_how.items():
        added = [turn.overhead - theirs(entries, turn) for turn in turns]
        figures[f"daytona_{how}_ms"] = statistics.median(turn.overhead for turn in turns) * 1000
        figures[f"daytona_{how}_added_ms"] = statistics.median(added) * 1000
    for how in ("warm", "restarted"):
        figures[f"daytona_{how}_of_cold"] = figures[f"daytona_{how}_ms"] / figures["daytona_cold_ms"]
    return figures


def theirs(entries: Sequence[Entry], turn: Turn) -> float:
    """Seconds on the way to the agent that belong to the stand-in and to what runs in its sandboxes. Pure."""
    if not entries:
        return 0.0
    # Of one machine, so one difference between its clocks.
    ahead = entries[0].wall - entries[0].at
    sent, prompted = turn.sent / 1e9 - ahead, turn.prompted / 1e9 - ahead
    found = [*_moving(entries), *_calls(entries), *_daemon_starts(entries)]
    return covered((max(begin, sent), min(end, prompted)) for begin, end in found)


def covered(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasted. Pure."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > max(begin, until):
            total += end - max(begin, until)
            until = end
    return total


def _moving(entries: Sequence[Entry]) -> list[Interval]:
    """While a sandbox was on its way into a state of use."""
    since: dict[str, float] = {}
    found = []
    for entry in entries:
        if entry.kind == "state":
            began = since.pop(entry.sandbox, None)
            if began is not None:
                found.append((began, entry.at))
            if entry.data["new"] in _MOVING:
                since[entry.sandbox] = entry.at
    return found


def _calls(entries: Sequence[Entry]) -> list[Interval]:
    """While a call was served; an event stream is open all the time and waits for nobody."""
    return [(entry.data["began"], entry.at) for entry in entries if entry.kind == "call" and not _is_stream(entry)]


def _is_stream(entry: Entry) -> bool:
    return entry.data["call"] == "preview" and entry.data["method"] == "GET" and "/v1/acp/" in entry.data["path"]


def _daemon_starts(entries: Sequence[Entry]) -> list[Interval]:
    """From the first question for the health of a daemon that was not there yet to the last one."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    found = []
    for entry in entries:
        if entry.kind != "call" or not entry.data["path"].endswith("/v1/health"):
            continue
        if entry.data["status"] != 200:
            first.setdefault(entry.sandbox, entry.data["began"])
            last[entry.sandbox] = entry.at
        elif entry.sandbox in first:
            found.append((first.pop(entry.sandbox), last.pop(entry.sandbox)))
    return found


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    added = [most(figures, f"daytona_{how}_added_ms", ADDED_MS, "ms") for how in HOWS]
    return [
        *added,
        most(figures, "daytona_warm_of_cold", 0.02, "of a cold one"),
        most(figures, "daytona_restarted_of_cold", 0.6, "of a cold one"),
    ]


def part(shape: Shape) -> Callable[[], Awaitable[Part]]:
    """The measurement with the measured delays, on a rig of its own."""

    async def measured() -> Part:
        async with Rig() as rig:
            return await measure(rig, shape, "--delays", "measured")

    return measured


def _settings(rig: Rig, stand_in: RemoteStandIn) -> dict[str, str]:
    return {
        "HEARTH_PROVIDERS": "daytona",
        "HEARTH_DEFAULT_PROVIDER": "daytona",
        "HEARTH_DAYTONA_API_URL": stand_in.url,
        "HEARTH_DAYTONA_API_KEY": stand_in.api_key,
        "HEARTH_DAYTONA_DAEMON": json.dumps(AGENTD),
        "HEARTH_DAYTONA_MOUNT": str(rig.directory / "mounts"),
    }
