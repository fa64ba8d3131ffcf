"""Many sessions at a time, each with a writer of frames and one reader."""

from __future__ import annotations

from itertools import count

from benchmarks import peers, steady
from benchmarks.figures import Figures
from benchmarks.live import TEXT_BYTES
from benchmarks.report import Report, Target, most
from benchmarks.rig import Rig
from benchmarks.runs import Options, Part, Say, collect
from benchmarks.steady import Shape

WORKLOAD = "sessions"


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark."""
    shape = Shape(sessions=20, readers=1, rate=75, seconds=1.0) if options.quick else Shape(200, 1, 75, 8.0)
    async with Rig() as rig:
        history = await rig.history()
        relay = await rig.relay(history)
        report = Report(
            WORKLOAD,
            {
                "sessions": shape.sessions,
                "readers_each": shape.readers,
                "frames_per_s_each": shape.rate,
                "text_bytes": TEXT_BYTES,
                "seconds": shape.seconds,
                "runs": options.runs,
                **await rig.description(),
            },
        )
        numbers = count()

        async def measure() -> Part:
            return await steady.measure(rig, history, relay, shape, "", f"run{next(numbers)}")

        await collect(report, {"sessions": measure}, options, say)
    report.targets = targets(report.figures)
    report.peers = await peers.run(WORKLOAD, options, say)
    return report


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "p99_ms", 100, "ms"),
        most(figures, "relay_us", 40, "µs CPU a delivery"),
        most(figures, "gaps", 0, "gaps"),
    ]
