"""The life of a server inside of one process: order of the shutdown, what fails in it, and connections that get old."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from hearth.channel import open_channel
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from services.chassis.errors import Unavailable, from_rpc_error
from services.chassis.grpc_server import served
from services.chassis.interceptors import Context
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings, StartupError
from tests.support.http2 import opened

Settings = ChassisSettings


class History(history_service_pb2_grpc.HistoryServiceServicer):
    async def MarkIncomplete(
        self, request: history_service_pb2.MarkIncompleteRequest, context: Context
    ) -> history_service_pb2.MarkIncompleteResponse:
        return history_service_pb2.MarkIncompleteResponse()

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        yield history_service_pb2.StreamEventsResponse()
        await asyncio.Event().wait()


def build_with(
    prepare: Callable[[App[Settings]], None], seen: list[str]
) -> Callable[[App[Settings]], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def build(app: App[Settings]) -> AsyncIterator[None]:
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(
            History(),  # type: ignore[abstract]
            app.server,
        )
        prepare(app)
        try:
            yield
        finally:
            seen.append("closed")

    return build


def hook(
    seen: list[str], name: str, work: Callable[[], Awaitable[object]] | None = None
) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        seen.append(name)
        if work is not None:
            await work()

    return run


async def test_the_order_of_the_end() -> None:
    seen: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("task")

    def prepare(app: App[Settings]) -> None:
        app.tasks.start("forever", forever())
        app.on_drain("flush", hook(seen, "flush"), order=10)
        app.on_drain("admission", hook(seen, "admission"), order=-1)
        app.on_drain("finish", hook(seen, "finish"))

    async with started(Settings(shutdown_grace=20), "test", build_with(prepare, seen)) as app:
        channel = grpc.aio.insecure_channel(app.address)
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        call = stub.StreamEvents(history_service_pb2.StreamEventsRequest())
        await call.read()

        async def look() -> None:
            seen.append("stream ended" if call.done() else "stream is open")

        app.on_drain("late", look, order=99)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    await channel.close()
    assert from_rpc_error(caught.value).reason == "SHUTTING_DOWN"
    assert seen == ["admission", "finish", "flush", "stream is open", "task", "closed"]


async def test_a_step_that_fails_or_hangs_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def fail() -> None:
        raise ValueError("broken step")

    def prepare(app: App[Settings]) -> None:
        app.on_drain("first", hook(seen, "first", fail), order=1)
        app.on_drain("second", hook(seen, "second", asyncio.Event().wait), order=2)
        app.on_drain("third", hook(seen, "third"), order=3)

    async with started(Settings(shutdown_grace=2), "test", build_with(prepare, seen)):
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert seen == ["first", "second", "third", "closed"]
    assert "broken step" in caplog.text
    assert "shutdown time is over" in caplog.text


class Hammer:
    """Calls by several loops at a time; those that failed."""

    LOOPS = 40

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        self._on = True
        self._wanted = 0
        self._enough = asyncio.Event()
        self.failed: list[grpc.aio.AioRpcError] = []

    async def loop(self) -> None:
        while self._on:
            try:
                # A call waits for a connection: how long none of the services listens is not the matter here.
                await self._stub.MarkIncomplete(
                    history_service_pb2.MarkIncompleteRequest(), timeout=30, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as error:
                self.failed.append(error)
                await asyncio.sleep(0.01)
                continue
            self._wanted -= 1
            if self._wanted <= 0:
                self._enough.set()

    async def more(self, calls: int) -> None:
        """Return when so many more were answered."""
        self._wanted = calls
        self._enough.clear()
        await self._enough.wait()

    def stop(self) -> None:
        self._on = False


async def hammered(make: Callable[[str], grpc.aio.Channel]) -> list[grpc.aio.AioRpcError]:
    """What calls fail with while a service ends and another one begins in its place, again and again."""
    async with started(Settings(listen="127.0.0.1:0"), "test", build_with(lambda app: None, [])) as app:
        address = app.address
    async with make(address) as channel, asyncio.TaskGroup() as group:
        hammer = Hammer(channel)
        loops = [group.create_task(hammer.loop()) for _ in range(hammer.LOOPS)]
        for last in (*[False] * 6, True):
            async with started(Settings(listen=address), "test", build_with(lambda app: None, [])):
                await hammer.more(10 * hammer.LOOPS)
                if last:
                    hammer.stop()
                    await asyncio.wait(loops)
    return hammer.failed


async def test_a_call_that_reaches_a_service_while_it_ends_is_no_refusal() -> None:
    # A turn failed with PROVIDER_UNAVAILABLE because its sandbox was asked for while that service was replaced.
    failed = await hammered(grpc.aio.insecure_channel)
    assert failed
    assert {type(from_rpc_error(error)) for error in failed} == {Unavailable}


async def test_a_call_that_reaches_a_service_while_it_ends_is_made_again() -> None:
    assert await hammered(open_channel) == []


async def test_a_taken_port_and_a_start_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def refuse(app: App[Settings]) -> None:
        raise StartupError("the moon is full", exit_code=1)

    with pytest.raises(StartupError, match="moon"):
        async with started(Settings(), "test", build_with(refuse, seen)):
            pass
    async with started(Settings(), "test", build_with(lambda app: None, seen)) as app:
        with pytest.raises(StartupError, match=f"cannot listen on {app.address}: address already in use") as caught:
            async with started(Settings(listen=app.address), "other", build_with(lambda app: None, seen)):
                pass
        assert caught.value.exit_code == 2


async def test_a_host_that_is_not_here(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text("{}")
    settings = Settings(listen="nowhere.invalid:1", auth_file=file)
    with pytest.raises(StartupError, match=r"cannot listen on nowhere\.invalid:1"):
        async with started(settings, "test", build_with(lambda app: None, [])):
            pass


async def answered(address: str, method: bytes) -> bytes:
    """What comes back up to the status of a call."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(opened(method))
        return await asyncio.wait_for(reader.readuntil(b"grpc-status"), 10)
    finally:
        writer.transport.abort()


async def test_a_name_of_a_method_that_is_no_text_ends_nothing() -> None:
    async with (
        started(Settings(), "sample", build_with(lambda _: None, [])) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        before, after = (stub.StreamEvents(history_service_pb2.StreamEventsRequest()) for _ in range(2))
        await before.read()
        for _ in range(3):
            assert await answered(app.address, b"/\xff/\xff")
        unknown: Any = channel.unary_unary("/hearth.history.v1.HistoryService/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unknown(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        # The stream that was open is open, and the port takes another.
        assert not before.done()
        await after.read()
        before.cancel()
        after.cancel()


async def test_a_server_that_ends_by_itself_is_told_of() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watching = asyncio.create_task(served(server))
    try:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answered(f"127.0.0.1:{port}", b"/\xff")
        with pytest.raises(UnicodeDecodeError):
            await asyncio.wait_for(watching, 10)
    finally:
        watching.cancel()
        await server.stop(None)


async def test_connections_get_old() -> None:
    settings = Settings(shutdown_grace=2, connection_age=0.3, connection_age_grace=0.3)
    async with (
        started(settings, "test", build_with(lambda app: None, [])) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        for _ in range(2):
            call = stub.StreamEvents(history_service_pb2.StreamEventsRequest())
            await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(5):
                    await call.read()
            # A reader meets this each time; it resumes.
            assert isinstance(from_rpc_error(caught.value), Unavailable)
