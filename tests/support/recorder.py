"""Fills a `Recording` while things happen: what is sent, when it is answered, what is read.

`Recorder` only writes down. `RawHistory` and `RawRelay` are clients of one replica that write down all they send; what
is not answered (the replica died, the stream broke) stays without a result, as it does for a real producer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2
from services.chassis.errors import from_rpc_error
from tests.support.recording import Append, Connection, Key, Mark, Publish, Reader, Recording, Ticks, Trim

# Longer than any answer takes while nothing is away, so that a replica that hangs holds up nobody for long.
_CALL_SECONDS = 20.0


class Recorder:
    """Writes down one run. Times are those of one process, so everything must happen in it."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._ticks = Ticks()
        self._requests = itertools.count(1)

    def request(self) -> int:
        """A number for what goes together in one request."""
        return next(self._requests)

    def sent(
        self, session: Key, event: event_pb2.Event, *, request: int = 0, line: str = "", sound: bool = True
    ) -> Append:
        """An event is about to be sent. It is not copied: whoever corrects it before it is stored corrects it here."""
        number = request or self.request()
        append = Append(session, event, self._ticks(), number, line, sound, began_at=time.monotonic())
        self.recording.appends.append(append)
        return append

    def answered(self, append: Append, result: history_pb2.AppendResult) -> None:
        """Its answer came."""
        append.answered, append.answered_at, append.result = self._ticks(), time.monotonic(), result

    def published(
        self, session: Key, execution: session_pb2.ExecutionRef, frames: Sequence[frame_pb2.Frame]
    ) -> Publish:
        """Frames are about to be given to a relay."""
        publish = Publish(session, execution.execution_id, execution.epoch, frames, began=self._ticks())
        self.recording.publishes.append(publish)
        return publish

    def tick(self) -> int:
        """Now, among everything that is written down."""
        return self._ticks()

    def flushed(self, before: int) -> None:
        """The bus has lost all that it held, at some moment since the tick `before`."""
        self.recording.flushes.append((before, self._ticks()))

    def reads(self, session: Key, connection: Connection) -> None:
        """Somebody read once and then left."""
        self.recording.readers.append(Reader(session, [connection]))


class RawHistory:
    """One replica of history."""

    def __init__(self, channel: grpc.aio.Channel, recorder: Recorder) -> None:
        self._stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        self._recorder = recorder

    async def append(
        self, session: Key, *events: event_pb2.Event, atomic: bool = False, malformed: Sequence[int] = ()
    ) -> list[history_pb2.AppendResult] | None:
        """Append in one request; None when there was no answer. `malformed` are the places of what is so on purpose."""
        copies = [_copy(event) for event in events]
        number = self._recorder.request()
        sent = [
            self._recorder.sent(session, event, request=number, sound=place not in malformed)
            for place, event in enumerate(copies)
        ]
        request = history_service_pb2.AppendEventsRequest(
            sets=[history_pb2.AppendSet(session=_session(session), events=copies, atomic=atomic)]
        )
        try:
            response = await self._stub.AppendEvents(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            _check_passing(error)
            return None
        results = list(response.sets[0].results)
        for append, result in zip(sent, results, strict=True):
            self._recorder.answered(append, result)
        return results

    async def page(self, session: Key, after: session_pb2.Cursor, size: int) -> None:
        """Read one page."""
        request = history_service_pb2.ReadEventsRequest(session=_session(session), after=after, page_size=size)
        connection = Connection(after, began=self._recorder.tick())
        try:
            page = await self._stub.ReadEvents(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            connection.refusal = from_rpc_error(error)
        else:
            connection.items += [relay_pb2.Item(event=item) for item in page.events]
            connection.promised = page.events[-1].cursor.sequence if page.more else page.bounds.head
        self._recorder.reads(session, connection)

    async def stream(self, session: Key, after: session_pb2.Cursor) -> None:
        """Read to the head of now."""
        request = history_service_pb2.StreamEventsRequest(session=_session(session), after=after)
        connection = Connection(after, began=self._recorder.tick())
        first_head = None
        try:
            async for chunk in self._stub.StreamEvents(request, timeout=_CALL_SECONDS):
                first_head = chunk.bounds.head if first_head is None else first_head
                connection.items += [relay_pb2.Item(event=item) for item in chunk.events]
            connection.promised = first_head
        except grpc.aio.AioRpcError as error:
            connection.refusal = from_rpc_error(error)
        self._recorder.reads(session, connection)

    async def trim(self, session: Key, through: int) -> None:
        """Have old events removed."""
        trim = Trim(session, through)
        self._recorder.recording.trims.append(trim)
        request = history_service_pb2.TrimLogRequest(session=_session(session), through=through)
        try:
            bounds = (await self._stub.TrimLog(request, timeout=_CALL_SECONDS)).bounds
        except grpc.aio.AioRpcError as error:
            _check_passing(error)
            return
        trim.answered, trim.oldest = self._recorder.tick(), bounds.oldest or bounds.head + 1

    async def mark(self, session: Key, execution_id: str, reason: str) -> bool:
        """Say that an execution lacks output; False when there was no answer. One that never began is refused."""
        mark = Mark(session, execution_id, reason, self._recorder.tick())
        self._recorder.recording.marks.append(mark)
        request = history_service_pb2.MarkIncompleteRequest(
            session=_session(session), execution_id=execution_id, reason=reason
        )
        try:
            response = await self._stub.MarkIncomplete(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason == "EXECUTION_NOT_FOUND":
                mark.answered = self._recorder.tick()
                return True
            _check_passing(error)
            return False
        mark.answered, mark.entry = self._recorder.tick(), response.execution
        return True


class RawRelay:
    """One replica of the relay."""

    def __init__(self, channel: grpc.aio.Channel, recorder: Recorder) -> None:
        self._stub = relay_service_pb2_grpc.RelayServiceStub(channel)
        self._recorder = recorder

    async def publish(
        self, session: Key, execution: session_pb2.ExecutionRef, *frames: frame_pb2.Frame, ended: bool = False
    ) -> relay_pb2.PublishResult | None:
        """Publish in one request on a stream of its own; None when there was no answer."""
        publish = self._recorder.published(session, execution, frames)
        batch = relay_pb2.FrameBatch(
            session=_session(session),
            execution_id=execution.execution_id,
            epoch=execution.epoch,
            frames=frames,
            ended=ended,
        )
        call = self._stub.Publish(timeout=_CALL_SECONDS)
        try:
            await call.write(relay_service_pb2.PublishRequest(number=1, batches=[batch]))
            await call.done_writing()
            response = await call.read()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            # A write on a call that ended asks for no status; all of them say that the relay is away.
            return None
        if not isinstance(response, relay_service_pb2.PublishResponse):
            return None
        publish.result = response.results[0]
        return publish.result


def _check_passing(error: grpc.aio.AioRpcError) -> None:
    """Only what says nothing about the request may stay unanswered."""
    passing = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    assert error.code() in passing, error


def _session(key: Key) -> session_pb2.SessionKey:
    return session_pb2.SessionKey(project=key[0], session=key[1])


def _copy(event: event_pb2.Event) -> event_pb2.Event:
    copy = event_pb2.Event()
    copy.CopyFrom(event)
    return copy
