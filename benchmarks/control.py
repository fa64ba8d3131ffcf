"""Control of running turns: how fast a Stop is, how soon a killed replica is known to be, and what is still right after
crashes and without a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from benchmarks import control_away, control_inputs, control_kills, control_stops, control_streams, warm_turns
from benchmarks.report import Report, Target
from benchmarks.rig import Rig
from benchmarks.runs import Options, Part, Say, collect, once

WORKLOAD = "control"
# More than the session that is stopped ever needs, and longer than any part takes.
_ROOM = {"HEARTH_LOCAL_WARM_CAP": "32", "HEARTH_LOCAL_WARM_WINDOW": "600"}
_TARGETS: dict[str, Callable[[Mapping[str, float]], list[Target]]] = {
    "stops": control_stops.targets,
    "kills": control_kills.targets,
    "inputs": control_inputs.targets,
    "away": control_away.targets,
}
PARTS = tuple(_TARGETS)


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark, or the parts of it that were asked for."""
    chosen = options.parts or PARTS
    report = Report(WORKLOAD, {"parts": list(chosen), "runs": options.runs})
    for name, work in (("stops", _stops), ("kills", _kills), ("inputs", _inputs), ("away", _away)):
        if name in chosen:
            await work(report, options, say)
    report.targets = [target for name in chosen for target in _TARGETS[name](report.figures)]
    if options.quick:
        # At the default settings a kill takes a minute.
        report.targets = [target for target in report.targets if not target.name.startswith("default_")]
    return report


async def _stops(report: Report, options: Options, say: Say) -> None:
    shape = replace(control_stops.QUICK if options.quick else control_stops.Shape(), seed=options.seed)
    async with Rig() as rig:
        journal = rig.directory / "agents.jsonl"
        settings = {**_ROOM, **control_streams.journal_settings(journal)}
        async with warm_turns.house(rig, **settings) as house:
            report.params |= {"stops": asdict(shape), **await rig.description()}
            await collect(report, {"stops": lambda: control_stops.measure(rig, house, journal, shape)}, options, say)


async def _kills(report: Report, options: Options, say: Say) -> None:
    fast = control_kills.FEW if options.quick else control_kills.Shape(kills=5)
    report.params |= {"fast_kills": asdict(fast), "fast": dict(control_kills.FAST)}

    async def measure_fast() -> Part:
        async with Rig() as rig:
            return await control_kills.part(rig, fast, "fast_", control_kills.FAST)

    await once(report, "a replica dies, fast settings", measure_fast, say)
    if options.quick:
        return

    async def measure_default() -> Part:
        async with Rig() as rig:
            return await control_kills.part(rig, control_kills.Shape(kills=2), "default_", {})

    await once(report, "a replica dies, default settings", measure_default, say)


async def _inputs(report: Report, options: Options, say: Say) -> None:
    shape = replace(control_inputs.QUICK if options.quick else control_inputs.Shape(), seed=options.seed)
    report.params["inputs"] = asdict(shape)

    async def measure() -> Part:
        async with Rig() as rig:
            return await control_inputs.part(rig, shape, say)

    await once(report, f"{shape.inputs} inputs through {shape.crashes} crashes", measure, say)


async def _away(report: Report, options: Options, say: Say) -> None:
    shape = control_away.QUICK if options.quick else control_away.Shape()
    report.params["away"] = asdict(shape)

    async def measure() -> Part:
        async with Rig() as rig:
            return await control_away.part(rig, shape)

    await once(report, f"{shape.away:.0f} s without Postgres", measure, say)
