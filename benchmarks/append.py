"""How fast events become durable: many callers through one producer, over many sessions and in one, and one alone.

Beside it, in the same run, the same callers and the same path with one transaction for each event.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field, replace

from benchmarks import machine, peers
from benchmarks.clients import Link, clients
from benchmarks.figures import Figures, latency, per_item
from benchmarks.reading import check_logs
from benchmarks.report import Report, Target, least, most
from benchmarks.rig import Rig, Service
from benchmarks.runs import Measure, Options, Part, Say, collect
from benchmarks.writing import EVENT_BYTES, begin, check_stored, message, padding, producer
from hearth import _appending
from hearth.channel import open_channel
from hearth.producer import ExecutionWriter

WORKLOAD = "append"
CALLERS = 64
SESSIONS = 64
# A history that commits one event in each transaction, with as many transactions at a time as a usual pool allows.
ONE_BY_ONE = {"HEARTH_HISTORY_GROUP_EVENTS": "1", "HEARTH_HISTORY_LANES": "8"}
_WARM_UP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client process does. `one_by_one`: each event in a request of its own, all callers in flight."""

    callers: int
    sessions: int
    seconds: float
    prefix: str = ""
    one_by_one: bool = False


@dataclass(slots=True)
class Saw:
    """What the callers saw; latencies are those of the measured time, the counts include the warm-up."""

    acknowledged: int
    requests: int
    latencies: array[float] = field(default_factory=lambda: array("d"))


async def callers(link: Link, address: str, plan: Plan) -> None:
    """Client process: append for the planned time, say what was seen, then read everything back."""
    if plan.one_by_one:
        # The producer has no such mode, as nobody should want it; in this process it gets one.
        _appending.REQUEST_EVENTS = 1
        _appending.REQUESTS_IN_FLIGHT = plan.callers
    async with producer(address) as made:
        names = [f"{plan.prefix}-{number}" for number in range(plan.sessions)]
        begun = await asyncio.gather(*(begin(made, name) for name in names))
        stored = {name: {1: event_id} for name, (_, event_id) in zip(names, begun, strict=True)}
        await link.send()
        await link.receive()
        requests = made.stats.append_requests
        measured_from = time.perf_counter() + _WARM_UP_SECONDS
        ends = measured_from + plan.seconds
        turns = [(begun[number % plan.sessions][0], names[number % plan.sessions]) for number in range(plan.callers)]
        found = await asyncio.gather(*(_call(writer, stored[name], measured_from, ends) for writer, name in turns))
        saw = Saw(sum(map(len, stored.values())) - plan.sessions, made.stats.append_requests - requests)
        for latencies in found:
            saw.latencies.extend(latencies)
        await link.send(saw)
    async with open_channel(address) as channel:
        await link.send(await check_logs(channel, stored))


async def _call(writer: ExecutionWriter, stored: dict[int, str], measured_from: float, ends: float) -> array[float]:
    """One caller: append, wait for the acknowledgement, append the next."""
    text = padding()
    latencies = array("d")
    while (sent := time.perf_counter()) < ends:
        event = message("m1", text)
        sequence = check_stored(await writer.event(event))
        done = time.perf_counter()
        if sequence in stored:
            raise RuntimeError(f"sequence {sequence} was given twice")
        stored[sequence] = event.event_id
        if measured_from <= done <= ends:
            latencies.append(done - sent)
    return latencies


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark."""
    seconds = 1.0 if options.quick else 4.0
    async with Rig() as rig:
        history = await rig.history()
        one_by_one = await rig.history("history-one-by-one", **ONE_BY_ONE)
        report = Report(
            WORKLOAD,
            {
                "callers": CALLERS,
                "sessions": SESSIONS,
                "event_bytes": EVENT_BYTES,
                "seconds": seconds,
                "runs": options.runs,
                "one_by_one": ONE_BY_ONE,
                **await rig.description(),
            },
        )
        numbers = iter(range(1_000_000))

        def part(name: str, service: Service, plan: Plan) -> Measure:
            async def measure() -> Part:
                return await measure_append(rig, service, replace(plan, prefix=f"{name}{next(numbers)}"), f"{name}_")

            return measure

        parts: dict[str, Measure] = {}
        for name, sessions in (("spread", SESSIONS), ("hot", 1)):
            plan = Plan(CALLERS, sessions, seconds)
            parts[name] = part(name, history, plan)
            parts[f"{name}_one_by_one"] = part(f"{name}_one_by_one", one_by_one, replace(plan, one_by_one=True))
        parts["single"] = part("single", history, Plan(1, 1, seconds))
        await collect(report, parts, options, say, derive=_ratios)
    report.targets = targets(report.figures)
    if options.peers is not None:
        report.peers = await peers.run(WORKLOAD, options, say)
        report.targets += peer_targets(report.figures, report.peers)
    return report


async def measure_append(rig: Rig, service: Service, plan: Plan, prefix: str) -> Part:
    """Let one client process append and check what is stored afterwards."""
    async with clients(("benchmarks.append:callers", service.address, plan)) as (client,):
        await client.receive()
        with machine.measured({"history": service.pid, "client": client.pid, **rig.pids()}) as usage:
            await client.send()
            saw: Saw = await client.receive()
        problems: list[str] = await client.receive()
    figures = {
        f"{prefix}events_per_s": len(saw.latencies) / plan.seconds,
        f"{prefix}events_per_request": saw.acknowledged / saw.requests,
        **latency(prefix, saw.latencies),
        **per_item(prefix, usage.cpu, saw.acknowledged),
    }
    return Part(figures, usage.others_cores, problems)


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    return [
        least(figures, "spread_events_per_s", 10_000, "events/s"),
        least(figures, "hot_events_per_s", 8_000, "events/s"),
        least(figures, "spread_ratio", 8, "x one transaction per event"),
        least(figures, "hot_ratio", 8, "x one transaction per event"),
        most(figures, "single_p50_ms", 2.5, "ms"),
        most(figures, "single_p99_ms", 10, "ms"),
    ]


def peer_targets(figures: Figures, lines: list[dict[str, object]]) -> list[Target]:
    """Ours must be ahead of every peer that makes each event durable before it acknowledges it."""
    made = []
    for mode in ("spread", "hot"):
        for peer in ("jetstream-sync-always", "durable-streams"):
            theirs = peers.figure(lines, peer, f"append_{mode}", "events_per_s")
            made.append(Target(f"{mode}_ahead_of_{peer}", figures[f"{mode}_events_per_s"], theirs, "events/s"))
    return made


def _ratios(run: Figures) -> Figures:
    return {
        f"{mode}_ratio": run[f"{mode}_events_per_s"] / run[f"{mode}_one_by_one_events_per_s"]
        for mode in ("spread", "hot")
    }
