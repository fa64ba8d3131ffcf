"""What this process depends on, and whether it is there: what readers are told as `degraded`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger(__name__)

Dependency = Literal["bus", "history"]


class Surroundings:
    """Which dependencies are away. `on_change` is called after each change."""

    def __init__(self) -> None:
        self._away: frozenset[Dependency] = frozenset()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def away(self) -> frozenset[Dependency]:
        """The dependencies that do not answer at present."""
        return self._away

    def note(self, dependency: Dependency, *, there: bool) -> None:
        """What was seen of a dependency just now."""
        if there == (dependency not in self._away):
            return
        self._away = self._away - {dependency} if there else self._away | {dependency}
        logger.log(
            logging.INFO if there else logging.WARNING,
            "a dependency is back" if there else "a dependency is away",
            extra={"dependency": dependency},
        )
        self.on_change()
