"""Messages to a daemon that get lost on the way, or whose answers do, while a session is opened.

Between the pool and a daemon at a provider is a proxy, which answers 429 and 502 and cuts connections when it likes. To
open a session is cheap to repeat; so nothing of this may cost the turn, nor the whole time that an agent has to open.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from hearth.secret import Secret
from services.chassis.clock import SystemClock
from services.pool.harness.acp import AcpClient, AcpLimits, AcpSession
from services.pool.harness.port import DaemonEndpoint, HarnessError, OpenRequest, TextChunk
from services.pool.harness.rpc import RpcLimits
from tests.integration.test_harness_client import EXECUTION, say
from tests.support.harness import SCRIPTED_AGENT, agentd

OPEN_SECONDS = 60.0


class Loss(enum.Enum):
    """What the proxy does to a message."""

    REFUSED = "answered 429, not passed on"
    CUT = "cut, not passed on"
    ANSWER_REFUSED = "passed on, answered 502"
    ANSWER_CUT = "passed on, then cut"


class Proxy:
    """Passes HTTP on to a daemon; `losses` says what becomes of the next messages that call a method."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.losses: dict[str, list[Loss]] = {}
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        body = await request.read()
        method = str(json.loads(body).get("method")) if request.method == "POST" else ""
        loss = next(iter(self.losses.get(method, [])), None)
        if loss is not None:
            self.losses[method].pop(0)
        if loss is Loss.REFUSED:
            return web.json_response({"statusCode": 429, "message": "Too Many Requests"}, status=429)
        if loss is Loss.CUT:
            return _cut(request)
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Content-Length")}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.request(request.method, self._target + request.path_qs, headers=headers, data=body) as answer,
        ):
            if loss is Loss.ANSWER_REFUSED:
                await answer.read()
                return web.json_response({"statusCode": 502, "message": "Bad Gateway"}, status=502)
            if loss is Loss.ANSWER_CUT:
                await answer.read()
                return _cut(request)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response


def _cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class House:
    """A daemon behind the proxy, and a client of it."""

    def __init__(self, proxy: Proxy, client: AcpClient, token: str, workspace: Path) -> None:
        self.proxy = proxy
        self._client = client
        self._endpoint = DaemonEndpoint(proxy.url, Secret(token))
        self._workspace = str(workspace)

    async def open(self, server_id: str = "s1", load: str | None = None) -> AcpSession:
        request = OpenRequest(
            server_id=server_id,
            agent="codex",
            workspace=self._workspace,
            load_session_id=load,
            timeout=OPEN_SECONDS,
        )
        return await self._client.open(self._endpoint, request)


@asynccontextmanager
async def behind_a_proxy(home: Path) -> AsyncIterator[House]:
    (home / "work").mkdir(parents=True)
    client = AcpClient(clock=SystemClock(), limits=AcpLimits(rpc=RpcLimits(lag=0.2, lost=2.0)))
    async with agentd({"codex": SCRIPTED_AGENT}, home) as daemon:
        proxy = Proxy(daemon.url)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", proxy.serve)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield House(proxy, client, daemon.token, home / "work")
        finally:
            await client.close()
            await runner.cleanup()


async def answer(session: AcpSession, text: str) -> str:
    """What the agent says to it."""
    run = await session.prompt(say(text), execution_id=EXECUTION, trace_context={})
    updates = [update async for update in run.updates()]
    await run.result()
    return "".join(update.text for update in updates if isinstance(update, TextChunk))


@pytest.mark.parametrize("method", ["initialize", "session/new"])
@pytest.mark.parametrize("loss", Loss)
async def test_what_opens_a_session_is_asked_again(loss: Loss, method: str, tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path / "home") as house:
        house.proxy.losses[method] = [loss, Loss.REFUSED]
        began = time.monotonic()
        session = await house.open()
        assert time.monotonic() - began < OPEN_SECONDS / 2
        assert await answer(session, "hello") == "You said: hello"
        assert await answer(session, "stream 3 words") != ""
        await session.close()


async def test_a_load_that_got_lost_is_given_up_while_there_is_time_for_a_new_session(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path / "home") as house:
        first = await house.open()
        await answer(first, "remember my name is Ada")
        await first.close()
        house.proxy.losses["session/load"] = [Loss.CUT]
        began = time.monotonic()
        with pytest.raises(HarnessError) as error:
            await house.open("s2", load=first.session_id)
        assert error.value.reason == "HARNESS_UNREACHABLE"
        assert time.monotonic() - began < OPEN_SECONDS / 2
        loaded = await house.open("s3", load=first.session_id)
        assert loaded.loaded
        assert "Ada" in await answer(loaded, "what is my name?")
        await loaded.close()


async def test_a_load_whose_answer_got_lost_counts_by_the_stream(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path / "home") as house:
        first = await house.open()
        await answer(first, "remember my name is Ada")
        await first.close()
        house.proxy.losses["session/load"] = [Loss.ANSWER_CUT]
        loaded = await house.open("s2", load=first.session_id)
        assert loaded.loaded
        assert "Ada" in await answer(loaded, "what is my name?")
        await loaded.close()


async def test_a_proxy_that_never_passes_anything_on_is_told_as_such(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path / "home") as house:
        house.proxy.losses["initialize"] = [Loss.REFUSED] * 20
        with pytest.raises(HarnessError) as error:
            await house.open()
        assert error.value.reason == "DAEMON_UNREACHABLE"
