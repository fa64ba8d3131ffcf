"""Time and identity come from here, injected, so that a decision can be tested at any moment and with known ids."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import Protocol

# Namespace of every id that is derived from other ids. Changing it would change the identity of stored facts.
_NAMESPACE = uuid.UUID("6f1d3c0e-58a4-4d0b-9a63-2f7c1b0e9d51")


class Clock(Protocol):
    """A source of time. Nothing that must be correct may compare `now()` of two machines."""

    def now(self) -> datetime:
        """Wall time, aware, UTC: for people and for rows, never for measuring."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary point of this process; only differences mean something."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of this clock."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Ids(Protocol):
    """A source of fresh ids."""

    def new(self) -> str:
        """A new uuid in its canonical text form (36 characters, lower case)."""
        ...


class SystemIds:
    """Random version 4 uuids."""

    def new(self) -> str:
        return str(uuid.uuid4())


def derived_id(*parts: str) -> str:
    """The uuid that these parts always give, in order: who derives it again gets the same one.

    Parts are joined by a NUL, which no id of ours contains, so ("a", "bc") and ("ab", "c") differ.
    """
    return str(uuid.uuid5(_NAMESPACE, "\0".join(parts)))
