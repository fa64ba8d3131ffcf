"""One session with many readers, a burst, one reader alone, and thousands of readers of quiet sessions."""

from __future__ import annotations

import time
from functools import partial
from itertools import count

from benchmarks import idle, live, machine, peers, steady
from benchmarks.clients import clients, receive_all
from benchmarks.figures import Figures, per_item
from benchmarks.report import Report, Target, least, most
from benchmarks.rig import Rig, Service
from benchmarks.runs import Measure, Options, Part, Say, collect, once
from benchmarks.steady import Shape, shares

WORKLOAD = "fanout"
_READER_PROCESSES = 2


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark."""
    many = Shape(1, 50, 75, 1.0, _READER_PROCESSES) if options.quick else Shape(1, 500, 75, 8.0, _READER_PROCESSES)
    single = Shape(1, 1, 75, 1.0 if options.quick else 5.0)
    frames, burst_readers = (500, 20) if options.quick else (10_000, 100)
    idle_readers = 200 if options.quick else 5_000
    async with Rig() as rig:
        history = await rig.history()
        relay = await rig.relay(history)
        report = Report(
            WORKLOAD,
            {
                "readers": many.readers,
                "frames_per_s": many.rate,
                "text_bytes": live.TEXT_BYTES,
                "seconds": many.seconds,
                "burst_frames": frames,
                "burst_readers": burst_readers,
                "idle_readers": idle_readers,
                "idle_streams_on_a_connection": idle.STREAMS_ON_A_CONNECTION,
                "reader_processes": _READER_PROCESSES,
                "runs": options.runs,
                **await rig.description(),
            },
        )
        numbers = count()

        def steadily(shape: Shape, prefix: str) -> Measure:
            async def measure() -> Part:
                return await steady.measure(rig, history, relay, shape, prefix, f"{prefix}{next(numbers)}")

            return measure

        async def burst() -> Part:
            return await measure_burst(rig, history, relay, frames, burst_readers, f"burst{next(numbers)}")

        parts = {
            "many readers": steadily(many, ""),
            "burst": burst,
            "one reader": steadily(single, "single_"),
        }
        await collect(report, parts, options, say)
        await once(report, "quiet readers", partial(measure_idle, rig, idle_readers), say)
    report.targets = targets(report.figures)
    if options.peers is not None:
        report.peers = await peers.run(WORKLOAD, options, say)
        plain = peers.figure(report.peers, "grpc-naive", WORKLOAD, "deliveries_per_s", readers=burst_readers)
        report.figures["burst_to_plain_stream"] = report.figures["burst_deliveries_per_s"] / plain
        report.targets.append(least(report.figures, "burst_to_plain_stream", 10, "x one message per frame"))
    return report


async def measure_burst(rig: Rig, history: Service, relay: Service, frames: int, readers: int, session: str) -> Part:
    """All frames at once, to readers that wait for them."""
    seats = [session] * readers
    plan = live.Plan((session,), frames)
    jobs = [("benchmarks.live:subscribe", relay.address, share, frames) for share in shares(seats, _READER_PROCESSES)]
    publisher = ("benchmarks.live:publish", history.address, relay.address, plan)
    async with clients(*jobs) as reading, clients(publisher) as (publishing,):
        await receive_all([*reading, publishing])
        with machine.measured({"publisher": publishing.pid, **rig.pids(history, relay)}) as usage:
            await publishing.send(time.time())
            await receive_all(reading)
        await publishing.send()
        published: live.Published = await publishing.receive()
        seen: list[live.Saw] = await receive_all(reading)
    covered = sum(saw.covered for saw in seen)
    figures = {
        "burst_deliveries_per_s": covered / (max(saw.last for saw in seen) - published.began),
        "burst_joined_share": 1 - sum(len(saw.took) for saw in seen) / max(covered, 1),
        "burst_gaps": sum(saw.gaps for saw in seen),
        **per_item("burst_", usage.cpu, covered),
    }
    return Part(figures, usage.others_cores, live.check(published, seen, seats, frames))


async def measure_idle(rig: Rig, readers: int) -> Part:
    """On services of its own, as memory that was used before hides what is used now."""
    history = await rig.history("quiet-history")
    relay = await rig.relay(history)
    try:
        return await idle.measure(history, relay, readers)
    finally:
        await relay.stop()
        await history.stop()


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "p99_ms", 120, "ms"),
        most(figures, "relay_us", 20, "µs CPU a delivery"),
        most(figures, "gaps", 0, "gaps"),
        least(figures, "burst_deliveries_per_s", 300_000, "deliveries/s"),
        most(figures, "burst_gaps", 0, "gaps"),
        most(figures, "single_p50_ms", 8, "ms"),
        most(figures, "single_gaps", 0, "gaps"),
        most(figures, "idle_kib", 32, "KiB a reader"),
        least(figures, "idle_readers", figures["idle_readers"], "readers on one relay"),
        most(figures, "restart_refused", 0, "readers refused for good"),
        most(figures, "kill_refused", 0, "readers refused for good"),
    ]
