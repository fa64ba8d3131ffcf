"""How long the stand-in takes for things. Ranges are in seconds; a value is drawn from its range, seeded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

Range = tuple[float, float]
_NONE: Range = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Delays:
    """`create` … `restore` are transitions of a sandbox; `call` is added to each API call, `execute` to each command.

    `harness` maps an ACP method to what the preview proxy waits before it passes such a request on.
    """

    create: Range = _NONE
    build: Range = _NONE
    start: Range = _NONE
    stop: Range = _NONE
    delete: Range = _NONE
    archive: Range = _NONE
    restore: Range = _NONE
    call: Range = _NONE
    execute: Range = _NONE
    harness: Mapping[str, Range] = field(default_factory=dict)
    seed: int = 1

    @classmethod
    def none(cls) -> Delays:
        """Nothing takes longer than this machine needs."""
        return cls()

    @classmethod
    def measured(cls, seed: int = 1) -> Delays:
        """What was measured on the real service: a first turn is dominated by the start of the agent."""
        return cls(
            create=(1.05, 2.2),
            build=(20.0, 40.0),
            start=(0.7, 1.7),
            stop=(1.8, 2.0),
            delete=(0.1, 0.2),
            archive=(50.0, 82.0),
            restore=(33.0, 66.0),
            harness={"session/new": (5.2, 5.2), "session/load": (1.2, 1.2)},
            seed=seed,
        )


class Chance:
    """Draws from ranges; the same seed draws the same values in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def seconds(self, of: Range) -> float:
        """A value of the range."""
        return self._random.uniform(*of)

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return self._random.random() < probability
