"""Known failures of systems like this, each by its code in docs/failures.md: gRPC does them no more, or not to users.

The servers here are made by the chassis, with its options and interceptors; what they serve is as bad as a test needs.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from hearth.channel import OPTIONS
from hearth.channel import open_channel as open_client_channel
from hearth.errors import CallError
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.producer import Producer
from hearth.watch import SILENCE_SECONDS
from services.chassis import server
from services.chassis.calls import open_channel
from services.chassis.clock import SystemClock
from services.chassis.errors import Unavailable
from services.chassis.interceptors import Context
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings
from tests.support import events
from tests.support.cutter import Cutter
from tests.support.waiting import eventually

MEBIBYTE = 1024 * 1024
# How long a ping may go unanswered; gRPC has two words for it.
WAITS = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
READ = history_service_pb2.StreamEventsRequest()


class Failing(history_service_pb2_grpc.HistoryServiceServicer):
    """Reads say something once and then nothing; appends fail behind their first request."""

    def __init__(self) -> None:
        self.appends = 0

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        yield history_service_pb2.StreamEventsResponse()
        await asyncio.Event().wait()

    async def AppendStream(
        self, requests: AsyncIterator[history_service_pb2.AppendStreamRequest], context: Context
    ) -> AsyncIterator[history_service_pb2.AppendStreamResponse]:
        async for _ in requests:
            self.appends += 1
            raise Unavailable("away", reason="DEPENDENCY_UNAVAILABLE")
        yield history_service_pb2.AppendStreamResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Failing, App[ChassisSettings]]]:
    """Such a server in this process."""
    history = Failing()  # type: ignore[abstract]

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(history, app.server)
        yield

    async with started(ChassisSettings(shutdown_grace=4), "test", build) as app:
        yield history, app


def stub(channel: grpc.aio.Channel) -> Any:
    return history_service_pb2_grpc.HistoryServiceStub(channel)


def resident() -> float:
    """Memory of this process, client and server, in MiB."""
    gc.collect()
    return float(psutil.Process(os.getpid()).memory_info().rss) / MEBIBYTE


async def open_and_cancel(channel: grpc.aio.Channel, count: int) -> None:
    """Streams that are cancelled while somebody waits for their next message, 100 at a time."""

    async def one() -> None:
        call = stub(channel).StreamEvents(READ)
        await call.read()
        parked = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([parked])
        assert parked.cancelled()

    for _ in range(count // 100):
        await asyncio.gather(*(one() for _ in range(100)))


async def test_g01_ten_thousand_cancelled_streams_leave_no_memory() -> None:
    async with serving() as (_, app), open_channel(app.address, app.settings) as channel:
        await open_and_cancel(channel, 2_000)
        before = resident()
        await open_and_cancel(channel, 10_000)
        # A kilobyte each; the leak that this is about took several on either side.
        assert resident() - before < 10


async def test_g03_reconnects_through_interceptors_leave_nothing() -> None:
    async with serving() as (_, app):
        port = int(app.address.rpartition(":")[2])

        async def come_and_go(count: int) -> None:
            for _ in range(count):
                async with open_channel(app.address, app.settings) as channel:
                    call = stub(channel).StreamEvents(READ)
                    await call.read()

        def connected() -> int:
            found = psutil.Process().net_connections("tcp")
            return sum(it.status == psutil.CONN_ESTABLISHED and it.laddr.port == port for it in found)

        await come_and_go(100)
        before, tasks = resident(), len(asyncio.all_tasks())
        await come_and_go(500)
        # 20 KB for each; a connection with its buffers is several times that.
        assert resident() - before < 10
        await eventually(lambda: connected() == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_g04_a_stream_that_the_server_fails_leaves_no_task() -> None:
    async with serving() as (history, app):
        channel = open_client_channel(app.address)
        await asyncio.wait_for(channel.channel_ready(), 5)
        before = len(asyncio.all_tasks())
        producer = Producer(history=channel, relay=channel, clock=SystemClock())
        await producer.start()
        waiting = producer.append(events.key(), events.custom())
        await eventually(lambda: history.appends >= 8, timeout=20)
        await producer.close(0.1)
        with pytest.raises(CallError):
            await waiting
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
        await channel.close()


async def idle(address: str, ping_every: int, *, stream: bool) -> None:
    """A connection without calls or with a quiet stream, for 6 s; after that it must serve the next call."""
    async with open_client_channel(address, options=[("grpc.keepalive_time_ms", ping_every)]) as channel:
        call = stub(channel).StreamEvents(READ)
        await call.read()
        if not stream:
            call.cancel()
        parked = asyncio.ensure_future(call.read() if stream else asyncio.sleep(60))
        ended, _ = await asyncio.wait([parked], timeout=6)
        for it in ended:
            it.result()
        parked.cancel()
        await stub(channel).StreamEvents(READ).read()


async def test_g10_an_idle_connection_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often is pinged and how often that is allowed are a 25th of the real times, but where it is meant to fail."""
    scaled = "grpc.http2.min_ping_interval_without_data_ms"
    real = server._options
    every = dict(OPTIONS)["grpc.keepalive_time_ms"] // 25
    async with serving() as (_, strict), asyncio.TaskGroup() as group:
        monkeypatch.setattr(
            server,
            "_options",
            lambda settings: tuple((name, value // 25 if name == scaled else value) for name, value in real(settings)),
        )
        # That a server counts pings at all shows in one that allows less.
        impatient = group.create_task(sent_away(strict.address, every))
        async with serving() as (_, app), Cutter(app.address) as cutter:
            await asyncio.gather(*(idle(cutter.address, every, stream=stream) for stream in (True, False)))
            # Each channel still had the connection that it began with.
            assert cutter.connections == 2
        await impatient


async def sent_away(address: str, ping_every: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too.many.pings"):
        await idle(address, ping_every, stream=True)


async def test_g11_a_half_open_connection_is_replaced() -> None:
    # The same options with smaller numbers: those of a channel would take 40 s.
    options = dict(OPTIONS)
    quick = [(name, options[name] // 20) for name in (*WAITS, "grpc.keepalive_time_ms")]
    async with (
        serving() as (_, app),
        Cutter(app.address) as cutter,
        open_client_channel(cutter.address, options=quick) as channel,
    ):
        call = stub(channel).StreamEvents(READ)
        await call.read()
        cutter.fall_silent()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        # The way is free again for new connections; what the old one lost is lost.
        cutter.silent = False
        again = stub(channel).StreamEvents(READ, wait_for_ready=True)
        assert await asyncio.wait_for(again.read(), 10) == history_service_pb2.StreamEventsResponse()
        assert cutter.connections >= 2
        again.cancel()
    # With the options of every channel a dead connection is gone before a watch asks for its next stream.
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.keepalive_time_ms"] + max(options[name] for name in WAITS) < SILENCE_SECONDS * 1000
