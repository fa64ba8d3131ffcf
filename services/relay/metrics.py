"""Metrics of the live side: what is taken, who reads, how late, who could not follow, and what was lost to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hearth.relay.v1 import relay_pb2
from services.chassis import metrics
from services.chassis.metrics import QUICK, Count, Readings, Sizes
from services.relay.order import Gap, Out
from services.relay.surroundings import Surroundings

_PREFIX = len("PUBLISH_OUTCOME_")
_OUTCOMES = {
    value: name[_PREFIX:].lower()
    for name, value in relay_pb2.PublishOutcome.items()
    if value != relay_pb2.PUBLISH_OUTCOME_UNSPECIFIED
}
# What is done for a reader that is over its bound.
MERGED, DROPPED, HISTORY = "merged", "dropped", "history"
# Of a process, what one measuring of how late readers are costs is paid at most so often.
_LAG_EVERY_SECONDS = 0.01

BATCHES = metrics.counter(
    "hearth.relay.batches",
    "{batch}",
    "batches of frames that were answered, by outcome",
    labels={"outcome": tuple(_OUTCOMES.values())},
)
FRAMES = metrics.counter("hearth.relay.frames", "{frame}", "frames of all batches, taken or not")
PUBLISH = metrics.histogram(
    "hearth.relay.publish.duration", "s", "from batches to their answer; grows first under load", QUICK
)
LAG = metrics.histogram(
    "hearth.relay.fanout.lag",
    "s",
    "from the arrival of a frame or an event from the bus until the last reader of its session was written to; a sample"
    " of a hundred a second at most",
    QUICK,
)
OVERFLOWS = metrics.counter(
    "hearth.relay.readers.overflows",
    "{overflow}",
    "times that too much waited for a reader, by what was done: `merged` = pieces of text joined, `dropped` = frames"
    " left out and told as a gap, `history` = sent back to the log",
    labels={"remedy": (MERGED, DROPPED, HISTORY)},
)
GAPS = metrics.counter("hearth.relay.gaps", "{gap}", "gaps that readers were told")
LOST = metrics.counter("hearth.relay.gaps.frames", "{frame}", "frames in the gaps that readers were told")
CUT = metrics.counter(
    "hearth.relay.readers.cut",
    "{reader}",
    "readers that were cut off because nothing could be written to them, by reason",
    labels={"reason": ("SLOW_READER", "SHUTTING_DOWN")},
)
READERS = metrics.gauge("hearth.relay.readers", "{reader}", "readers that are connected")
SESSIONS = metrics.gauge("hearth.relay.sessions", "{session}", "sessions that somebody reads")
DEGRADED = metrics.gauge(
    "hearth.relay.degraded",
    "1",
    "1 while readers are told that a part is away: frames wait for the bus, events for history",
    labels={"what": ("bus", "history")},
)


class Metrics:
    """The instruments of one process."""

    def __init__(self) -> None:
        self._batches = Count(BATCHES)
        self._frames = Count(FRAMES)
        self._publish = Sizes(PUBLISH)
        self._lag = Sizes(LAG)
        self._lag_due = float("-inf")
        self._overflows = Count(OVERFLOWS)
        self._gaps = Count(GAPS)
        self._lost = Count(LOST)
        self._cut = Count(CUT)

    def published(self, seconds: float, frames: int, results: Iterable[relay_pb2.PublishResult]) -> None:
        """A request was answered."""
        self._publish.record(seconds)
        self._frames.add(frames)
        for outcome, count in Counter(result.outcome for result in results).items():
            self._batches.add(count, _OUTCOMES[outcome])

    def lag_wanted(self, now: float) -> bool:
        """Whether it is time to measure again how late a reader is; `now` is the monotonic clock."""
        if now < self._lag_due:
            return False
        self._lag_due = now + _LAG_EVERY_SECONDS
        return True

    def late(self, seconds: float) -> None:
        """So long after something came the last reader was written to."""
        self._lag.record(seconds)

    def overflowed(self, remedy: str) -> None:
        """Too much waited for a reader."""
        self._overflows.add(1, remedy)

    def gaps(self, gaps: int, frames: int) -> None:
        """A reader was told of gaps."""
        self._gaps.add(gaps)
        self._lost.add(frames)

    def cut(self, reason: str) -> None:
        """A reader was cut off."""
        self._cut.add(1, reason)


def gaps_of(out: Iterable[Out]) -> tuple[int, int]:
    """How many gaps are told, and of how many frames together."""
    gaps = frames = 0
    for piece in out:
        if isinstance(piece, Gap):
            gaps += 1
            frames += piece.last - piece.first + 1
    return gaps, frames


def watch(
    readings: Readings, *, readers: Callable[[], int], sessions: Callable[[], int], surroundings: Surroundings
) -> None:
    """Show who reads, and what is away."""
    readings.watch_number(READERS, readers)
    readings.watch_number(SESSIONS, sessions)
    readings.watch_number(DEGRADED, lambda: {what: what in surroundings.away for what in ("bus", "history")})
