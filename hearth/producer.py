"""Writes what runs produce: durable events to the history, temporary frames to the relay.

One producer serves all sessions of a process over one AppendStream and one Publish stream. Events of a session keep
their order, over reconnects too; events of different sessions do not wait for each other, and none waits longer than a
moment for a frame. While history is away they wait in memory, then in a file. Use it from one event loop; nothing here
blocks it.

```python
producer = Producer(history=history_channel, relay=relay_channel, clock=SystemClock())
await producer.start()
writer = producer.writer(session, execution_id, epoch)
writer.frame("m1", text_delta=frame_pb2.TextDelta(text="Hel"))
writer.event(event_pb2.Event(message_completed=...))
await writer.ending(event_pb2.Event(execution_completed=...))
await producer.close(timeout=5.0)
```
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from hearth._appending import AppendQueue, Entry, Item, Parked, trace_field
from hearth._items import Fact, Refusal, Tally, WriterRefused, too_large
from hearth._marking import Marker
from hearth._pipeline import Pipeline
from hearth._publishing import FrameBuffer, FrameQueue
from hearth._spill import Room
from hearth._writer import Clock, ExecutionWriter, FrameBody, Key, ProducerLimits
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.relay.v1 import relay_service_pb2
from hearth.types.v1 import event_pb2, session_pb2

__all__ = [
    "Clock",
    "ExecutionWriter",
    "FrameBody",
    "Producer",
    "ProducerLimits",
    "ProducerStats",
    "Refusal",
    "WriterRefused",
]

logger = logging.getLogger(__name__)

# How long the last marks of incompleteness may take.
MARK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class ProducerStats:
    """What a producer did since its start, and how many bytes are in files now."""

    append_requests: int
    append_losses: int
    events_resent: int
    parked_bytes: int
    publish_requests: int
    publish_losses: int
    relay_away: bool


class Producer:
    """The way of all sessions to history and relay. `start` it, and `close` it with time to flush."""

    def __init__(
        self,
        *,
        history: grpc.aio.Channel,
        relay: grpc.aio.Channel,
        clock: Clock,
        limits: ProducerLimits | None = None,
        ids: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.clock = clock
        self.limits = limits or ProducerLimits()
        self.ids = ids
        self.room = Room(self.limits.spill_dir)
        self._marker = Marker(history)
        self._frames = FrameQueue(gather=self.limits.gather)
        self._events = AppendQueue(self._frames)
        self._append = Pipeline(
            "append",
            self._events,
            _opener(history, history_service_pb2.DESCRIPTOR, "AppendStream", history_service_pb2.AppendStreamResponse),
            monotonic=clock.monotonic,
            answer_timeout=self.limits.history_answer,
        )
        self._publish = Pipeline(
            "publish",
            self._frames,
            _opener(relay, relay_service_pb2.DESCRIPTOR, "Publish", relay_service_pb2.PublishResponse),
            monotonic=clock.monotonic,
            answer_timeout=self.limits.relay_answer,
            changed=self._relay_changed,
        )
        self._running: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        """Begin to send. Nothing is connected before there is something to send."""
        for name, pipeline in (("append", self._append), ("publish", self._publish)):
            task = asyncio.create_task(pipeline.run(), name=f"producer {name}")
            task.add_done_callback(self._died)
            self._running.append(task)

    async def close(self, timeout: float) -> None:
        """Take nothing new, wait up to `timeout` seconds for what is on its way, and fail the rest with UNAVAILABLE.

        Executions whose output is among the rest are marked incomplete, if history answers at once.
        """
        self._closed = True
        running, self._running = self._running, []
        try:
            if running:
                deadline = self.clock.monotonic() + timeout
                await _at_most(timeout, self._append.drained())
                if not self._frames.away:
                    await _at_most(deadline - self.clock.monotonic(), self._publish.drained())
        finally:
            for task in running:
                task.cancel()
            self._give_up_unsent(self._fail_all(_closed()))
            self.room.close()
        if running:
            await asyncio.wait(running)
        await self._marker.close(MARK_SECONDS)

    def writer(self, session: session_pb2.SessionKey, execution_id: str, epoch: int) -> ExecutionWriter:
        """The writer of one execution at one epoch; there must be only one."""
        return ExecutionWriter(self, session, session_pb2.ExecutionRef(execution_id=execution_id, epoch=epoch))

    def append(
        self, session: session_pb2.SessionKey, event: event_pb2.Event | bytes, *, traceparent: str = ""
    ) -> asyncio.Future[history_pb2.AppendResult]:
        """Append an event that is complete already, behind everything given for its session before.

        `traceparent` is the W3C trace context of the work that it belongs to: its commit becomes part of that trace.
        Bytes are sent as they are. The future fails with `CallError` when the event cannot be sent: too large, too much
        waits already, refused together with its call, or the producer was closed.
        """
        content = event if isinstance(event, bytes) else event.SerializeToString()
        item = Fact(content)
        item.trace = trace_field(traceparent)
        key = (session.project, session.session)
        if len(content) > self.limits.event_bytes:
            item.fail(too_large(len(content), self.limits.event_bytes))
        elif self._events.size_of(key) + len(content) > 2 * self.limits.waiting_bytes:
            item.fail(CallError(grpc.StatusCode.UNAVAILABLE, "too much waits already", reason="HISTORY_UNAVAILABLE"))
        else:
            self.send(key, item)
        return item.future

    def end_frames(self, session: session_pb2.SessionKey, execution_id: str, epoch: int) -> None:
        """Tell the relay that no more frames of an execution come, which ended at `epoch` without a writer there.

        A writer below that epoch gets none of its frames in any more.
        """
        execution = session_pb2.ExecutionRef(execution_id=execution_id, epoch=epoch)
        frames = FrameBuffer(session, execution, limit=1, fenced=_not_ours)
        frames.ended = True
        self.publish(frames)

    @property
    def stats(self) -> ProducerStats:
        """Counters, and whether the relay is away."""
        return ProducerStats(
            append_requests=self._events.requests,
            append_losses=self._append.losses,
            events_resent=self._events.resent,
            parked_bytes=self.room.bytes,
            publish_requests=self._frames.requests,
            publish_losses=self._publish.losses,
            relay_away=self._frames.away,
        )

    def send(self, key: Key, item: Item) -> None:
        """For writers: give an item to the append stream."""
        if self._closed:
            item.fail(_closed())
            return
        if self._events.add(key, item):
            self._append.wake()
        if item.frames is not None and item.frames.holds(item.frames_through):
            self._frames.hurry()
            self._publish.wake()

    def park(self, key: Key, parked: Parked) -> None:
        """For writers: what stands behind what was given before, but not in memory."""
        if self._closed:
            parked.fail(_closed())
        elif self._events.park(key, parked):
            self._append.wake()

    def arrived(self, key: Key) -> None:
        """For writers: something parked can be taken."""
        self._events.arrived(key)
        self._append.wake()

    def give_up(self, key: Key, execution_id: str, reason: str) -> None:
        """For writers: output is missing, and no ending of theirs will say so."""
        self._marker.mark(key, execution_id, reason)

    def publish(self, frames: FrameBuffer) -> None:
        """For writers: the buffer has something new."""
        if self._frames.add(frames):
            self._publish.wake()

    def withdraw(self, key: Key, unwanted: Callable[[Entry], bool], error: Exception) -> None:
        """For writers: fail the entries of a session that were not sent yet."""
        for entry in self._events.remove(key, unwanted):
            entry.fail(error)
        self._append.wake()

    def _relay_changed(self) -> None:
        if self._events.holding:
            self._append.wake()

    def _fail_all(self, error: Exception) -> list[Entry]:
        entries = self._events.drain()
        for entry in entries:
            entry.fail(error)
        return entries

    def _give_up_unsent(self, entries: list[Entry]) -> None:
        # What was sent may be stored: to call that missing could be wrong, and whoever ends the run knows no better.
        unsent = {entry.owner for entry in entries if isinstance(entry, Parked) or not entry.sent}
        for tally in unsent:
            if isinstance(tally, Tally):
                self._marker.mark(tally.key, tally.execution.execution_id, "the producer ended before it was sent")

    def _died(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("producer died", exc_info=error, extra={"task": task.get_name()})
            self._closed = True
            self._fail_all(CallError(grpc.StatusCode.INTERNAL, "the producer died; its log says why"))


_T = TypeVar("_T")


async def _at_most(seconds: float, awaitable: Awaitable[_T]) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await awaitable
    except TimeoutError:
        return


def _not_ours(_: session_pb2.ExecutionRef) -> None:
    """Another writer has the session by now: then it is closed to older ones all the same."""


def _closed() -> CallError:
    return CallError(grpc.StatusCode.UNAVAILABLE, "the producer was closed", reason="SHUTTING_DOWN")


def _opener(
    channel: grpc.aio.Channel, file: FileDescriptor, method: str, answer: type[Message]
) -> Callable[[], grpc.aio.StreamStreamCall[Any, Any]]:
    """A call of a method whose requests are serialized already."""
    (service,) = file.services_by_name.values()
    path = f"/{service.full_name}/{service.methods_by_name[method].name}"
    multi_callable = channel.stream_stream(path, request_serializer=bytes, response_deserializer=answer.FromString)
    return cast("Callable[[], grpc.aio.StreamStreamCall[Any, Any]]", multi_callable)
