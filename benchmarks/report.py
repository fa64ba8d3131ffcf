"""What a benchmark says in the end: figures, targets, and whether the run counts. Pure, but for the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.figures import Figures, rounded

# With more than this much CPU taken by other processes, latencies say more about those than about Hearth.
QUIET_CORES = 0.3

_PROBLEMS_SHOWN = 20

EXIT_MET, EXIT_MISSED, EXIT_VOID = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that must reach `target`, or with `most` must not exceed it."""

    name: str
    value: float
    target: float
    unit: str
    most: bool = False

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.value <= self.target if self.most else self.value >= self.target


def least(figures: Mapping[str, float], name: str, target: float, unit: str) -> Target:
    """The figure `name` must be at least `target`; a figure that is missing misses it."""
    return Target(name, figures.get(name, float("-inf")), target, unit)


def most(figures: Mapping[str, float], name: str, target: float, unit: str) -> Target:
    """The figure `name` must be at most `target`; a figure that is missing misses it."""
    return Target(name, figures.get(name, float("inf")), target, unit, most=True)


@dataclass
class Report:
    """One invocation of one workload.

    `runs` are the figures of each run, of which `figures` holds the medians. `others_cores` is the most CPU that other
    processes took during a part that counts. `problems` say what was wrong with the results themselves.
    """

    workload: str
    params: dict[str, Any]
    figures: Figures = field(default_factory=dict)
    runs: list[Figures] = field(default_factory=list)
    others_cores: float = 0.0
    targets: list[Target] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def void(self) -> bool:
        """Whether others used so much CPU that the run says nothing."""
        return self.others_cores > QUIET_CORES

    @property
    def exit_code(self) -> int:
        """0 all targets hold, 1 one does not, 2 the run is void. A wrong result counts on a busy machine too."""
        if self.problems:
            return EXIT_MISSED
        if self.void:
            return EXIT_VOID
        return EXIT_MET if all(target.ok for target in self.targets) else EXIT_MISSED

    def content(self) -> dict[str, Any]:
        """The report as one JSON object."""
        figures: dict[str, Any] = {name: rounded(value) for name, value in self.figures.items()}
        if len(self.runs) > 1:
            figures["runs"] = [{name: rounded(value) for name, value in run.items()} for run in self.runs]
        if self.problems:
            figures["problems"] = self.problems[:_PROBLEMS_SHOWN]
        return {
            "workload": self.workload,
            "params": self.params,
            "figures": figures,
            "others_cores": round(self.others_cores, 3),
            "targets": [_target_content(target) for target in self._all_targets()],
            "peers": self.peers,
        }

    def tables(self) -> Sequence[Table]:
        """The report for people."""
        targets = Table(title=f"{self.workload}: targets", title_justify="left")
        for column in ("target", "value", "must be", "unit", ""):
            targets.add_column(column, justify="right" if column in {"value", "must be"} else "left")
        for target in self._all_targets():
            bound = f"{'≤' if target.most else '≥'} {_number(target.target)}"
            mark = "[green]holds[/green]" if target.ok else "[red]missed[/red]"
            targets.add_row(target.name, _number(target.value), bound, target.unit, mark)
        figures = Table(title="figures (medians)", title_justify="left")
        figures.add_column("figure")
        figures.add_column("value", justify="right")
        for name, value in self.figures.items():
            figures.add_row(name, _number(value))
        tables = [targets, figures]
        if self.peers:
            tables.append(self._peer_table())
        return tables

    def _all_targets(self) -> list[Target]:
        return [*self.targets, Target("wrong_results", len(self.problems), 0, "results", most=True)]

    def _peer_table(self) -> Table:
        table = Table(title="peers", title_justify="left")
        for column in ("peer", "workload", "figures"):
            table.add_column(column)
        for line in self.peers:
            shown = [
                f"{name} {_number(value)}"
                for name, value in line.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
            told = line.get("error") or ", ".join(shown)
            table.add_row(str(line.get("peer", "?")), str(line.get("workload", "")), told)
        return table


def _target_content(target: Target) -> dict[str, Any]:
    value = rounded(target.value) if abs(target.value) != float("inf") else None
    return {"name": target.name, "value": value, "target": target.target, "unit": target.unit, "ok": target.ok}


def _number(value: float) -> str:
    short = rounded(value)
    return f"{short:,.0f}" if abs(short) >= 1000 else f"{short:g}"
