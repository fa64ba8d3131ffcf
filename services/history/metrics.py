"""Metrics of the log: what is committed, how fast, in groups of which size, what is refused, what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hearth.history.v1 import history_pb2
from services.chassis import metrics
from services.chassis.metrics import QUICK, Count, Readings, Sizes
from services.history.ledger import ALREADY_ENDED, QUARANTINED, Decision
from services.history.notices import Publisher

_PREFIX = len("APPEND_OUTCOME_")
_OUTCOMES = {
    value: name[_PREFIX:].lower()
    for name, value in history_pb2.AppendOutcome.items()
    if value != history_pb2.APPEND_OUTCOME_UNSPECIFIED
}

EVENTS = metrics.counter(
    "hearth.history.events",
    "{event}",
    "events that were answered, by outcome; `appended` are those that entered the log",
    labels={"outcome": tuple(_OUTCOMES.values())},
)
QUARANTINE = metrics.counter(
    "hearth.history.quarantined",
    "{event}",
    "events of superseded or ended runs that were kept aside, by reason; none of them is a loss, many are a runner that"
    " does not know that it was replaced",
    labels={"reason": ("STALE_EPOCH", "EPOCH_TAKEN", "EXECUTION_ENDED")},
)
GROUP = metrics.histogram(
    "hearth.history.commit.events",
    "{event}",
    "events of one commit: how well those that come together are gathered",
    (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
)
DURATION = metrics.histogram("hearth.history.commit.duration", "s", "one commit, from its begin to its answers", QUICK)
FAILURES = metrics.counter(
    "hearth.history.commit.failures",
    "{group}",
    "commits that failed as a whole, by reason; their events are sent again",
    labels={"reason": ("DEPENDENCY_UNAVAILABLE",)},
)
QUEUE = metrics.gauge("hearth.history.queue", "{event}", "events that wait for their commit, or are in it")
NOTICES_WAITING = metrics.gauge("hearth.history.notices.waiting", "{notice}", "notices that wait for the bus")
NOTICES_DROPPED = metrics.counter(
    "hearth.history.notices.dropped",
    "{notice}",
    "notices that were given up while the bus was away or slow; readers get those events a second later",
)


class Metrics:
    """The instruments of one process."""

    def __init__(self) -> None:
        self._events = Count(EVENTS)
        self._quarantined = Count(QUARANTINE)
        self._group = Sizes(GROUP)
        self._duration = Sizes(DURATION)
        self._failures = Count(FAILURES)

    def committed(self, seconds: float, decided: Iterable[Sequence[Decision]]) -> None:
        """A group was committed and answered."""
        self._duration.record(seconds)
        outcomes: Counter[history_pb2.AppendOutcome.ValueType] = Counter()
        for part in decided:
            for found in part:
                outcomes[found.outcome] += 1
                if found.outcome in (QUARANTINED, ALREADY_ENDED):
                    self._quarantined.add(1, found.reason)
        self._group.record(outcomes.total())
        for outcome, count in outcomes.items():
            self._events.add(count, _OUTCOMES[outcome])

    def failed(self, reason: str) -> None:
        """A group failed as a whole."""
        self._failures.add(1, reason)


def watch(readings: Readings, *, queue: Callable[[], int], publisher: Publisher) -> None:
    """Show what waits: `queue` tells how many events."""
    readings.watch_number(QUEUE, queue)
    readings.watch_number(NOTICES_WAITING, lambda: publisher.waiting)
    readings.watch_number(NOTICES_DROPPED, lambda: publisher.dropped)
