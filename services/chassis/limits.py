"""How much one project may ask of a process: calls a second, for each scope, streams that are open, size of a message.

It protects the others: a project that asks too much is told when to come back, and nobody else waits for it. A caller
of all projects, as another service is, has no limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from services.chassis.errors import ResourceExhausted

# Projects that are remembered; of more, those that have been quiet for longest are taken for new ones.
_REMEMBERED = 10_000
_STREAM_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one project: calls a second for each scope, open streams, bytes of a message that it sends. 0 = no limit."""

    rate: float = 0.0
    streams: int = 0
    message_bytes: int = 0


UNBOUNDED: Final = Quota()


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

    def change(self, rate: float) -> None:
        """Fill at another rate from now on; what is there stays, as far as it fits."""
        self.rate, self.burst = rate, _burst(rate)


def _burst(rate: float) -> float:
    return max(1.0, math.ceil(2 * rate))


class Limits:
    """What projects ask of one process. Raises `ResourceExhausted` with the time to wait."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """`clock`: seconds that never go back."""
        self._clock = clock
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._open: dict[str, int] = {}

    def call(self, project: str, scope: str, quota: Quota) -> None:
        """Count a call."""
        if not quota.rate:
            return
        now = self._clock()
        key = (project, scope)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(quota.rate, _burst(quota.rate), _burst(quota.rate), now)
            if len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        if bucket.rate != quota.rate:
            bucket.change(quota.rate)
        if wait := bucket.take(now):
            raise ResourceExhausted(
                f"project {project!r} makes more than {quota.rate:g} calls a second that need {scope!r}; slow down",
                reason="OVERLOADED",
                metadata={"project": project, "scope": scope},
                retry_after=wait,
            )

    def open_stream(self, project: str, quota: Quota) -> None:
        """Count a stream that opens; `close_stream` must follow."""
        if quota.streams and self._open.get(project, 0) >= quota.streams:
            raise ResourceExhausted(
                f"project {project!r} has {quota.streams} streams open at this process; close some",
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
