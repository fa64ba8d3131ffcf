"""A daemon may tell of an agent's end before the last lines of that agent: they are heard all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from hearth.secret import Secret
from services.chassis.clock import SystemClock
from services.pool.harness.daemon import Daemon, new_http
from services.pool.harness.port import DaemonEndpoint, HarnessError
from services.pool.harness.rpc import RpcConnection, RpcLimits

EXITED: dict[str, object] = {"method": "_adapter/agent_exited", "params": {"code": 3}}
LINES: list[dict[str, object]] = [{"method": "session/update", "params": number} for number in range(3)]


class Heard:
    """What came, and of what the agent died."""

    def __init__(self) -> None:
        self.lines: list[object] = []
        self.died: asyncio.Future[HarnessError] = asyncio.get_running_loop().create_future()

    async def notified(self, _method: str, params: object, _size: int) -> None:
        assert not self.died.done()
        self.lines.append(params)

    async def requested(self, number: object, method: str, params: object, size: int) -> None:
        raise AssertionError(f"the agent asks for {method}")

    def gone(self, error: HarnessError) -> None:
        self.died.set_result(error)


@asynccontextmanager
async def connected(messages: Sequence[dict[str, object]], *, end: bool) -> AsyncIterator[tuple[RpcConnection, Heard]]:
    """A connection to a stand-in of a daemon whose stream brings these messages, and then ends or says no more."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, message in enumerate(messages, 1):
            await response.write(f"id: {number}\ndata: {json.dumps({'jsonrpc': '2.0', **message})}\n\n".encode())
        if not end:
            await asyncio.Event().wait()
        return response

    app = web.Application()
    app.router.add_get("/v1/acp/s1", stream)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http: aiohttp.ClientSession = new_http()
    heard = Heard()
    daemon = Daemon(http, DaemonEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", Secret("token")), "s1")
    connection = RpcConnection(http, daemon, heard, clock=SystemClock(), limits=RpcLimits())
    try:
        yield connection, heard
    finally:
        await connection.stop()
        connection.die(HarnessError("AGENT_EXITED", "the test is over"))
        await http.close()
        await runner.cleanup()


async def test_lines_that_come_after_the_news_of_the_end_are_heard() -> None:
    async with connected([LINES[0], EXITED, *LINES[1:]], end=False) as (connection, heard):
        connection.start()
        async with asyncio.timeout(20):
            error = await heard.died
    assert heard.lines == [0, 1, 2]
    assert (error.reason, str(error)) == ("AGENT_EXITED", "the agent ended with code 3")


async def test_a_stream_that_ends_with_the_agent_is_not_what_it_died_of() -> None:
    async with connected([EXITED, *LINES], end=True) as (connection, heard):
        connection.start()
        async with asyncio.timeout(20):
            error = await heard.died
    assert heard.lines == [0, 1, 2]
    assert error.reason == "AGENT_EXITED"
