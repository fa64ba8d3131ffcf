"""Repeats measurements until they were undisturbed, and brings the runs together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.figures import Figures, medians
from benchmarks.report import QUIET_CORES, Report

# A part that others disturbed is measured again up to this often, and the least disturbed one counts.
_TRIES = 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `quick`: small and short; `large`: the largest stored amounts."""

    runs: int = 5
    quick: bool = False
    large: bool = False
    # Before each measurement, wait up to so many seconds for others to stop using the machine.
    patience: float = 0.0
    peers: Path | None = None
    peers_python: str = ""
    # Of random traffic: how long, and what it is drawn from.
    minutes: float = 3.0
    seed: int = 1
    # Of a workload with several parts: these only; none: all of them.
    parts: tuple[str, ...] = ()


@dataclass(slots=True)
class Part:
    """One measurement: its figures, what others used meanwhile, and what was wrong with the results."""

    figures: Figures = field(default_factory=dict)
    others_cores: float = 0.0
    problems: list[str] = field(default_factory=list)


Measure = Callable[[], Awaitable[Part]]


async def undisturbed(measure: Measure, options: Options, say: Say) -> Part:
    """The first part that nobody disturbed, else the least disturbed of a few. Problems of all of them are kept."""
    best: Part | None = None
    problems: list[str] = []
    for left in reversed(range(1 if options.quick else _TRIES)):
        if options.patience and not await machine.wait_until_quiet(QUIET_CORES / 2, options.patience):
            say("the machine does not become quiet")
        part = await measure()
        problems += part.problems
        if best is None or part.others_cores < best.others_cores:
            best = part
        if problems or best.others_cores <= QUIET_CORES or not left:
            break
        say(f"others used {part.others_cores:.2f} cores; measuring once more")
    assert best is not None
    best.problems = problems
    return best


def no_ratios(_: Figures) -> Figures:
    """For workloads that compare nothing within a run."""
    return {}


async def collect(
    report: Report,
    parts: Mapping[str, Measure],
    options: Options,
    say: Say,
    *,
    derive: Callable[[Figures], Figures] = no_ratios,
) -> None:
    """Measure each part once a run into the report. `derive` makes ratios of the figures of one run."""
    for number in range(1, options.runs + 1):
        run: Figures = {}
        for name, measure in parts.items():
            say(f"run {number} of {options.runs}: {name}")
            part = await undisturbed(measure, options, say)
            run |= part.figures
            report.others_cores = max(report.others_cores, part.others_cores)
            report.problems += part.problems
        run |= derive(run)
        report.runs.append(run)
    report.figures |= medians(report.runs)


async def once(report: Report, name: str, measure: Measure, say: Say) -> None:
    """Measure something into the report that does not depend on how busy the machine is."""
    say(name)
    part = await measure()
    report.figures |= part.figures
    report.problems += part.problems
