"""What load generators write: events of a given size through the producer, as a run of the pool would."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from hearth.channel import open_channel
from hearth.history.v1 import history_pb2
from hearth.producer import ExecutionWriter, Producer, ProducerLimits
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from services.chassis.clock import SystemClock

PROJECT = "bench"
EVENT_BYTES = 300
_STORED = history_pb2.APPEND_OUTCOME_APPENDED


def key(session: str) -> session_pb2.SessionKey:
    """A session of the benchmarks."""
    return session_pb2.SessionKey(project=PROJECT, session=session)


def message(message_id: str, text: str) -> event_pb2.Event:
    """A message of the agent; the writer fills in the rest."""
    body = event_pb2.MessageCompleted(
        message_id=message_id,
        role=content_pb2.ROLE_AGENT,
        content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))],
        finish_reason="end",
    )
    return event_pb2.Event(message_completed=body)


def text_of(event: event_pb2.Event) -> str:
    """The text of a message."""
    return "".join(part.text.text for part in event.message_completed.content)


def padding(size: int = EVENT_BYTES) -> str:
    """A text that makes the event of `message("m1", text)` about `size` bytes long, as it is sent."""
    event = message("m1", "")
    event.event_id = event.execution_id = str(uuid.UUID(int=0))
    event.scope, event.type, event.entity_id, event.epoch = event_pb2.EVENT_SCOPE_RUNNER, "message.completed", "m1", 1
    event.occurred_at.FromDatetime(datetime(2026, 1, 1, 12, 0, 0, 123_456, tzinfo=UTC))
    text = "x" * (size - event.ByteSize() - 4)
    while message("m1", text).ByteSize() + event.ByteSize() - message("m1", "").ByteSize() > size:
        text = text[:-1]
    return text


@asynccontextmanager
async def producer(history: str, relay: str = "", limits: ProducerLimits | None = None) -> AsyncIterator[Producer]:
    """A producer to the services at these addresses; without a relay nothing but events may be written."""
    async with open_channel(history) as to_history, open_channel(relay or history) as to_relay:
        made = Producer(history=to_history, relay=to_relay, clock=SystemClock(), limits=limits)
        await made.start()
        try:
            yield made
        finally:
            await made.close(timeout=10.0)


async def begin(made: Producer, session: str) -> tuple[ExecutionWriter, str]:
    """The writer of a new execution whose start is stored as the first event of its session, and that event's id."""
    writer = made.writer(key(session), str(uuid.uuid4()), 1)
    event = event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="bench"))
    if check_stored(await writer.event(event)) != 1:
        raise RuntimeError(f"session {session} is not new")
    return writer, event.event_id


def check_stored(result: history_pb2.AppendResult) -> int:
    """The sequence of an event that was just appended. Raises RuntimeError for any other outcome."""
    if result.outcome != _STORED:
        raise RuntimeError(
            f"an event was not appended: {history_pb2.AppendOutcome.Name(result.outcome)} {result.reason}"
        )
    return result.sequence
