"""The stand-in as an HTTP server, with a log of what models were asked.

| call | answer |
|---|---|
| `POST [/NAME]/v1/chat/completions`, `/v1/responses`, `/v1/messages` | what the script says |
| `POST [/NAME]/v1/messages/count_tokens`, `GET [/NAME]/v1/models` | numbers, names |
| `GET [/NAME]/_log` | the requests with that name, oldest first, as `Asked` |
| `GET [/NAME]/_log/{number}` | the body of one, as it came |
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.models.chat import Chat
from tests.support.models.conversation import Conversation, Json
from tests.support.models.messages import Messages
from tests.support.models.responses import Responses
from tests.support.models.script import Answer, Cut, Piece, Say, answer
from tests.support.models.wire import Wire

WIRES: Sequence[Callable[[], Wire]] = (Chat, Responses, Messages)
MODEL = "standin-1"
# Tokens that a request may have; agents send files and images.
BODY_BYTES = 64 * 1024 * 1024


@dataclasses.dataclass(slots=True)
class Asked:
    """A request in the log. `outcome`: `answering`, `answered`, `failed`, `cut`, or `abandoned` by the agent."""

    number: int
    api: str
    model: str
    users: list[str]
    results: list[str]
    tools: list[str]
    images: int
    bytes: int
    outcome: str = "answering"


class ModelServer:
    """See the module."""

    def __init__(self) -> None:
        self._logs: dict[str, list[tuple[Asked, Json]]] = {}
        self._failed: Counter[tuple[str, str]] = Counter()
        self.app = web.Application(client_max_size=BODY_BYTES)
        for before in ("", "/{name}"):
            routes = [web.post(before + wire.path, self._serve(wire)) for wire in (Chat, Responses, Messages)]
            self.app.add_routes(
                [
                    *routes,
                    web.post(f"{before}/v1/messages/count_tokens", self._count),
                    web.get(f"{before}/v1/models", self._models),
                    web.get(f"{before}/_log", self._log),
                    web.get(before + "/_log/{number:[0-9]+}", self._body),
                ]
            )

    def _serve(self, wire: Callable[[], Wire]) -> Callable[[web.Request], Any]:
        async def serve(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, wire())

        return serve

    async def _answer(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        body = json.loads(await request.read())
        name, asked = request.match_info.get("name", ""), wire.read(body)
        entry = self._note(name, wire, asked, body, request.content_length or 0)
        try:
            found = answer(asked)
        except ValueError as error:
            entry.outcome = "failed"
            return web.json_response(wire.error(400, str(error)), status=400)
        if found.fail is not None and self._fails(name, found):
            entry.outcome = "failed"
            status = found.fail.status
            return web.json_response(wire.error(status, f"as asked: {status}"), status=status)
        try:
            response = await self._write(request, wire, asked, body, found.pieces)
        except (ConnectionError, asyncio.CancelledError):
            entry.outcome = "abandoned"
            raise
        entry.outcome = "cut" if any(isinstance(piece, Cut) for piece in found.pieces) else "answered"
        return response

    def _note(self, name: str, wire: Wire, asked: Conversation, body: Json, size: int) -> Asked:
        log = self._logs.setdefault(name, [])
        tools = [tool.full_name for tool in asked.tools]
        users, results = list(asked.users), list(asked.results)
        entry = Asked(len(log), wire.path, asked.model, users, results, tools, asked.images, size)
        log.append((entry, body))
        return entry

    def _fails(self, name: str, found: Answer) -> bool:
        assert found.fail is not None
        self._failed[name, found.about] += 1
        return found.fail.times is None or self._failed[name, found.about] <= found.fail.times

    async def _write(
        self, request: web.Request, wire: Wire, asked: Conversation, body: Json, pieces: Sequence[Piece]
    ) -> web.StreamResponse:
        if not asked.stream:
            for piece in pieces:
                if isinstance(piece, Say) and piece.after:
                    await asyncio.sleep(piece.after)
                if isinstance(piece, Cut):
                    return _broken(request)
            return web.json_response(wire.whole(body, pieces))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in wire.begin(body):
            await response.write(event)
        for piece in pieces:
            if isinstance(piece, Cut):
                return _broken(request, response)
            if isinstance(piece, Say) and piece.after:
                await asyncio.sleep(piece.after)
            for event in wire.piece(body, piece):
                await response.write(event)
        for event in wire.end(body, pieces):
            await response.write(event)
        await response.write_eof()
        return response

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(await request.read()) // 4})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "tests"}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _log(self, request: web.Request) -> web.Response:
        log = self._logs.get(request.match_info.get("name", ""), [])
        return web.json_response([dataclasses.asdict(entry) for entry, _ in log])

    async def _body(self, request: web.Request) -> web.Response:
        log = self._logs.get(request.match_info.get("name", ""), [])
        number = int(request.match_info["number"])
        if number >= len(log):
            raise web.HTTPNotFound
        return web.json_response(log[number][1])


def _broken(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection without an ending."""
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response()


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[str]:
    """The stand-in on a port of this machine, 0 for a free one → its URL."""
    # The handler of a request whose client went away is cancelled, so that the log tells who hung up.
    runner = web.AppRunner(ModelServer().app, handler_cancellation=True, shutdown_timeout=1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
