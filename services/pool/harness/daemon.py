"""HTTP calls to the agent daemon of a sandbox: one agent server, the processes and the files beside it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import aiohttp

from services.chassis import http_client
from services.pool.harness.port import DaemonEndpoint, HarnessError, Pulse
from services.pool.harness.sse import MESSAGE_BYTES

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
PULSE_SECONDS = 3.0
# Waits for the answers to a DELETE: the real daemon never answers the first one but acts when its caller hangs up.
DELETE_SECONDS = (0.5, 2.0, 5.0)
# Of an answer that says no more than that, or why not.
_WORD_BYTES = 64 * 1024


class Refused(Exception):
    """The daemon, or a proxy before it, answered with an error. `slug` names it where the daemon says it itself."""

    def __init__(self, status: int, slug: str, detail: str) -> None:
        super().__init__(f"{status} {slug or 'without a reason'}: {detail}")
        self.status = status
        self.slug = slug
        self.detail = detail

    @property
    def fenced(self) -> bool:
        """Whether it does not know our token, or a server that was there."""
        return self.status in (400, 401, 404)

    @property
    def agent_gone(self) -> bool:
        """Whether the agent cannot take a message any more."""
        return self.status == 409 or (self.status == 502 and self.slug == "stream_error")

    def as_error(self) -> HarnessError:
        """What it means for a server that was open."""
        if self.fenced:
            return HarnessError("FENCED", f"the daemon answered {self}", fenced=True)
        if self.agent_gone:
            return HarnessError("AGENT_EXITED", f"the agent takes no messages: {self.detail}")
        return HarnessError("HARNESS_UNREACHABLE", f"the daemon answered {self}")

    def as_error_beside(self) -> HarnessError:
        """What it means for a call that no agent server is part of: processes and files."""
        if self.status == 401:
            return self.as_error()
        reason = "RUN_DEFECT" if self.status < 500 else "DAEMON_UNREACHABLE"
        return HarnessError(reason, f"the daemon answered {self}")


class Unreached(Exception):
    """No answer came. `sent` tells whether the request may have arrived; `refused` that nothing listens there."""

    def __init__(self, why: str, *, sent: bool, refused: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.refused = refused

    def as_error(self) -> HarnessError:
        """What it means."""
        return HarnessError("DAEMON_UNREACHABLE", f"the daemon does not answer: {self}")

    as_error_beside = as_error


def new_http() -> aiohttp.ClientSession:
    """Connections for any number of daemons; close it when done."""
    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(_chunk_sent)
    # Every running prompt holds two connections, so nothing limits their number. Idle ones are let go before a daemon
    # or a proxy would do it: a prompt must not be sent into a connection that is about to close.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    return http_client.new_session(connector=connector, trace_configs=[trace])


async def _chunk_sent(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceRequestChunkSentParams
) -> None:
    sent = context.trace_request_ctx
    if isinstance(sent, asyncio.Event):
        sent.set()


class Daemon:
    """The daemon of one sandbox, as the user of one agent server in it."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: DaemonEndpoint, server_id: str) -> None:
        self._http = http
        self._path = f"/v1/acp/{quote(server_id, safe='')}"
        self.reach(endpoint)

    def reach(self, endpoint: DaemonEndpoint) -> None:
        """Call it there from now on."""
        self._base = endpoint.url.rstrip("/")
        self.headers = {**endpoint.headers, "Authorization": f"Bearer {endpoint.token.reveal()}"}

    @property
    def server_url(self) -> str:
        """Of the agent server."""
        return self._base + self._path

    async def post(
        self,
        message: Mapping[str, Any],
        *,
        timeout: float,
        agent: str = "",
        headers: Mapping[str, str] | None = None,
        sent: asyncio.Event | None = None,
    ) -> dict[str, Any] | None:
        """Give the agent a message; the answer to a request, None for anything else.

        `agent` starts the server when it does not exist. `sent` is set once the message is on its way. Raises `Refused`
        and `Unreached`.
        """
        body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        content = await self._request(
            "POST",
            self.server_url,
            timeout=timeout,
            params={"agent": agent} if agent else {},
            headers={**(headers or {}), "Content-Type": "application/json"},
            data=body,
            sent=sent,
            limit=MESSAGE_BYTES,
        )
        return _object(content) if content else None

    async def delete(self) -> None:
        """End the server and its agent. Never raises; what cannot be reached is left to whoever ends the sandbox."""
        for seconds in DELETE_SECONDS:
            try:
                await self._request("DELETE", self.server_url, timeout=seconds)
            except Refused as refused:
                # 401, 404: the server is not ours, or not there; anything else may pass.
                if refused.fenced:
                    return
            except Unreached as unreached:
                if not unreached.sent:
                    return
            else:
                return
        logger.warning("agent server not deleted", extra={"seconds": sum(DELETE_SECONDS)})

    async def pulse(self) -> Pulse:
        """Ask for its health."""
        try:
            await self._request("GET", f"{self._base}/v1/health", timeout=PULSE_SECONDS)
        except Refused as refused:
            return Pulse.FENCED if refused.status == 401 else Pulse.SILENT
        except Unreached as unreached:
            return Pulse.REFUSED if unreached.refused else Pulse.SILENT
        return Pulse.ALIVE

    async def run(self, command: str, args: list[str], timeout: float) -> tuple[int, str]:
        """Run a program to its end; -1 when a signal or the time ended it. Raises `Refused` and `Unreached`."""
        request = {"command": command, "args": args, "timeoutMs": max(1, round(timeout * 1000))}
        content = await self._request(
            "POST",
            f"{self._base}/v1/processes/run",
            timeout=timeout + CONNECT_SECONDS,
            headers={"Content-Type": "application/json"},
            data=json.dumps(request).encode(),
            limit=MESSAGE_BYTES,
        )
        answer = _object(content)
        code, output = answer.get("exitCode"), answer.get("stdout")
        return code if isinstance(code, int) else -1, output if isinstance(output, str) else ""

    async def write_file(self, path: str, data: bytes, timeout: float) -> None:
        """Write a file, making its directories. Raises `Refused` and `Unreached`."""
        parent = path.rpartition("/")[0]
        if parent:
            await self._request("POST", f"{self._base}/v1/fs/mkdir", timeout=timeout, params={"path": parent})
        await self._request(
            "PUT",
            f"{self._base}/v1/fs/file",
            timeout=timeout,
            params={"path": path},
            headers={"Content-Type": "application/octet-stream"},
            data=data,
        )

    async def _request(
        self,
        method: str,
        url: str,
        *,
        timeout: float,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        sent: asyncio.Event | None = None,
        limit: int = _WORD_BYTES,
    ) -> bytes:
        sent = sent or asyncio.Event()
        try:
            async with self._http.request(
                method,
                url,
                params=params,
                headers={**self.headers, **(headers or {})},
                data=data,
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS)),
                trace_request_ctx=sent,
                allow_redirects=False,
            ) as response:
                content = await http_client.read_body(response, limit)
                if response.status < 300:
                    return content
                raise _refused(response.status, content)
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise Unreached(str(error), sent=False, refused=refused) from None
        except TimeoutError:
            raise Unreached(f"no answer in {timeout:g} s", sent=True) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unreached(f"{type(error).__name__}: {error}", sent=True) from None


def _refused(status: int, content: bytes) -> Refused:
    try:
        problem = _object(content)
    except Unreached:
        problem = {}
    slug = str(problem.get("type", "")).rpartition(":")[2]
    detail = problem.get("detail")
    return Refused(status, slug, str(detail)[:500] if detail else "")


def _object(content: bytes) -> dict[str, Any]:
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Unreached("the answer is no JSON object", sent=True)
    return cast("dict[str, Any]", value)
