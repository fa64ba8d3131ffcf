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

    @property
    def worst_per_hour(self) -> float:
        """US dollars per hour with every warm slot taken. Turns that run come on top: they are not capped here."""
        return self.slots * self.price_running
