"""What a run costs, from what its agent tells: the Agent Client Protocol has the sum of all runs of a session. Pure."""

from __future__ import annotations


class Spending:
    """One session of an agent. `total` (millionths of a US dollar) is what it has cost so far; None: not known."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        # What it had cost before the run.
        self._before = total

    def begin(self) -> None:
        """A run begins."""
        self._before = self._total

    def told(self, total: int) -> int:
        """What the run has cost, now that the agent tells this sum; 0 where nobody knows what came before."""
        if self._before is not None and total < self._before:
            # It counts anew, as one does that was started again.
            self._before = 0
        self._total = total
        return total - self._before if self._before is not None else 0
