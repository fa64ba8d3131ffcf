"""Numbers of the append path, for whoever watches: how much, how fast, what was refused, what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from hearth.history.v1 import history_pb2
from services.history.ledger import Decision

_PREFIX = len("APPEND_OUTCOME_")


class Measures:
    """The instruments of one process."""

    def __init__(self) -> None:
        meter = metrics.get_meter("hearth")
        self._events = meter.create_counter("hearth.history.events", unit="{event}", description="answers by outcome")
        self._duration = meter.create_histogram("hearth.history.commit.duration", unit="s")
        self._failures = meter.create_counter("hearth.history.commit.failures", unit="{group}")
        self._meter = meter

    def committed(self, seconds: float, decided: Iterable[Sequence[Decision]]) -> None:
        """A group was committed and answered."""
        self._duration.record(seconds)
        for outcome, count in Counter(found.outcome for part in decided for found in part).items():
            name = history_pb2.AppendOutcome.Name(outcome)[_PREFIX:].lower()
            self._events.add(count, {"outcome": name})

    def failed(self, reason: str) -> None:
        """A group failed as a whole."""
        self._failures.add(1, {"reason": reason})

    def watch(self, name: str, unit: str, value: Callable[[], int]) -> None:
        """Report `value()` as a gauge whenever somebody asks."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(value())

        self._meter.create_observable_gauge(name, callbacks=[observe], unit=unit)
