"""What the processes of a stack hold while they are fuzzed: memory, descriptors, tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil

from tests.support import metrics

MIB = 1024 * 1024

# Within this a process is at its least once: it returns what is free every ten seconds.
_FLOOR_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process."""

    descriptors: int
    tasks: int


@dataclass(slots=True)
class Watch:
    """Looks at the processes by name: `pids`, and where each shows its metrics."""

    pids: Mapping[str, int]
    pages: Mapping[str, str]
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def follow(self, every: float = 1.0) -> None:
        """Note the resident memory of each, until cancelled."""
        while True:
            now = time.monotonic()
            for name, pid in self.pids.items():
                self.memory.setdefault(name, []).append((now, psutil.Process(pid).memory_info().rss / MIB))
            await asyncio.sleep(every)

    async def held(self) -> dict[str, Held]:
        """What each holds now."""
        found = {}
        for name, pid in self.pids.items():
            page = await metrics.read(self.pages[name])
            found[name] = Held(psutil.Process(pid).num_fds(), int(page.value("hearth_tasks")))
        return found

    async def back_to(self, baseline: Mapping[str, Held], *, slack: int, seconds: float) -> list[str]:
        """Wait until nobody holds more than at the baseline and a little; what is held still when the time is over."""
        ends = time.monotonic() + seconds
        while True:
            try:
                now = await self.held()
            except (aiohttp.ClientError, psutil.NoSuchProcess) as error:
                return [f"a process is gone: {type(error).__name__}"]
            more = [
                f"{name}: {now[name]}, it was {before}"
                for name, before in baseline.items()
                if now[name].descriptors > before.descriptors + slack or now[name].tasks > before.tasks + slack
            ]
            if not more or time.monotonic() > ends:
                return more
            await asyncio.sleep(1.0)

    def slopes(self, seconds: float) -> dict[str, float]:
        """Growth of what each holds whatever is under way, in MiB a minute over the last `seconds`."""
        return {name: slope(floors(points), seconds) for name, points in self.memory.items()}


def floors(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The least of every whole twenty seconds of (second, MiB) pairs.

    What hostile requests fill for a moment is not kept, and says nothing of what is.
    """
    if not points:
        return []
    begun = points[0][0]
    windows: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        windows.setdefault(int((at - begun) // _FLOOR_SECONDS), []).append((at, value))
    windows.popitem()
    return [min(window, key=lambda point: point[1]) for window in windows.values()]


def slope(points: Sequence[tuple[float, float]], seconds: float) -> float:
    """Of (second, MiB) pairs, in MiB a minute over the last `seconds`, by least squares; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    last = [point for point in points if point[0] >= points[-1][0] - seconds]
    mean_at = sum(at for at, _ in last) / len(last)
    mean = sum(value for _, value in last) / len(last)
    spread = sum((at - mean_at) ** 2 for at, _ in last)
    if not spread:
        return 0.0
    return 60 * sum((at - mean_at) * (value - mean) for at, value in last) / spread
