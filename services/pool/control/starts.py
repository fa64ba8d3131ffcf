"""Executions as they are made: for an input, or to go on with what people have answered."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2
from services.chassis.clock import Clock, Ids
from services.pool.changing import Changing
from services.pool.control import facts
from services.pool.rows import Execution, Fact, Input


class Starts:
    """Gives inputs to executions, inside of a transaction that locks the session."""

    def __init__(self, clock: Clock, ids: Ids, default_agent: str) -> None:
        self._clock = clock
        self._ids = ids
        self._default_agent = default_agent

    def prepare(self, changing: Changing, spec: bytes | None) -> str:
        """Take the next epoch for a new execution, and put a spec in force, where one is given: an empty one takes
        everything back to the defaults. The id of the execution."""
        execution_id = self._ids.new()
        changing.change(epoch=changing.session.epoch + 1, queue_paused=False, spec=spec, execution_id=execution_id)
        return execution_id

    def facts(
        self, changing: Changing, execution_id: str, input_id: str, content: Sequence[content_pb2.ContentPart]
    ) -> list[Fact]:
        """What readers are told of an execution that was just made."""
        now = self._clock.now()
        spec = sessions.SessionSpec.FromString(changing.session.spec)
        return [
            facts.started(
                execution_id,
                changing.session.epoch,
                input_id=input_id,
                agent=spec.agent or self._default_agent,
                model=spec.model,
                at=now,
            ),
            facts.user_message(execution_id, input_id, content, now),
        ]

    async def continue_(self, changing: Changing, source_execution_id: str, traceparent: str = "") -> Execution | None:
        """Start the one execution that goes on with the answers to what another has asked; the queue stays as it is.
        None when that was done before, or something is under way."""
        execution = await changing.gates.continue_(
            self._ids.new(), changing.session.epoch + 1, source_execution_id, traceparent
        )
        if execution is None:
            return None
        changing.change(epoch=execution.epoch, execution_id=execution.execution_id)
        spec = sessions.SessionSpec.FromString(changing.session.spec)
        changing.tell(
            facts.started(
                execution.execution_id,
                execution.epoch,
                input_id=None,
                source_execution_id=source_execution_id,
                agent=spec.agent or self._default_agent,
                model=spec.model,
                at=self._clock.now(),
            )
        )
        return execution

    async def promote(self, changing: Changing, waiting: Input) -> Execution:
        """Start an input that waits."""
        execution_id = self.prepare(changing, waiting.spec)
        execution = await changing.promote(waiting.input_id, execution_id)
        changing.tell(facts.input_promoted(waiting.input_id, execution_id, self._clock.now()))
        changing.tell(*self.facts(changing, execution_id, waiting.input_id, content_of(waiting.content)))
        return execution


def content_bytes(content: Sequence[content_pb2.ContentPart]) -> bytes:
    """Content as a row holds it."""
    return sessions.Input(content=content).SerializeToString()


def content_of(data: bytes) -> Sequence[content_pb2.ContentPart]:
    """Content from a row."""
    return sessions.Input.FromString(data).content
