"""The word of a checker."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """How many things were looked at, and what is wrong with them, in words."""

    checked: int = 0
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, trouble: str) -> None:
        """Look at one thing; `trouble` says what is wrong when it does not hold."""
        self.checked += 1
        if not holds:
            self.wrong.append(trouble)

    def also(self, troubles: list[str]) -> None:
        """Look at one thing in which several may be wrong."""
        self.checked += 1
        self.wrong += troubles
