"""How much one project may ask of a process: calls a second, for each scope, and streams that are open.

It protects the others: a project that asks too much is told when to come back, and nobody else waits for it. A caller
of all projects, as another service is, has no limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from services.chassis.errors import ResourceExhausted

# Projects that are remembered; of more, those that have been quiet for longest are taken for new ones.
_REMEMBERED = 10_000
_STREAM_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Bucket:
    """Holds up to `burst` calls and gets `rate` of them a second. Pure: the time is given, in seconds."""

    rate: float
    burst: float
    level: float
    at: float

    def take(self, now: float) -> float:
        """Take one call: 0 if there was one, else the seconds until there is."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) / self.rate


class Limits:
    """The limits of one process; 0 is none. Raises `ResourceExhausted` with the time to wait."""

    def __init__(self, *, rate: float, streams: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = max(1.0, math.ceil(2 * rate))
        self._most = streams
        self._clock = clock
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._open: dict[str, int] = {}

    def call(self, project: str, scope: str) -> None:
        """Count a call."""
        if not self._rate:
            return
        now = self._clock()
        key = (project, scope)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(self._rate, self._burst, self._burst, now)
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        if wait := bucket.take(now):
            raise ResourceExhausted(
                f"project {project!r} makes more than {self._rate:g} calls a second that need {scope!r}; slow down",
                reason="OVERLOADED",
                metadata={"project": project, "scope": scope},
                retry_after=wait,
            )

    def open_stream(self, project: str) -> None:
        """Count a stream that opens; `close_stream` must follow."""
        if self._most and self._open.get(project, 0) >= self._most:
            raise ResourceExhausted(
                f"project {project!r} has {self._most} streams open at this process; close some",
                reason="OVERLOADED",
                metadata={"project": project},
                retry_after=_STREAM_RETRY_SECONDS,
            )
        self._open[project] = self._open.get(project, 0) + 1

    def close_stream(self, project: str) -> None:
        """It has ended."""
        self._open[project] -= 1
        if not self._open[project]:
            del self._open[project]
