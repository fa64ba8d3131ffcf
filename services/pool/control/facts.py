"""The events that the pool itself tells, each with an id that follows from what it says: telling it twice is once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from hearth.types.v1 import content_pb2, event_pb2
from services.chassis.clock import derived_id
from services.pool.rows import Fact, Gate, Resolution

STARTED = "STARTED"
ENDED = "ENDED"


def started(
    execution_id: str,
    epoch: int,
    *,
    input_id: str | None,
    source_execution_id: str | None = None,
    agent: str,
    model: str,
    at: datetime,
) -> Fact:
    """`execution.started`, which opens the execution in the log at `epoch`."""
    event = _event("execution.started", ("execution", execution_id, "execution.started", str(epoch)), execution_id, at)
    event.scope = event_pb2.EVENT_SCOPE_RUNNER
    event.execution_id, event.epoch = execution_id, epoch
    event.execution_started.input_id = input_id or ""
    event.execution_started.source_execution_id = source_execution_id or ""
    event.execution_started.agent = agent
    event.execution_started.model = model
    return _fact(event, execution_id, STARTED)


def user_message(execution_id: str, input_id: str, content: Sequence[content_pb2.ContentPart], at: datetime) -> Fact:
    """`message.completed` of the user: the message that an execution runs. Its id is that of the input."""
    event = _event("message.completed", ("input", input_id, "message"), input_id, at)
    event.execution_id = execution_id
    event.message_completed.message_id = input_id
    event.message_completed.role = content_pb2.ROLE_USER
    event.message_completed.content.extend(content)
    event.message_completed.finish_reason = "end"
    return _fact(event)


def input_queued(
    input_id: str, content: Sequence[content_pb2.ContentPart], at: datetime, *, steer: bool = False
) -> Fact:
    """`input.queued`; `steer`: it waits at the head for its cancel."""
    event = _event("input.queued", ("input", input_id, "queued"), input_id, at)
    event.input_queued.input_id = input_id
    event.input_queued.content.extend(content)
    event.input_queued.steer = steer
    return _fact(event)


def input_promoted(input_id: str, execution_id: str, at: datetime) -> Fact:
    """`input.promoted`."""
    event = _event("input.promoted", ("input", input_id, "promoted"), input_id, at)
    event.execution_id = execution_id
    event.input_promoted.input_id = input_id
    event.input_promoted.execution_id = execution_id
    return _fact(event)


def input_removed(input_id: str, reason: str, at: datetime) -> Fact:
    """`input.removed`; `reason` is `user`, `kill` or `delete`."""
    event = _event("input.removed", ("input", input_id, "removed"), input_id, at)
    event.input_removed.input_id = input_id
    event.input_removed.reason = reason
    return _fact(event)


def input_updated(input_id: str, request_id: str, content: Sequence[content_pb2.ContentPart], at: datetime) -> Fact:
    """`input.updated` by the request `request_id`."""
    event = _event("input.updated", ("input", input_id, "updated", request_id), input_id, at)
    event.input_updated.input_id = input_id
    event.input_updated.content.extend(content)
    return _fact(event)


def interaction_requested(gate: Gate, at: datetime) -> Fact:
    """`interaction.requested`."""
    event = _interaction("interaction.requested", gate, at)
    event.interaction_requested.MergeFromString(gate.request)
    return _fact(event)


def interaction_answered(gate: Gate, at: datetime) -> Fact:
    """`interaction.answered`: the answer is stored, and the agent was not told yet."""
    event = _interaction("interaction.answered", gate, at)
    body = event.interaction_answered
    body.interaction_id, body.tool_call_id = gate.interaction_id, gate.tool_call_id
    body.decision = decision_of(gate)
    body.answer_json = gate.answer_json or ""
    body.answered_by = gate.answered_by or ""
    return _fact(event)


def interaction_resolved(gate: Gate, decided_by: str, at: datetime) -> Fact:
    """`interaction.resolved`: what became of a gate that is at its end. A decision is told where it was applied."""
    event = _interaction("interaction.resolved", gate, at)
    body = event.interaction_resolved
    body.interaction_id, body.tool_call_id = gate.interaction_id, gate.tool_call_id
    body.resolution = resolution_of(gate)
    if gate.resolution is Resolution.CONSUMED:
        body.decision = decision_of(gate)
    body.decided_by = decided_by
    return _fact(event)


def decision_of(gate: Gate) -> event_pb2.Decision.ValueType:
    """The decision on a gate as the contracts have it."""
    return event_pb2.Decision.Value(f"DECISION_{gate.decision or 'UNSPECIFIED'}")


def resolution_of(gate: Gate) -> event_pb2.InteractionResolution.ValueType:
    """The resolution of a gate as the contracts have it."""
    return event_pb2.InteractionResolution.Value(f"INTERACTION_RESOLUTION_{gate.resolution or 'UNSPECIFIED'}")


def stopped(
    execution_id: str, epoch: int, *, reason: str, command_id: str | None, at: datetime, incomplete: str = ""
) -> Fact:
    """`execution.stopped` by the pool itself. `incomplete` says why output may be missing; empty: none can be."""
    event = _ending("execution.stopped", execution_id, epoch, at)
    event.execution_stopped.reason = reason
    event.execution_stopped.command_id = command_id or ""
    _manifest(event.execution_stopped.summary, incomplete)
    return _fact(event, execution_id, ENDED)


def failed(
    execution_id: str,
    epoch: int,
    *,
    code: str,
    message: str,
    at: datetime,
    incomplete: str = "",
    retryable: bool = True,
    summary: event_pb2.EndingSummary | None = None,
) -> Fact:
    """`execution.failed` by the pool itself; `retryable`: sending the message again may work."""
    event = _ending("execution.failed", execution_id, epoch, at)
    if summary is not None:
        event.execution_failed.summary.CopyFrom(summary)
    event.execution_failed.code = code
    event.execution_failed.message = message
    event.execution_failed.retryable = retryable
    _manifest(event.execution_failed.summary, incomplete)
    return _fact(event, execution_id, ENDED)


def lost(execution_id: str, epoch: int, *, reason: str, at: datetime) -> Fact:
    """`execution.lost`."""
    event = _ending("execution.lost", execution_id, epoch, at)
    event.execution_lost.reason = reason
    _manifest(event.execution_lost.summary, reason)
    return _fact(event, execution_id, ENDED)


def paused(execution_id: str, epoch: int, *, interaction_ids: Sequence[str], at: datetime, incomplete: str) -> Fact:
    """`execution.paused` by a takeover."""
    event = _ending("execution.paused", execution_id, epoch, at)
    event.execution_paused.interaction_ids.extend(interaction_ids)
    _manifest(event.execution_paused.summary, incomplete)
    return _fact(event, execution_id, ENDED)


def history_incomplete(refused_event_id: str, reason: str, at: datetime) -> Fact:
    """`history.incomplete`, after history refused the event `refused_event_id` for good."""
    event = _event("history.incomplete", ("event", refused_event_id, "refused"), refused_event_id, at)
    event.history_incomplete.reason = reason
    event.history_incomplete.missing_events = 1
    return _fact(event)


def with_incomplete_manifest(data: bytes, reason: str) -> bytes:
    """A serialized ending that no longer claims to be complete."""
    event = event_pb2.Event.FromString(data)
    _manifest(ending_summary(event), reason)
    return event.SerializeToString()


def ending_summary(event: event_pb2.Event) -> event_pb2.EndingSummary:
    """The summary of an ending, to be read or filled."""
    body: Message = getattr(event, event.type.replace(".", "_"))
    summary: event_pb2.EndingSummary = body.summary  # type: ignore[attr-defined]
    return summary


def timestamp(at: datetime) -> Timestamp:
    """A point in time as the contracts have it."""
    message = Timestamp()
    message.FromDatetime(at)
    return message


def _event(kind: str, identity: tuple[str, ...], entity_id: str, at: datetime) -> event_pb2.Event:
    return event_pb2.Event(
        event_id=derived_id(*identity),
        scope=event_pb2.EVENT_SCOPE_SESSION,
        type=kind,
        entity_id=entity_id,
        occurred_at=timestamp(at),
    )


def _interaction(kind: str, gate: Gate, at: datetime) -> event_pb2.Event:
    event = _event(kind, ("interaction", gate.interaction_id, kind), gate.interaction_id, at)
    event.execution_id = gate.execution_id
    return event


def _ending(kind: str, execution_id: str, epoch: int, at: datetime) -> event_pb2.Event:
    event = _event(kind, ("execution", execution_id, kind, str(epoch)), execution_id, at)
    event.scope = event_pb2.EVENT_SCOPE_RUNNER
    event.execution_id, event.epoch = execution_id, epoch
    return event


def _manifest(summary: event_pb2.EndingSummary, incomplete: str) -> None:
    summary.manifest.SetInParent()
    summary.manifest.incomplete = bool(incomplete)
    summary.manifest.incomplete_reason = incomplete


def _fact(event: event_pb2.Event, execution_id: str | None = None, transition: str = "") -> Fact:
    return Fact(event.event_id, event.SerializeToString(), execution_id, transition)
