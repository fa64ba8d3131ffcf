"""What each provider keeps between turns, and what that costs at worst."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """The settings of one provider's tiers. `window` is how long a pool keeps an entry, in seconds; 0, like a `cap` of
    0, switches keeping running off. Prices are US dollars per hour of one sandbox."""

    window: float
    cap: int
    park_stopped: bool
    price_running: float = 0.0
    price_stopped: float = 0.0

    @property
    def park_running(self) -> bool:
        """Whether sandboxes are kept running between turns."""
        return self.window > 0 and self.cap > 0

    @property
    def slots(self) -> int:
        """How many sandboxes may be kept running."""
        return self.cap if self.park_running else 0

    def longest_parked(self, stop_window: float) -> float:
        """The longest that a pool keeps one running between turns, in seconds, if it does."""
        return max(self.window, stop_window) if self.park_running else 0.0

    @property
    def worst_per_hour(self) -> float:
        """US dollars per hour with every warm slot taken. Turns that run come on top: they are not capped here."""
        return self.slots * self.price_running


# Between what must have happened and a provider's own stop: for a call that is late, and clocks that differ.
_MARGIN_SECONDS = 120.0


def auto_stop_problem(auto_stop: float, *, refresh: float, parked: float) -> str:
    """What is wrong with a provider's own timer that stops what looks idle; empty when nothing is. All in seconds.

    It must outlast a refresh of activity that was lost, or it stops a sandbox in the middle of a turn; and the longest
    time that a sandbox is parked running (`parked`), or it is gone when its next turn comes.
    """
    least = 2 * refresh + _MARGIN_SECONDS
    if auto_stop < least:
        return f"must be at least {least / 60:g} minutes: twice HEARTH_ACTIVITY_REFRESH ({refresh:g} s) and 2 minutes"
    if parked and auto_stop <= parked + _MARGIN_SECONDS:
        longest = (parked + _MARGIN_SECONDS) / 60
        return f"must be more than {longest:g} minutes: the longest parked window ({parked:g} s) and 2 minutes"
    return ""
