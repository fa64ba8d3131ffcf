"""The stages of a turn: each one timed, traced, shown to readers as a frame, and summed up in the ending."""

from __future__ import annotations

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


class Stages:
    """Those of one turn. Frames go to the writer; one that is refused hears of it elsewhere."""

    def __init__(self, writer: ExecutionWriter, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock
        self.timings: list[content_pb2.StageTiming] = []

    @contextmanager
    def stage(self, name: str, *, long: bool = True) -> Iterator[Stage]:
        """Time the block as a stage; one that raises is traced and not counted. A `long` one shows its begin."""
        stage = Stage(name, self._clock.monotonic())
        if long:
            self._show(content_pb2.StageTiming(stage=name))
        with telemetry.span(f"turn.{name}") as span:
            yield stage
            if stage.how:
                span.set_attribute("hearth.how", stage.how)
        self.record(name, stage.started, how=stage.how)

    def record(self, name: str, started: float, *, how: str = "", show: bool = True) -> float:
        """Count a stage that began at `started` and ends now; its duration in seconds. What is not shown is read in
        the ending."""
        seconds = max(0.0, self._clock.monotonic() - started)
        timing = content_pb2.StageTiming(stage=name, how=how, duration_us=round(seconds * 1e6))
        self.timings.append(timing)
        if show:
            self._show(timing)
        return seconds

    def _show(self, timing: content_pb2.StageTiming) -> None:
        try:
            self._writer.frame(self._writer.execution.execution_id, stage=frame_pb2.StageUpdate(timing=timing))
        except WriterRefused:
            return
