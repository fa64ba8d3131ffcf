"""Valid events for tests, as a producer would make them."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hearth.history.v1 import history_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2

_START = datetime(2026, 1, 1, tzinfo=UTC)
_numbers = itertools.count(1)
_project = ["test"]


def new_id() -> str:
    """A fresh uuid."""
    return str(uuid.uuid4())


def use_project(name: str) -> None:
    """Make all further keys in this project: where services are not the tests' own, each run has one to itself."""
    _project[0] = name


def key(session: str | None = None, project: str = "") -> session_pb2.SessionKey:
    """A session; without a name one that no other test has."""
    return session_pb2.SessionKey(project=project or _project[0], session=session or f"s-{new_id()}")


def session_event(event_type: str, *, entity_id: str = "", execution_id: str = "", **body: object) -> event_pb2.Event:
    """An event of scope SESSION; `body` is the one oneof field."""
    return _event(event_pb2.EVENT_SCOPE_SESSION, event_type, entity_id, execution_id=execution_id, **body)


def user_message(text: str = "hello") -> event_pb2.Event:
    """What the user said."""
    message_id = new_id()
    body = event_pb2.MessageCompleted(
        message_id=message_id, role=content_pb2.ROLE_USER, content=[_text(text)], finish_reason="end"
    )
    return session_event("message.completed", entity_id=message_id, message_completed=body)


def input_queued(text: str = "later") -> event_pb2.Event:
    """An input that waits."""
    input_id = new_id()
    return session_event(
        "input.queued", entity_id=input_id, input_queued=event_pb2.InputQueued(input_id=input_id, content=[_text(text)])
    )


def interaction_requested() -> event_pb2.Event:
    """The agent asks for an approval."""
    interaction_id = new_id()
    body = event_pb2.InteractionRequested(
        interaction_id=interaction_id,
        kind=event_pb2.INTERACTION_KIND_APPROVAL,
        tool_call_id="call-1",
        tool_name="rm",
        input_json="{}",
    )
    return session_event("interaction.requested", entity_id=interaction_id, interaction_requested=body)


def gap(reason: str = "an event was refused") -> event_pb2.Event:
    """Something is missing for good."""
    return session_event("history.incomplete", history_incomplete=event_pb2.HistoryIncomplete(reason=reason))


def custom(size: int = 0, event_type: str = "test.example/note") -> event_pb2.Event:
    """A session event with `size` bytes of content."""
    return session_event(event_type, custom=event_pb2.CustomEvent(type=event_type, data=b"x" * size))


@dataclass
class Run:
    """One execution at one epoch. It counts what a manifest of it counts."""

    epoch: int = 1
    execution_id: str = field(default_factory=new_id)
    counted: int = 0

    def at(self, epoch: int) -> Run:
        """The same execution, driven at another epoch."""
        return Run(epoch, self.execution_id)

    def started(self) -> event_pb2.Event:
        """Opens the execution."""
        return self._event(
            "execution.started", self.execution_id, execution_started=event_pb2.ExecutionStarted(agent="scripted")
        )

    def message(self, text: str = "answer", *, frames_through: int | None = None) -> event_pb2.Event:
        """A message of the agent."""
        self.counted += 1
        message_id = new_id()
        body = event_pb2.MessageCompleted(
            message_id=message_id, role=content_pb2.ROLE_AGENT, content=[_text(text)], finish_reason="end"
        )
        event = self._event("message.completed", message_id, message_completed=body)
        if frames_through is not None:
            event.frames_through = frames_through
        return event

    def tool(
        self, name: str = "ls", status: event_pb2.ToolStatus.ValueType = event_pb2.TOOL_STATUS_SUCCEEDED
    ) -> event_pb2.Event:
        """A tool call."""
        self.counted += 1
        call_id = new_id()
        body = event_pb2.ToolCompleted(
            tool_call_id=call_id, name=name, kind="execute", input_json="{}", output="ok", status=status
        )
        return self._event("tool.completed", call_id, tool_completed=body)

    def completed(self, *, counted: int | None = None, incomplete: str = "") -> event_pb2.Event:
        """The agent finished; `counted` instead of the true number, `incomplete` with this reason."""
        body = event_pb2.ExecutionCompleted(finish_reason="end_turn", summary=self._summary(counted, incomplete))
        return self._event("execution.completed", self.execution_id, execution_completed=body)

    def failed(self, code: str = "AGENT_EXITED") -> event_pb2.Event:
        """The run could not go on."""
        body = event_pb2.ExecutionFailed(code=code, message="it ended", summary=self._summary(None, ""))
        return self._event("execution.failed", self.execution_id, execution_failed=body)

    def stopped(self, reason: str = "user") -> event_pb2.Event:
        """Somebody stopped it."""
        body = event_pb2.ExecutionStopped(reason=reason, summary=self._summary(None, ""))
        return self._event("execution.stopped", self.execution_id, execution_stopped=body)

    def lost(self) -> event_pb2.Event:
        """What a takeover writes."""
        body = event_pb2.ExecutionLost(reason="runner gone", summary=self._summary(0, "the runner is gone"))
        return self._event("execution.lost", self.execution_id, execution_lost=body)

    def _summary(self, counted: int | None, incomplete: str) -> event_pb2.EndingSummary:
        manifest = event_pb2.Manifest(
            runner_events=self.counted if counted is None else counted,
            incomplete=bool(incomplete),
            incomplete_reason=incomplete,
        )
        return event_pb2.EndingSummary(manifest=manifest, how="cold")

    def _event(self, event_type: str, entity_id: str, **body: object) -> event_pb2.Event:
        return _event(
            event_pb2.EVENT_SCOPE_RUNNER,
            event_type,
            entity_id,
            execution_id=self.execution_id,
            epoch=self.epoch,
            **body,
        )


def append_set(
    session: session_pb2.SessionKey, *events: event_pb2.Event, atomic: bool = False
) -> history_pb2.AppendSet:
    """A set of a request."""
    return history_pb2.AppendSet(session=session, events=events, atomic=atomic)


def tag(event: event_pb2.Event) -> str:
    """The tag that a cursor on this event carries."""
    return event.event_id.replace("-", "")[:16]


def _text(text: str) -> content_pb2.ContentPart:
    return content_pb2.ContentPart(text=content_pb2.TextPart(text=text))


def _event(scope: event_pb2.EventScope.ValueType, event_type: str, entity_id: str, **rest: object) -> event_pb2.Event:
    event = event_pb2.Event(
        event_id=new_id(),
        scope=scope,
        type=event_type,
        entity_id=entity_id,
        **rest,  # type: ignore[arg-type]
    )
    event.occurred_at.FromDatetime(_START + timedelta(milliseconds=next(_numbers)))
    return event
