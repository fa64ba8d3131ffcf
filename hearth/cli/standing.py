"""How a session stands for one who talks in it: what runs, what waits, what the agent asks. Pure.

It learns from three sides, which overtake each other: what a call answered, the events of the log, and what the pool
shows of the session. What is over stays over, whoever tells of it later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hearth.reducer import is_ending, text_of
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2


@dataclasses.dataclass(slots=True)
class Standing:
    """`running` is an execution that has not ended. `waiting` are texts of inputs by id, `asked` what nobody has
    answered, by id, both oldest first. `paused`: the queue waits for ResumeQueue or the next message. `settling` is an
    execution that ended while inputs waited: until the pool has settled it, nobody knows whether one of them runs."""

    running: str = ""
    waiting: dict[str, str] = dataclasses.field(default_factory=dict)
    asked: dict[str, event_pb2.InteractionRequested] = dataclasses.field(default_factory=dict)
    paused: bool = False
    settling: str = ""
    _over: set[str] = dataclasses.field(default_factory=set)

    @property
    def working(self) -> bool:
        """Whether something happens without anybody saying more."""
        if self.running or self.settling:
            return True
        return bool(self.waiting) and not self.paused and not self.asked

    @property
    def listening(self) -> bool:
        """Whether it is somebody's turn to say something: nothing happens, or the agent waits for an answer."""
        return not self.working or bool(self.asked)

    def shown(
        self,
        session: control_pb2.Session,
        inputs: Iterable[control_pb2.Input],
        interactions: Iterable[control_pb2.Interaction],
    ) -> None:
        """Take what the pool shows."""
        self.settled(session)
        for waiting in inputs:
            if waiting.state == control_pb2.INPUT_STATE_PENDING:
                self.queued(waiting.input_id, text_of(waiting.content))
        for interaction in interactions:
            if interaction.state == control_pb2.INTERACTION_STATE_PENDING:
                self._ask(interaction.request)

    def settled(self, session: control_pb2.Session) -> None:
        """Take what became of the queue after an ending."""
        self.paused = session.queue_paused
        self.settling = ""
        if session.execution.execution_id and session.execution.state != control_pb2.EXECUTION_STATE_TERMINAL:
            self.begun(session.execution.execution_id)

    def begun(self, execution_id: str) -> None:
        """An execution was admitted."""
        if execution_id and execution_id not in self._over:
            self.running = execution_id
            self.paused = False

    def queued(self, input_id: str, text: str) -> None:
        """An input waits."""
        if input_id not in self._over:
            self.waiting[input_id] = text

    def answered(self, interaction_ids: Iterable[str]) -> None:
        """Somebody answered."""
        for interaction_id in interaction_ids:
            self._close(self.asked, interaction_id)

    def take(self, event: event_pb2.Event) -> None:
        """Take an event of the log."""
        match event.WhichOneof("body"):
            case "execution_started":
                self.begun(event.execution_id)
            case "interaction_requested":
                self._ask(event.interaction_requested)
            case "interaction_answered":
                self._close(self.asked, event.interaction_answered.interaction_id)
            case "interaction_resolved":
                self._close(self.asked, event.interaction_resolved.interaction_id)
            case "input_queued":
                self.queued(event.input_queued.input_id, text_of(event.input_queued.content))
            case "input_updated" if event.input_updated.input_id in self.waiting:
                self.waiting[event.input_updated.input_id] = text_of(event.input_updated.content)
            case "input_promoted":
                self._close(self.waiting, event.input_promoted.input_id)
                self.begun(event.input_promoted.execution_id)
            case "input_removed":
                self._close(self.waiting, event.input_removed.input_id)
            case _ if is_ending(event.type):
                self._end(event.execution_id)

    def _ask(self, request: event_pb2.InteractionRequested) -> None:
        if request.interaction_id not in self._over:
            self.asked[request.interaction_id] = request

    def _close(self, open_ones: dict[str, str] | dict[str, event_pb2.InteractionRequested], closed: str) -> None:
        open_ones.pop(closed, None)
        self._over.add(closed)

    def _end(self, execution_id: str) -> None:
        self._over.add(execution_id)
        if self.running == execution_id:
            self.running = ""
            self.settling = execution_id if self.waiting else ""
