"""How long a turn may take, be silent, and run one tool: timers over an injected clock that know nothing of turns."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Coroutine
from typing import Any

from hearth.session.v1 import session_pb2
from services.chassis.clock import Clock

# What a limit may be, in seconds: four days at most.
_LEAST = 0.001
_MOST = 4 * 24 * 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class TurnLimits:
    """Seconds."""

    turn: float = 7200.0
    idle: float = 1800.0
    first_response: float = 120.0
    tool_call: float = 1800.0

    def clamped(self) -> TurnLimits:
        """The same within what makes sense. A silence as long as the turn would never be noticed: half of it is."""
        turn = _clamp(self.turn)
        idle = _clamp(self.idle)
        return TurnLimits(turn, turn / 2 if idle >= turn else idle, _clamp(self.first_response), _clamp(self.tool_call))

    def with_spec(self, limits: session_pb2.TurnLimits) -> TurnLimits:
        """The limits of a spec, and these where it has none."""

        def chosen(name: str, default: float) -> float:
            return getattr(limits, name).ToNanoseconds() / 1e9 if limits.HasField(name) else default  # type: ignore[arg-type]

        return TurnLimits(
            chosen("turn", self.turn),
            chosen("idle", self.idle),
            chosen("first_response", self.first_response),
            chosen("tool_call", self.tool_call),
        ).clamped()


def _clamp(seconds: float) -> float:
    return min(max(seconds, _LEAST), _MOST)


class LimitWatch:
    """Watches one turn from its prompt on. Trips once, with the reason of the limit that was passed first.

    Tell it what happens; await `tripped` to hear of a limit.
    """

    def __init__(self, limits: TurnLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        now = clock.monotonic()
        self._turn_ends = now + limits.turn
        self._first_ends: float | None = now + limits.first_response
        self._idle_ends = 0.0
        self._tools: dict[str, float] = {}
        self._sooner = asyncio.Event()

    def progress(self) -> None:
        """The agent sent something: from its first output on only silence counts."""
        if self._first_ends is not None:
            self._first_ends = None
            self._sooner.set()
        self._idle_ends = self._clock.monotonic() + self._limits.idle

    def running_tools(self, tool_call_ids: Collection[str]) -> None:
        """The tool calls that are open now."""
        for ended in self._tools.keys() - set(tool_call_ids):
            del self._tools[ended]
        for begun in set(tool_call_ids) - self._tools.keys():
            self._tools[begun] = self._clock.monotonic() + self._limits.tool_call
            self._sooner.set()

    def next(self) -> tuple[float, str]:
        """When the next limit is passed, on the clock's monotonic time, and its reason."""
        ends = [(self._turn_ends, "TURN_LIMIT")]
        if self._first_ends is not None:
            ends.append((self._first_ends, "FIRST_RESPONSE_LIMIT"))
        else:
            ends.append((self._idle_ends, "IDLE_LIMIT"))
        if self._tools:
            ends.append((min(self._tools.values()), "TOOL_LIMIT"))
        return min(ends)

    async def tripped(self) -> str:
        """Wait until a limit is passed; its reason, a name of `hearth.types.v1.Reason`."""
        while True:
            at, reason = self.next()
            left = at - self._clock.monotonic()
            if left <= 0:
                return reason
            self._sooner.clear()
            await _first_of(self._clock.sleep(left), self._sooner.wait())


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
