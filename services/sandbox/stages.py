"""How long the stages of an Acquire took, for its caller and for the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.chassis.clock import Clock
from services.chassis.telemetry import span


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its name and its seconds."""

    name: str
    seconds: float


class Stages:
    """Collects stages in the order in which they end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done: list[Stage] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """The block is the stage `name`; also when it fails."""
        began = self._clock.monotonic()
        try:
            with span(f"sandbox.{name}"):
                yield
        finally:
            self._done.append(Stage(name, self._clock.monotonic() - began))

    @property
    def done(self) -> tuple[Stage, ...]:
        """The stages so far."""
        return tuple(self._done)
