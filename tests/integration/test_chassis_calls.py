"""Outgoing calls: retried only when that is safe, never longer than the call they serve, over TLS, and in storms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from hearth.channel import OPTIONS
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.secret import Secret
from services.chassis import server
from services.chassis.calls import open_channel
from services.chassis.errors import (
    Aborted,
    DeadlineExceeded,
    HearthError,
    Internal,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from services.chassis.interceptors import Context
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings
from tests.support.certificates import Certificates

HEADS = history_service_pb2.GetHeadsRequest()


class History(history_service_pb2_grpc.HistoryServiceServicer):
    """Fails `failures` times with `error`, then answers; asks `following` first, if there is one."""

    def __init__(self) -> None:
        self.calls = 0
        self.failures = 0
        self.error: HearthError = Unavailable("x", reason="DEPENDENCY_UNAVAILABLE")
        self.following: Any = None
        self.background: list[Any] = []
        self.metadata: dict[str, str | bytes] = {}
        self.left: list[float | None] = []

    async def GetHeads(
        self, request: history_service_pb2.GetHeadsRequest, context: Context
    ) -> history_service_pb2.GetHeadsResponse:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata() or ())
        self.left.append(context.time_remaining())
        if self.calls <= self.failures:
            raise self.error
        if self.following is not None:
            self.background.append(asyncio.create_task(_heads(self.following)))
            await self.following.GetHeads(request, timeout=30)
        return history_service_pb2.GetHeadsResponse(heads=[history_pb2.Head()])

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        yield history_service_pb2.StreamEventsResponse()
        await asyncio.Event().wait()


async def _heads(following: Any) -> None:
    await following.GetHeads(HEADS, timeout=30)


async def _wait(call: Any) -> Any:
    return await call


Serve = Callable[..., AbstractAsyncContextManager[tuple[History, App[ChassisSettings]]]]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[History, App[ChassisSettings]]]:
    history = History()  # type: ignore[abstract]

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(history, app.server)
        yield

    async with started(ChassisSettings(shutdown_grace=4, **settings), "test", build) as app:
        yield history, app


def stub(channel: grpc.aio.Channel) -> Any:
    return history_service_pb2_grpc.HistoryServiceStub(channel)


async def refusal(call: Any) -> HearthError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_unavailable_is_tried_again() -> None:
    async with serving() as (history, app), open_channel(app.address, app.settings) as channel:
        history.failures = 2
        await stub(channel).GetHeads(HEADS)
        assert history.calls == 3
        history.calls, history.failures = 0, 99
        assert isinstance(await refusal(stub(channel).GetHeads(HEADS)), Unavailable)
        assert history.calls == 4


@pytest.mark.parametrize("kind", [Internal, Aborted, ResourceExhausted])
async def test_nothing_else_is(kind: type[HearthError]) -> None:
    async with serving() as (history, app), open_channel(app.address, app.settings) as channel:
        history.failures, history.error = 1, kind("x", reason="CONFLICT")
        assert isinstance(await refusal(stub(channel).GetHeads(HEADS)), kind)
        assert history.calls == 1


async def test_a_server_that_comes_back_is_found_soon() -> None:
    async with serving() as (_, app):
        address = app.address
    async with open_channel(address, ChassisSettings()) as channel:
        assert isinstance(await refusal(stub(channel).GetHeads(HEADS)), Unavailable)
        async with serving(listen=address):
            began = time.monotonic()
            await stub(channel).GetHeads(HEADS, wait_for_ready=True)
            assert time.monotonic() - began < 4


async def test_the_token_goes_along() -> None:
    async with (
        serving() as (history, app),
        open_channel(app.address, ChassisSettings(token=Secret("geheim"))) as channel,
    ):
        await stub(channel).GetHeads(HEADS, metadata=[("x-more", "1")])
        assert history.metadata["authorization"] == "Bearer geheim"
        assert history.metadata["x-more"] == "1"


async def test_a_call_has_a_deadline_and_a_stream_has_none() -> None:
    settings = ChassisSettings(call_timeout=1.0)
    async with serving() as (history, app), open_channel(app.address, settings) as channel:
        await stub(channel).GetHeads(HEADS)
        await stub(channel).GetHeads(HEADS, timeout=7)
        first, second = history.left
        assert first is not None
        assert second is not None
        assert first < 2 < 6 < second < 8
        call = stub(channel).StreamEvents(history_service_pb2.StreamEventsRequest())
        await call.read()
        assert call.time_remaining() is None


async def test_what_a_call_asks_for_ends_with_it_but_not_what_it_sets_off() -> None:
    async with (
        serving() as (last, last_app),
        serving() as (first, first_app),
        open_channel(last_app.address, last_app.settings) as between,
        open_channel(first_app.address, first_app.settings) as channel,
    ):
        first.following = stub(between)
        await stub(channel).GetHeads(HEADS, timeout=3)
        await asyncio.gather(*first.background)
        bounded, free = sorted(left for left in last.left if left is not None)
        assert bounded < 4
        assert free > 25


async def test_a_deadline_that_is_over() -> None:
    async with serving() as (history, app), open_channel(app.address, app.settings) as channel:
        history.following = _Never()
        assert isinstance(await refusal(stub(channel).GetHeads(HEADS, timeout=0.2)), DeadlineExceeded)
        history.following = None
        await stub(channel).GetHeads(HEADS)


class _Never:
    async def GetHeads(self, request: object, timeout: float) -> None:
        await asyncio.Event().wait()


async def test_a_closed_channel_leaves_no_connection() -> None:
    async with serving() as (_, app):
        port = int(app.address.rpartition(":")[2])
        for _ in range(5):
            await open_read_close(app.address)
        for _ in range(250):
            if not established(port):
                break
            await asyncio.sleep(0.02)
        assert established(port) == 0


async def open_read_close(address: str) -> None:
    """Closes the channel while somebody waits for the next message."""
    channel = open_channel(address, ChassisSettings())
    call = stub(channel).StreamEvents(history_service_pb2.StreamEventsRequest())
    await call.read()
    parked = asyncio.create_task(_wait(call.read()))
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await parked


def established(port: int) -> int:
    return sum(
        1
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and port in (connection.laddr.port, connection.raddr.port)
    )


async def test_a_storm_of_readers_is_taken() -> None:
    async with serving() as (_, app), open_channel(app.address, app.settings) as channel:
        request = history_service_pb2.StreamEventsRequest()
        reading = [stub(channel).StreamEvents(request) for _ in range(3_000)]
        answers = await asyncio.gather(*(call.read() for call in reading))
        assert all(isinstance(answer, history_service_pb2.StreamEventsResponse) for answer in answers)
        for call in reading:
            call.cancel()


def test_clients_ping_no_more_often_than_servers_allow() -> None:
    # Else an idle channel gets GOAWAY too_many_pings after a minute or two.
    allowed = dict(server._options(ChassisSettings()))["grpc.http2.min_ping_interval_without_data_ms"]
    sent = dict(OPTIONS)["grpc.keepalive_time_ms"]
    assert sent > allowed


async def test_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    files = certificates.issue("server")
    async with serving(tls_certificate_file=files.certificate, tls_key_file=files.key, listen="localhost:0") as (
        _,
        app,
    ):
        async with open_channel(app.address, ChassisSettings(tls_ca_file=certificates.ca)) as channel:
            await stub(channel).GetHeads(HEADS)
        async with open_channel(app.address, ChassisSettings()) as channel:
            assert isinstance(await refusal(stub(channel).GetHeads(HEADS, timeout=2)), Unavailable | DeadlineExceeded)
