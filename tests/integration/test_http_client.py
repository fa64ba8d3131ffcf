"""Calls to a port of a sandbox when something else than the daemon answers there: nothing without end is read."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from hearth.secret import Secret
from services.chassis import http_client
from services.chassis.clock import SystemClock
from services.chassis.http_client import BodyTooLarge, read_body
from services.pool.harness.daemon import Daemon, Unreached, new_http
from services.pool.harness.port import DaemonEndpoint, HarnessError, Pulse
from services.pool.harness.sse import MESSAGE_BYTES, EventStream
from services.sandbox.daemons import Daemons
from services.sandbox.daemons import Pulse as Probed
from services.sandbox.providers.daytona_daemon import DaemonStarter
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.port import Address

CHUNK = b"x" * 1024 * 1024
# Of what is on its way between two processes: buffers of sockets and of aiohttp.
UNDER_WAY = 16 * 1024 * 1024


class Impostor:
    """Answers each call with as much as is taken, at most 64 MiB; `sent` and `closed` tell how far it came."""

    def __init__(self, chunk: bytes = CHUNK, *, times: int = 64, status: int = 200, **headers: str) -> None:
        self._chunk = chunk
        self._times = times
        self._status = status
        self._headers = headers
        self.sent = 0
        self.closed = asyncio.Event()
        self.asked: list[dict[str, str]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.headers))
        await request.read()
        headers = {name.replace("_", "-"): value for name, value in self._headers.items()}
        response = web.StreamResponse(status=self._status, headers=headers)
        try:
            await response.prepare(request)
            for _ in range(self._times):
                await response.write(self._chunk)
                self.sent += len(self._chunk)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.closed.set()
            raise
        return response


@asynccontextmanager
async def listening(impostor: Impostor) -> AsyncIterator[Impostor]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", impostor.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    impostor.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield impostor
    finally:
        await runner.cleanup()


async def closed(impostor: Impostor) -> None:
    async with asyncio.timeout(10):
        await impostor.closed.wait()


def endpoint(impostor: Impostor) -> DaemonEndpoint:
    return DaemonEndpoint(impostor.url, Secret("t"))


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_to_a_message_is_none(status: int) -> None:
    async with listening(Impostor(status=status)) as impostor, new_http() as http:
        with pytest.raises(Unreached) as unreached:
            await Daemon(http, endpoint(impostor), "s").post({"id": 1}, timeout=30)
        assert unreached.value.sent, "it may have been taken: the stream tells"
        await closed(impostor)
    error = unreached.value.as_error()
    assert (type(error), error.reason) == (HarnessError, "DAEMON_UNREACHABLE")
    assert str(MESSAGE_BYTES) in str(error)
    assert impostor.sent <= MESSAGE_BYTES + UNDER_WAY


async def test_what_only_says_yes_is_read_no_further_than_a_word() -> None:
    async with listening(Impostor()) as impostor, new_http() as http:
        daemon = Daemon(http, endpoint(impostor), "s")
        assert await daemon.pulse() is Pulse.SILENT
        await closed(impostor)
        assert impostor.sent <= UNDER_WAY
        with pytest.raises(Unreached):
            await daemon.write_file("/a/b", b"x", 30)


async def test_what_is_packed_stays_so() -> None:
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    async with listening(Impostor(bomb, times=1, Content_Encoding="gzip")) as impostor, new_http() as http:
        with pytest.raises(Unreached, match="no JSON"):
            await Daemon(http, endpoint(impostor), "s").post({"id": 1}, timeout=30)
        async with http.get(impostor.url) as response:
            assert await read_body(response, len(bomb)) == bomb
    assert {asked["Accept-Encoding"] for asked in impostor.asked} == {"identity"}


async def test_a_message_of_the_stream_that_never_ends_is_none_of_the_protocol() -> None:
    line = b"data: " + b"x" * 1024 * 1024 + b"\n"
    async with listening(Impostor(line, Content_Type="text/event-stream")) as impostor, new_http() as http:
        stream = EventStream(http, impostor.url, {}, clock=SystemClock())
        with pytest.raises(HarnessError) as error:
            async with asyncio.timeout(30):
                await stream.read()
        await closed(impostor)
    assert error.value.reason == "AGENT_PROTOCOL"
    assert impostor.sent <= MESSAGE_BYTES + UNDER_WAY


async def test_no_cookie_of_a_sandbox_is_kept() -> None:
    cookie = "a=b; Domain=localhost"
    async with listening(Impostor(b"{}", times=1, Set_Cookie=cookie)) as impostor, new_http() as http:
        daemon = Daemon(http, DaemonEndpoint(impostor.url.replace("127.0.0.1", "localhost"), Secret("t")), "s")
        for _ in range(2):
            await daemon.post({"id": 1}, timeout=30)
    assert all("Cookie" not in asked for asked in impostor.asked)


async def test_a_probe_that_is_answered_without_end_is_silence() -> None:
    async with listening(Impostor()) as impostor, http_client.new_session() as http:
        probing = Daemons(http, SystemClock(), timeout=30)
        assert await probing.probe(impostor.url, Secret("t"), {}) is Probed.SILENT
        await closed(impostor)
    assert impostor.sent <= UNDER_WAY


async def test_a_daemon_in_daytona_that_answers_without_end_is_not_up() -> None:
    async with listening(Impostor()) as impostor:
        starter = DaemonStarter(
            cast("Any", SimpleNamespace()), DaytonaOptions("http://nowhere", Secret("key")), SystemClock()
        )
        try:
            assert not await starter._healthy(Address(impostor.url, {}), Secret("t"))
            await closed(impostor)
        finally:
            await starter.close()
    assert impostor.sent <= UNDER_WAY


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_probe_goes_nowhere_else_than_it_was_sent(status: int) -> None:
    starter = DaemonStarter(
        cast("Any", SimpleNamespace()), DaytonaOptions("http://nowhere", Secret("key")), SystemClock()
    )
    async with listening(Impostor(b"{}", times=1)) as inner, http_client.new_session() as http:
        async with listening(Impostor(b"", times=1, status=status, Location=f"{inner.url}/v1/health")) as impostor:
            headers = {"X-Daytona-Preview-Token": "preview"}
            try:
                probed = await Daemons(http, SystemClock(), timeout=30).probe(impostor.url, Secret("t"), headers)
                assert probed is Probed.SILENT
                assert not await starter._healthy(Address(impostor.url, headers), Secret("t"))
            finally:
                await starter.close()
        assert len(impostor.asked) == 2
        assert inner.asked == []


async def test_a_body_of_just_the_limit_is_read() -> None:
    async with listening(Impostor(b"x" * 1000, times=1)) as impostor, http_client.new_session() as http:
        async with http.get(impostor.url) as response:
            assert await read_body(response, 1000) == b"x" * 1000
        async with http.get(impostor.url) as response:
            with pytest.raises(BodyTooLarge, match="999 bytes"):
                await read_body(response, 999)
