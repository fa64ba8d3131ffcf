"""Who used how much CPU and memory, read from /proc.

A process's own time and the time of children it has collected are counted together, so nothing is lost when a process
of ours ends during a measurement.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_SECONDS = 1.0
# Places in /proc/stat's first line.
_IDLE, _IOWAIT = 3, 4


class _Process(NamedTuple):
    parent: int
    # CPU seconds of the process and of the children that it has collected.
    used: float


@dataclass
class Usage:
    """What a measured stretch of time used. `cpu` holds CPU seconds by the name of each watched process."""

    seconds: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)
    others_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    busy: float
    ours: float
    watched: dict[str, float]


@contextmanager
def measured(watched: Mapping[str, int]) -> Iterator[Usage]:
    """Measure the block. `watched` are pids by name; each counts with everything it has started.

    Ours is this process with everything below it; others is what the machine did beside that.
    """
    usage = Usage()
    before = _read(watched)
    yield usage
    after = _read(watched)
    usage.seconds = after.at - before.at
    usage.cpu = {name: after.watched[name] - before.watched[name] for name in watched}
    others = (after.busy - before.busy) - (after.ours - before.ours)
    usage.others_cores = max(0.0, others / usage.seconds)


async def wait_until_quiet(cores: float, seconds: float) -> bool:
    """Wait until others have used at most `cores` for a moment; False when they did not within `seconds`."""
    ends = time.monotonic() + seconds
    while True:
        with measured({}) as usage:
            await asyncio.sleep(_LOOK_SECONDS)
        if usage.others_cores <= cores:
            return True
        if time.monotonic() >= ends:
            return False


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def filesystem_of(path: Path) -> str:
    """The type of the file system that holds `path`."""
    found, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, type_, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(str(found)):
            found, kind = Path(mount), type_
    return kind


def description() -> dict[str, object]:
    """The machine, for the parameters of a report."""
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return {"cpus": os.cpu_count(), "memory_gb": round(memory / 1e9), "kernel": os.uname().release}


def _read(watched: Mapping[str, int]) -> _Reading:
    processes = _processes()
    below = _below(processes)
    return _Reading(
        at=time.monotonic(),
        busy=_busy(),
        ours=_used(os.getpid(), processes, below),
        watched={name: _used(pid, processes, below) for name, pid in watched.items()},
    )


def _busy() -> float:
    """CPU seconds since the start in which some CPU was not idle.

    Idle time is what the kernel measures; the other columns are only sampled.
    """
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(part) for part in first.split()[1:]]
    cpus = os.cpu_count() or 1
    return time.monotonic() * cpus - (ticks[_IDLE] + ticks[_IOWAIT]) / _TICKS


def _processes() -> dict[int, _Process]:
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The name, in parentheses, may hold anything.
            fields = text.rpartition(")")[2].split()
            found[int(entry.name)] = _Process(int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)
    return found


def _below(processes: Mapping[int, _Process]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    return children


def _used(root: int, processes: Mapping[int, _Process], below: Mapping[int, list[int]]) -> float:
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        if pid in processes:
            total += processes[pid].used
            waiting += below.get(pid, ())
    return total
