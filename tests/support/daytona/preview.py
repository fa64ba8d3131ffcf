"""The preview proxy: HTTP, also streaming, to a port in a sandbox for whoever has its token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.daytona.api import Signed
from tests.support.daytona.delays import Chance, Delays
from tests.support.daytona.faults import Fault, Kind
from tests.support.daytona.fleet import Fleet
from tests.support.daytona.journal import Journal
from tests.support.daytona.problems import PROXY, Problem, not_running
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import FAULT, Gate, cut, refusal

TOKEN_HEADER = "X-Daytona-Preview-Token"
_TOKEN_QUERY = "DAYTONA_SANDBOX_AUTH_KEY"
# Of one connection, not of the message (RFC 9110 7.6.1); the length is made anew.
_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection", "host"}
    | {"content-length", "x-daytona-preview-token"}
)
_UPSTREAM = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_HARNESS = "/v1/acp"


class Preview:
    """The proxy. Every request that it passes on is in the journal as "harness"."""

    def __init__(self, fleet: Fleet, signed: Signed, journal: Journal, delays: Delays) -> None:
        self._fleet = fleet
        self._signed = signed
        self._journal = journal
        self._delays = delays
        self._chance = Chance(delays.seed)
        self._session = aiohttp.ClientSession(
            timeout=_UPSTREAM, auto_decompress=False, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, from the root of the server."""
        handler = gate.guard("preview", self._pass_on, source=PROXY, keyed=False, streams=True)
        return [
            web.route("*", "/preview/{port:\\d+}-{sandbox}", handler),
            web.route("*", "/preview/{port:\\d+}-{sandbox}/{path:.*}", handler),
        ]

    async def close(self) -> None:
        """Let go of all connections."""
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        found = self._allowed(request)
        if found.state != "started" or found.base is None:
            raise not_running()
        path = _path(request)
        body, call = await _body(request, path)
        await asyncio.sleep(self._chance.seconds(self._delays.harness.get(call, (0.0, 0.0))))
        entry = self._journal.write(
            "harness",
            sandbox=found.id,
            session=found.session,
            method=request.method,
            path=path,
            call=call,
            began=time.monotonic(),
            harness=path.startswith(_HARNESS),
            accepted=False,
            status=0,
            ended=None,
        )
        # What becomes known later is added to the entry.
        data: dict[str, Any] = entry.data  # type: ignore[assignment]
        try:
            return await self._exchange(request, found, path, body, data)
        finally:
            data["ended"] = time.monotonic()

    async def _exchange(
        self, request: web.Request, found: Sandbox, path: str, body: bytes | None, data: dict[str, Any]
    ) -> web.StreamResponse:
        url = URL.build(
            scheme="http",
            host=found.address,
            port=int(request.match_info["port"]),
            path=path,
            query_string=request.rel_url.raw_query_string,
            encoded=True,
        )
        try:
            async with self._session.request(
                request.method,
                url.without_query_params(_TOKEN_QUERY),
                headers=_passed(request.headers),
                data=body if body is not None else (request.content if request.can_read_body else None),
                allow_redirects=False,
            ) as answer:
                data["status"] = answer.status
                # A daemon that does not know the token takes no traffic, it refuses it.
                data["accepted"] = answer.status not in (401, 403)
                return await self._answer(request, answer)
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            raise Problem(502, f"Bad Gateway: {type(error).__name__}", source=PROXY) from error

    async def _answer(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        fault: Fault | None = request.get(FAULT)
        if fault is not None and fault.kind is Kind.LOSE_REPLY:
            return cut(request)
        if fault is not None and fault.kind is Kind.FAIL_AFTER:
            raise refusal(fault, PROXY)
        response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        except aiohttp.ClientError:
            # The sandbox went away in the middle of its answer: so does this answer.
            cut(request)
        return response

    def _allowed(self, request: web.Request) -> Sandbox:
        port, key = int(request.match_info["port"]), request.match_info["sandbox"]
        signed_for = self._signed.find(key, port)
        if signed_for is not None:
            return self._fleet.find(signed_for)
        found = self._fleet.find(key)
        token = request.headers.get(TOKEN_HEADER) or request.query.get(_TOKEN_QUERY) or ""
        known = found.id == key and found.preview_token
        if not found.public and not (known and hmac.compare_digest(token.encode(), found.preview_token.encode())):
            raise Problem(401, "unauthorized: authentication failed", source=PROXY)
        return found


def _path(request: web.Request) -> str:
    """The path as the sandbox shall see it, still encoded."""
    prefix = f"/preview/{request.match_info['port']}-{request.match_info['sandbox']}"
    return request.rel_url.raw_path.removeprefix(prefix) or "/"


def _passed(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP]


async def _body(request: web.Request, path: str) -> tuple[bytes | None, str]:
    """The body and the ACP method it calls; of other requests neither, they are streamed."""
    if request.method != "POST" or not path.startswith(_HARNESS):
        return None, ""
    body = await request.read()
    try:
        message = json.loads(body)
    except ValueError:
        return body, ""
    method = message.get("method") if isinstance(message, dict) else None
    return body, method if isinstance(method, str) else ""
