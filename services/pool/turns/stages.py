"""The stages of a turn: each one timed, traced, shown to readers as a frame, and summed up in the ending.

What is over in a moment is not worth a frame of its own while a turn hurries to its agent: stages are shown together,
with the first output at the latest, and each one that takes long enough for somebody to wonder is shown while it runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from hearth.producer import ExecutionWriter, WriterRefused
from hearth.types.v1 import content_pb2, frame_pb2
from services.chassis import telemetry
from services.chassis.clock import Clock


@dataclasses.dataclass(slots=True)
class Stage:
    """A stage under way; `how` may be set until it ends."""

    name: str
    started: float
    how: str = ""


# How long a stage may wait to be shown.
SHOWN_WITHIN = 0.1


class Stages:
    """Those of one turn. Frames go to the writer; one that is refused hears of it elsewhere."""

    def __init__(self, writer: ExecutionWriter, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock
        self._unshown: list[content_pb2.StageTiming] = []
        self._timer: asyncio.TimerHandle | None = None
        self.timings: list[content_pb2.StageTiming] = []

    @contextmanager
    def stage(self, name: str, *, long: bool = True) -> Iterator[Stage]:
        """Time the block as a stage; one that raises is traced and not counted. A `long` one shows its begin, unless
        it is over by then."""
        stage = Stage(name, self._clock.monotonic())
        begin = content_pb2.StageTiming(stage=name)
        if long:
            self._show_soon(begin)
        with telemetry.span(f"turn.{name}") as span:
            yield stage
            if stage.how:
                span.set_attribute("hearth.how", stage.how)
        self._unshown = [timing for timing in self._unshown if timing is not begin]
        self._count(name, self._since(stage.started), how=stage.how, show=True)

    def record(self, name: str, started: float, *, show: bool = True) -> float:
        """Trace and count a stage that began at `started` and ends now; its duration in seconds. What is not shown is
        read in the ending."""
        seconds = self._since(started)
        telemetry.past(f"turn.{name}", seconds)
        self._count(name, seconds, how="", show=show)
        return seconds

    def _since(self, started: float) -> float:
        return max(0.0, self._clock.monotonic() - started)

    def _count(self, name: str, seconds: float, *, how: str, show: bool) -> None:
        timing = content_pb2.StageTiming(stage=name, how=how, duration_us=round(seconds * 1e6))
        self.timings.append(timing)
        if show:
            self._show_soon(timing)

    def show(self) -> None:
        """Show now what waits to be shown: output follows, or nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unshown, self._unshown = self._unshown, []
        if self._writer.closed:
            # Whoever ends the turn in its place does so without them.
            return
        for timing in unshown:
            try:
                self._writer.frame(self._writer.execution.execution_id, stage=frame_pb2.StageUpdate(timing=timing))
            except WriterRefused:
                return

    def _show_soon(self, timing: content_pb2.StageTiming) -> None:
        self._unshown.append(timing)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SHOWN_WITHIN, self.show)
