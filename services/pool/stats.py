"""Counters of this replica since it started, for operators and for the metrics of the process."""

from __future__ import annotations

from collections import Counter

from opentelemetry import metrics


class Stats:
    """How turns started, how they ended, and why they were not warm."""

    def __init__(self) -> None:
        meter = metrics.get_meter("hearth")
        self.turns_by_how: Counter[str] = Counter()
        self.turns_by_outcome: Counter[str] = Counter()
        self.misses_by_reason: Counter[str] = Counter()
        self._turns = meter.create_counter("hearth.pool.turns", description="turns that ended")
        self._misses = meter.create_counter("hearth.pool.misses", description="turns that found no warm agent")
        self._cancels = meter.create_histogram(
            "hearth.pool.cancel", unit="s", description="Stops and steers from their commit to their settlement"
        )
        self._stages = meter.create_histogram("hearth.pool.stage", unit="s", description="stages of turns")

    def cancelled(self, outcome: str, seconds: float) -> None:
        """A Stop or a steer was settled, so long after it was accepted."""
        self._cancels.record(seconds, {"outcome": outcome})

    def ended(self, how: str, outcome: str) -> None:
        """A turn ended; `how` is empty when it never reached an agent."""
        self.turns_by_outcome[outcome] += 1
        if how:
            self.turns_by_how[how] += 1
        self._turns.add(1, {"how": how, "outcome": outcome})

    def missed(self, reason: str) -> None:
        """A turn could not go on with a live agent session."""
        self.misses_by_reason[reason] += 1
        self._misses.add(1, {"reason": reason})

    def stage(self, name: str, how: str, seconds: float) -> None:
        """A stage of a turn ended."""
        self._stages.record(seconds, {"stage": name, "how": how})
