"""What a turn costs beside the agent's own work: warm, cold, many at once, on the stand-in of Daytona, and what a
thousand kept agents weigh."""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import uuid

from benchmarks import machine, warm_daytona, warm_memory, warm_turns
from benchmarks.figures import Figures, latency
from benchmarks.report import Report, Target, most
from benchmarks.rig import Rig
from benchmarks.runs import Measure, Options, Part, Say, collect, once
from benchmarks.warm_turns import PAUSE_SECONDS, House, Talk, Turn

WORKLOAD = "warm"

_TURNS, _SESSIONS, _TURNS_EACH, _COLD = 200, 8, 25, 5
# Between the turns of each of many sessions: somebody reads and writes, also where eight of them talk at once.
_PAUSE_AT_ONCE = 0.5
_QUICK = (10, 2, 3, 1)
_PARKED, _PARKED_QUICK = 1_000, 20
# More than any part keeps, and longer than any part takes.
_ROOM = {"HEARTH_LOCAL_WARM_CAP": "32", "HEARTH_LOCAL_WARM_WINDOW": "600"}


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark."""
    turns, at_once, each, cold = _QUICK if options.quick else (_TURNS, _SESSIONS, _TURNS_EACH, _COLD)
    parked = _PARKED_QUICK if options.quick else _PARKED
    async with Rig() as rig, warm_turns.house(rig, **_ROOM) as house:
        report = Report(
            WORKLOAD,
            {
                "turns": turns,
                "sessions_at_once": at_once,
                "turns_each": each,
                "cold_starts": cold,
                "pause_s": PAUSE_SECONDS,
                "pause_at_once_s": _PAUSE_AT_ONCE,
                "parked_entries": parked,
                "runs": options.runs,
                **await rig.description(),
            },
        )
        parts: dict[str, Measure] = {
            "cold starts": lambda: measure_cold(rig, house, cold),
            "one caller": lambda: measure_warm(rig, house, 1, turns, "warm_"),
            "sessions at once": lambda: measure_warm(rig, house, at_once, each, "at_once_", _PAUSE_AT_ONCE),
        }
        if importlib.util.find_spec("daytona") is not None:
            shape = warm_daytona.Shape(1, 2) if options.quick else warm_daytona.Shape()
            parts["Daytona"] = warm_daytona.part(shape)
        else:
            say("the Daytona SDK is not installed, its part is left out: pip install 'hearth[daytona]'")
        await collect(report, parts, options, say)
    async with Rig() as rig:
        await once(report, f"{parked} parked entries", lambda: warm_memory.measure(rig, parked), say)
    report.targets = targets(report.figures)
    return report


async def measure_cold(rig: Rig, house: House, count: int) -> Part:
    """Sessions that never ran: the agent is started for each."""
    turns = []
    with machine.measured(rig.pids(*house.services.values())) as usage:
        for _ in range(count):
            async with _talk(house, "cold") as talk:
                turns.append(await talk.turn())
                await asyncio.sleep(PAUSE_SECONDS)
    await warm_turns.settle(turns, house.trace_file)
    problems = warm_turns.check(turns, "cold")
    figures = {"cold_p50_ms": statistics.median(turn.to_prompt for turn in turns) * 1000}
    figures |= {"cold_most_ms": max(turn.to_prompt for turn in turns) * 1000}
    return Part(figures, usage.others_cores, problems)


async def measure_warm(
    rig: Rig, house: House, sessions: int, count: int, prefix: str, pause: float = PAUSE_SECONDS
) -> Part:
    """Warm turns of some sessions at a time, each behind a cold one that does not count."""

    async def talk_on(number: int) -> tuple[Turn, list[Turn]]:
        async with _talk(house, f"warm{number}") as talk:
            first = await talk.turn()
            started.append(first)
            if len(started) == sessions:
                everybody.set()
            await everybody.wait()
            # Not all in step: nobody reads equally fast.
            await asyncio.sleep(4 * PAUSE_SECONDS + pause * number / sessions)
            turns = []
            for _ in range(count):
                turns.append(await talk.turn())
                await asyncio.sleep(pause)
            return first, turns

    started: list[Turn] = []
    everybody = asyncio.Event()
    running = asyncio.gather(*(talk_on(number) for number in range(sessions)))
    await everybody.wait()
    with machine.measured(rig.pids(*house.services.values())) as usage:
        talks = await running
    turns = [turn for _, own in talks for turn in own]
    await warm_turns.settle(turns, house.trace_file)
    problems = warm_turns.check(turns, "warm")
    for first, own in talks:
        problems += warm_turns.check_memory([first, *own])
    return Part(figures_of(turns, prefix, usage.cpu), usage.others_cores, problems)


def figures_of(turns: list[Turn], prefix: str, cpu: dict[str, float]) -> Figures:
    """Latencies of warm turns, and what they cost. Pure."""
    figures = latency(prefix, [turn.overhead for turn in turns])
    figures |= latency(f"{prefix}to_prompt_", [turn.to_prompt for turn in turns])
    figures |= latency(f"{prefix}to_settled_", [turn.to_settled for turn in turns])
    for stage in ("admit", "acquire", "open"):
        figures[f"{prefix}{stage}_ms"] = statistics.median(turn.stages.get(stage, 0.0) for turn in turns) * 1000
    for name, seconds in cpu.items():
        figures[f"{prefix}{name}_cpu_ms"] = seconds / len(turns) * 1000
    return figures


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "warm_p50_ms", 15, "ms"),
        most(figures, "warm_p99_ms", 50, "ms"),
        most(figures, "at_once_p50_ms", 40, "ms"),
        most(figures, "cold_p50_ms", 1500, "ms"),
        *warm_daytona.targets(figures),
        most(figures, "parked_growth_mib", 60, "MiB"),
    ]


def _talk(house: House, name: str) -> Talk:
    return Talk(house.client, f"{name}-{uuid.uuid4().hex[:8]}")
