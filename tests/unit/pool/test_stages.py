"""Stages of a turn are shown together and soon; of a turn that somebody else ends nothing more is shown, and nothing
fails for that."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hearth.producer import ExecutionWriter
from hearth.types.v1 import frame_pb2, session_pb2
from services.pool.turns.stages import SHOWN_WITHIN, Stages
from tests.unit.pool.clocks import ManualClock


class Shown:
    """The writer of an execution, as far as stages go: once it is closed it refuses to be written to."""

    def __init__(self) -> None:
        self.execution = session_pb2.ExecutionRef(execution_id="e", epoch=1)
        self.closed = False
        self.stages: list[str] = []

    def frame(self, _entity_id: str, *, stage: frame_pb2.StageUpdate, **_more: Any) -> int:
        assert not self.closed
        self.stages.append(stage.timing.stage)
        return len(self.stages)


def stages_of(writer: Shown) -> Stages:
    return Stages(cast("ExecutionWriter", writer), ManualClock())


async def test_stages_are_shown_together_when_output_follows() -> None:
    writer = Shown()
    stages = stages_of(writer)
    stages.record("admit", 0.0)
    with stages.stage("acquire"):
        assert writer.stages == []
    stages.show()
    assert writer.stages == ["admit", "acquire"]
    assert [timing.stage for timing in stages.timings] == ["admit", "acquire"]


async def test_of_a_turn_that_somebody_else_ends_nothing_more_is_shown() -> None:
    writer = Shown()
    stages = stages_of(writer)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    stages.record("admit", 0.0)
    writer.closed = True
    stages.show()
    # Nor by the timer of what is counted after that.
    stages.record("acquire", 0.0)
    await asyncio.sleep(2 * SHOWN_WITHIN)
    assert writer.stages == []
    assert failures == []
    assert [timing.stage for timing in stages.timings] == ["admit", "acquire"]
