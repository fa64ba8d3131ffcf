"""Numbers of the live side, for whoever watches: what is taken, who reads, who was cut off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from hearth.relay.v1 import relay_pb2

_PREFIX = len("PUBLISH_OUTCOME_")


class Measures:
    """The instruments of one process."""

    def __init__(self) -> None:
        meter = metrics.get_meter("hearth")
        self._batches = meter.create_counter("hearth.relay.batches", unit="{batch}", description="answers by outcome")
        self._frames = meter.create_counter("hearth.relay.frames", unit="{frame}", description="frames of all batches")
        self._duration = meter.create_histogram(
            "hearth.relay.publish.duration",
            unit="s",
            description="from a request to its answer: grows first under load",
        )
        self._cut = meter.create_counter("hearth.relay.readers.cut", unit="{reader}", description="by reason")
        self._meter = meter

    def published(self, seconds: float, frames: int, results: Iterable[relay_pb2.PublishResult]) -> None:
        """A request was answered."""
        self._duration.record(seconds)
        self._frames.add(frames)
        for outcome, count in Counter(result.outcome for result in results).items():
            name = relay_pb2.PublishOutcome.Name(outcome)[_PREFIX:].lower()
            self._batches.add(count, {"outcome": name})

    def cut(self, reason: str) -> None:
        """A reader was cut off."""
        self._cut.add(1, {"reason": reason})

    def watch(self, name: str, unit: str, value: Callable[[], int]) -> None:
        """Report `value()` as a gauge whenever somebody asks."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(value())

        self._meter.create_observable_gauge(name, callbacks=[observe], unit=unit)
