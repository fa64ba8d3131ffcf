"""One status for one error, over a real server, for all four kinds of RPC, before and after the first response."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.session.v1 import session_service_pb2, session_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis import deadlines
from services.chassis.calls import open_channel
from services.chassis.errors import (
    HearthError,
    Internal,
    InvalidArgument,
    OutOfRange,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)
from services.chassis.interceptors import Context
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings
from tests.support.waiting import eventually

CURSOR = session_pb2.Cursor(log_id="l", sequence=9)


def refusal() -> OutOfRange:
    return OutOfRange(
        "the cursor is above the head", reason="CURSOR_AHEAD", metadata={"head": "8"}, retry_after=1.5, details=[CURSOR]
    )


class Mark:
    """Lives for as long as the frame of the handler that has it."""


class History(history_service_pb2_grpc.HistoryServiceServicer):
    """Fails as the test says, in the form of each RPC kind."""

    def __init__(self) -> None:
        self.error: BaseException = refusal()
        self.first = 0
        self.response = history_service_pb2.StreamEventsResponse()
        self.closed = asyncio.Event()
        self.remaining: list[float | None] = []
        self.release = asyncio.Event()
        self.served: list[weakref.ref[Any]] = []

    def serve(self) -> Mark:
        """Note the task of a call, and a mark for its handler to keep."""
        mark = Mark()
        self.served += [weakref.ref(asyncio.current_task()), weakref.ref(mark)]
        return mark

    async def GetHeads(self, request: Any, context: Context) -> history_service_pb2.GetHeadsResponse:
        _mark = self.serve()
        self.remaining.append(deadlines.remaining())
        raise self.error

    async def StreamEvents(
        self, request: Any, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        _mark = self.serve()
        try:
            for _ in range(self.first):
                yield self.response
            raise self.error
        finally:
            self.closed.set()

    async def AppendStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> None:
        """In the style that writes its responses."""
        _mark = self.serve()
        async for request in request_iterator:
            if request.number > self.first:
                raise self.error
            await context.write(history_service_pb2.AppendStreamResponse())

    async def GetSnapshot(self, request: Any, context: Context) -> history_service_pb2.GetSnapshotResponse:
        _mark = self.serve()
        await self.release.wait()
        return history_service_pb2.GetSnapshotResponse()


class Sessions(session_service_pb2_grpc.SessionServiceServicer):
    async def PutAttachment(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> session_service_pb2.PutAttachmentResponse:
        async for _ in request_iterator:
            raise refusal()
        return session_service_pb2.PutAttachmentResponse()


class Running:
    def __init__(self, app: App[ChassisSettings], history: History, channel: grpc.aio.Channel) -> None:
        self.app = app
        self.history = history
        self.channel = channel
        self.stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        self.sessions = session_service_pb2_grpc.SessionServiceStub(channel)


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    settings = ChassisSettings(shutdown_grace=4)
    sessions = Sessions()  # type: ignore[abstract]
    history = History()  # type: ignore[abstract]

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(history, app.server)
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(sessions, app.server)
        yield

    async with started(settings, "test", build) as app, open_channel(app.address, settings) as channel:
        yield Running(app, history, channel)


@contextlib.asynccontextmanager
async def failing() -> AsyncIterator[list[HearthError]]:
    """Holds what the call in the block failed with."""
    found: list[HearthError] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield found
    found.append(from_rpc_error(caught.value))


def assert_whole(error: HearthError) -> None:
    assert isinstance(error, OutOfRange)
    assert (error.message, error.reason, error.metadata) == (
        "the cursor is above the head",
        "CURSOR_AHEAD",
        {"head": "8"},
    )
    assert error.retry_after == 1.5
    assert error.detail(session_pb2.Cursor) == CURSOR


async def test_unary(running: Running) -> None:
    async with failing() as found:
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    assert_whole(found[0])


@pytest.mark.parametrize("first", [0, 3])
async def test_stream_of_responses(running: Running, first: int) -> None:
    running.history.first = first
    got = 0
    async with failing() as found:
        async for _ in running.stub.StreamEvents(history_service_pb2.StreamEventsRequest()):
            got += 1
    assert got == first
    assert_whole(found[0])
    assert running.history.closed.is_set()


async def test_stream_of_requests(running: Running) -> None:
    async def requests() -> AsyncIterator[session_service_pb2.PutAttachmentRequest]:
        yield session_service_pb2.PutAttachmentRequest(chunk=b"x")

    async with failing() as found:
        await running.sessions.PutAttachment(requests())
    assert_whole(found[0])


@pytest.mark.parametrize("first", [0, 2])
async def test_streams_both_ways(running: Running, first: int) -> None:
    running.history.first = first
    call = running.stub.AppendStream()
    got = 0
    async with failing() as found:
        for number in range(1, first + 2):
            await call.write(history_service_pb2.AppendStreamRequest(number=number))
            if isinstance(await call.read(), history_service_pb2.AppendStreamResponse):
                got += 1
        await call.done_writing()
        await call.read()
    assert got == first
    assert_whole(found[0])


async def test_a_defect_tells_nothing_but_is_logged(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.history.error = ValueError("the password is geheim")
    async with failing() as found:
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    assert isinstance(found[0], Internal)
    assert found[0].reason == "INTERNAL"
    assert "geheim" not in found[0].message
    record = next(record for record in caplog.records if record.message == "call failed by a defect")
    assert record.exc_info is not None
    assert vars(record)["method"] == "/hearth.history.v1.HistoryService/GetHeads"


async def test_what_a_service_did_not_write(running: Running) -> None:
    async with failing() as found:
        await running.stub.TrimLog(history_service_pb2.TrimLogRequest())
    assert isinstance(found[0], Unimplemented)
    assert found[0].reason == "NOT_IMPLEMENTED"


async def test_an_inner_cancellation_is_not_the_callers(running: Running) -> None:
    running.history.error = asyncio.CancelledError()
    async with failing() as found:
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    assert isinstance(found[0], Unavailable)


async def test_a_message_that_does_not_parse(running: Running) -> None:
    broken = b"\xff\xff\xff\xff"
    unary: Any = running.channel.unary_unary("/hearth.history.v1.HistoryService/GetHeads")
    async with failing() as found:
        await unary(broken)
    assert isinstance(found[0], InvalidArgument)
    bidi: Any = running.channel.stream_stream("/hearth.history.v1.HistoryService/AppendStream")
    call = bidi()
    await call.write(broken)
    async with failing() as found:
        await call.read()
        await call.code()
        await call.read()
    assert isinstance(found[0], InvalidArgument)


async def test_a_message_over_the_limit_leaves_the_server_well(running: Running) -> None:
    key = session_pb2.SessionKey(project="p" * 5_000_000)
    async with failing() as found:
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest(sessions=[key]))
    assert found[0].code is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with failing() as found:
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    assert_whole(found[0])


async def test_the_deadline_of_a_call_is_known_to_its_handler(running: Running) -> None:
    async with failing():
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest(), timeout=3)
    async with failing():
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    first, second = running.history.remaining
    assert first is not None
    assert second is not None
    assert 2 < first < 4
    # The channel's own deadline for unary calls; gRPC sends it rounded up.
    assert 9 < second < 11


async def test_a_cancelled_call_ends_its_stream(running: Running) -> None:
    running.history.first = 1_000_000_000
    call = running.stub.StreamEvents(history_service_pb2.StreamEventsRequest())
    await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await running.history.closed.wait()


async def test_who_goes_away_while_it_is_written_to_is_no_defect(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.history.first = 1_000_000_000
    running.history.response.bounds.log_id = "x" * 100_000
    for _ in range(20):
        running.history.closed.clear()
        call = running.stub.StreamEvents(history_service_pb2.StreamEventsRequest())
        await call.read()
        # Until the windows are full, so that a write is under way.
        await asyncio.sleep(0.02)
        call.cancel()
        async with asyncio.timeout(5):
            await running.history.closed.wait()
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.GetHeads(history_service_pb2.GetHeadsRequest())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_closing_a_channel_ends_its_calls(running: Running) -> None:
    waiting = running.stub.GetSnapshot(history_service_pb2.GetSnapshotRequest())
    reading = asyncio.create_task(_read(running.stub.AppendStream()))
    await asyncio.sleep(0.05)
    await running.channel.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await reading == "cancelled"


async def _read(call: Any) -> str:
    try:
        await call.read()
    except asyncio.CancelledError:
        return "cancelled"
    return "ended"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the collector of circles: what is let go goes at once or never."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
async def test_nothing_is_kept_of_a_call_that_is_over(running: Running) -> None:
    history, stub = running.history, running.stub
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.GetHeads(history_service_pb2.GetHeadsRequest(), timeout=30)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.StreamEvents(history_service_pb2.StreamEventsRequest(), timeout=30).read()
    with contextlib.suppress(grpc.aio.AioRpcError):
        requests = iter([history_service_pb2.AppendStreamRequest(number=1)])
        await stub.AppendStream(requests, timeout=30).read()
    history.release.set()
    await stub.GetSnapshot(history_service_pb2.GetSnapshotRequest(), timeout=30)
    assert len(history.served) == 8
    # This one has the frames of its handlers for itself.
    history.error = refusal()
    await eventually(lambda: not any(served() for served in history.served), timeout=5)
