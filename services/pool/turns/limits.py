"""How long a turn may take, be silent, and run one tool: timers over an injected clock that know nothing of turns."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
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

    Tell it what happens; await `tripped` to hear of a limit. While a person is asked (`frozen`) no time passes for it.
    """

    def __init__(self, limits: TurnLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        # How many wait for a person, since when, and for how long anybody has been waited for in all.
        self._asking = 0
        self._frozen_at = 0.0
        self._frozen = 0.0
        now = self._time()
        self._turn_ends = now + limits.turn
        self._first_ends: float | None = now + limits.first_response
        self._idle_ends = now + limits.idle
        self._tools: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._reason = ""

    def progress(self, *, output: bool = True) -> None:
        """The agent sent something, and so is not idle. From its first `output` on only silence counts: what is none,
        as the list of its commands, says nothing about whether its model answers."""
        if output and self._first_ends is not None:
            self._first_ends = None
            self._changed.set()
        self._idle_ends = self._time() + self._limits.idle

    def running_tools(self, tool_call_ids: Collection[str]) -> None:
        """The tool calls that run now."""
        for ended in self._tools.keys() - set(tool_call_ids):
            del self._tools[ended]
        for begun in set(tool_call_ids) - self._tools.keys():
            self._tools[begun] = self._time() + self._limits.tool_call
            self._changed.set()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """For the time of the block a person is asked, which may take as long as it likes. Blocks may overlap."""
        if not self._asking:
            self._frozen_at = self._clock.monotonic()
        self._asking += 1
        self._changed.set()
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self._frozen += self._clock.monotonic() - self._frozen_at
            self._changed.set()

    def next(self) -> tuple[float, str]:
        """How many seconds are left until the next limit is passed, and its reason."""
        ends = [(self._turn_ends, "TURN_LIMIT")]
        if self._first_ends is not None:
            ends.append((self._first_ends, "FIRST_RESPONSE_LIMIT"))
        else:
            ends.append((self._idle_ends, "IDLE_LIMIT"))
        if self._tools:
            ends.append((min(self._tools.values()), "TOOL_LIMIT"))
        at, reason = min(ends)
        return at - self._time(), reason

    async def tripped(self) -> str:
        """Wait until a limit is passed; its reason, a name of `hearth.types.v1.Reason`. The first one stands."""
        while not self._reason:
            self._changed.clear()
            if self._asking:
                await self._changed.wait()
                continue
            left, reason = self.next()
            if left <= 0:
                self._reason = reason
            else:
                # Never a delay of nothing: what is left of a sum of floats must not become a busy loop.
                await _first_of(self._clock.sleep(max(left, _LEAST)), self._changed.wait())
        return self._reason

    def _time(self) -> float:
        """The time that passes for this turn."""
        return (self._frozen_at if self._asking else self._clock.monotonic()) - self._frozen


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
