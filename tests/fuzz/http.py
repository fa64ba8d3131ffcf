"""Hostile HTTP: for the page of metrics, and for the daemon in front of agents, with its token and without."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDS = 5.0
_HEAD_BYTES = 4 * 1024
_DEFECT = 500
# An agent that does not start is told with that status too, as the real daemon does.
_NO_AGENT = b"agent_start_failed"

_LONG = "a" * 20_000
_NESTED = "[" * 100_000
_METHODS = (
    "GET",
    "GET",
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "G T",
    "A" * 9_000,
)
_HEADERS = (
    "",
    "Host: x\r\n",
    "Accept: application/openmetrics-text; version=abc\r\n",
    "Accept: application/openmetrics-text;version=1..;escaping=,,;=;\r\n",
    "Accept: text/plain;version=1.0.0;escaping=\xff\r\n",
    "Accept: " + "text/plain;q=2," * 500 + "\r\n",
    "Accept-Encoding: gzip, \x7f\r\n",
    "Content-Length: -1\r\n",
    "Content-Length: 99999999999999999999\r\n",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding: chunked, gzip\r\n",
    "Expect: 100-continue\r\n",
    "Expect: the unexpected\r\n",
    "Range: bytes=-1,5-2\r\n",
    "Cookie: a=b; =; \x01\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "Last-Event-ID: -1\r\nAccept: text/event-stream\r\n",
    "Last-Event-ID: 99999999999999999999999\r\n",
    "no colon\r\n",
    ": x\r\n",
    "X: a\r\n b\r\n",
    "X: " + "a" * 100_000 + "\r\n",
    "X: a\r\n" * 5_000,
)
_METRICS_TARGETS = (
    "/metrics",
    "/metrics",
    "/metrics?" + _LONG,
    "/",
    "//",
    "*",
    "/%00",
    "/%ff",
    "/metrics/../x",
    "http://[",
    "é",
)
_DAEMON_TARGETS = (
    *("/v1/health", "/v1/agents", "/v1/acp", "/v1/acp/a?agent=scripted", "/v1/acp/a?agent=none", "/v1/acp/b"),
    *("/v1/acp/%00?agent=scripted", "/v1/acp/%ff", "/v1/acp/" + _LONG, "/v1/acp/a%2fb?agent=scripted", "/v1/none", "/"),
    *("/v1/processes/run", "/v1/processes/run?x"),
    *(
        f"/v1/fs/{what}?path={path}"
        for what in ("file", "entry", "mkdir", "entries", "stat")
        for path in ("", "a", "a/b", "a%00", "%ff", "%ed%a0%80", "a" * 5_000, "a/" * 3_000, "%F0%9F%98%80")
    ),
)
_BODIES: tuple[bytes, ...] = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        "",
        "{",
        "[]",
        "null",
        _NESTED,
        '{"command":' + _NESTED + "}",
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        "1" * 10_000,
        '{"id":' + "1" * 10_000 + ',"jsonrpc":"2.0","method":"x"}',
        '{"jsonrpc":"2.0","id":NaN,"method":"x"}',
        '{"jsonrpc":"2.0","id":true,"method":"x"}',
        '{"jsonrpc":"2.0","id":"\\ud800","result":{}}',
        '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":-1}}',
        '{"jsonrpc":"2.0","id":2,"method":"session/prompt","params":null}',
        '{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":"\\u0000"}}',
        '{"jsonrpc":"2.0","id":3,"method":"session/load","params":{"sessionId":"../../a","cwd":"/","mcpServers":1}}',
        '{"jsonrpc":"2.0",\n"method":5}',
        '{"command":"true"}',
        '{"command":"true","args":["\\u0000"]}',
        '{"command":"true","args":["\\ud800"]}',
        '{"command":"\\ud800"}',
        '{"command":"true","cwd":"\\ud800"}',
        '{"command":"true","cwd":"/none"}',
        '{"command":"true","env":{"a=b":"c","":"d"}}',
        '{"command":"true","env":{"\\ud800":"\\u0000"}}',
        '{"command":"true","timeoutMs":1e99}',
        '{"command":"true","timeoutMs":-1,"maxOutputBytes":true}',
        '{"command":"' + _LONG + '"}',
        "\ud800",
    )
)


@dataclass(frozen=True, slots=True)
class Target:
    """An HTTP server to be tried: host:port, the paths that it knows and some more, its token if it has one."""

    name: str
    address: str
    paths: Sequence[str]
    token: str = ""


def metrics_page(name: str, address: str) -> Target:
    """The page of metrics of a service."""
    return Target(f"metrics of {name}", address, _METRICS_TARGETS)


def daemon(address: str, token: str) -> Target:
    """The daemon in front of agents."""
    return Target("agentd", address, _DAEMON_TARGETS, token)


async def ask(target: Target, chance: random.Random) -> str | None:
    """Make some request; what is wrong with its answer. Raises `OSError` when nobody listens there any more."""
    request = _request(target, chance)
    host, _, port = target.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b""
    # A server may close on such a request, or wait for its rest.
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_SECONDS if chance.random() < 0.5 else 0.05):
            writer.write(request)
            await writer.drain()
            head = await reader.read(_HEAD_BYTES)
    writer.transport.abort()
    status = head.split(b" ", 2)[1:2]
    if status and status[0].isdigit() and int(status[0]) == _DEFECT and _NO_AGENT not in head:
        return f"{target.name} answered {head[:300]!r} to {request[:1_000]!r}"
    return None


def _request(target: Target, chance: random.Random) -> bytes:
    method, path = chance.choice(_METHODS), chance.choice(target.paths)
    version = chance.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/9.9", "", "X"))
    body = b"" if method == "GET" else chance.choice(_BODIES)
    headers = "Content-Type: application/json\r\n" if chance.random() < 0.8 else ""
    if target.token and chance.random() < 0.8:
        headers += f"Authorization: Bearer {target.token}\r\n"
    elif chance.random() < 0.5:
        headers += chance.choice(("Authorization: Bearer\r\n", "Authorization: Bearer \xff\r\n", "Authorization: \r\n"))
    if chance.random() < 0.1:
        body, headers = zlib.compress(b"\0" * 40_000_000), headers + "Content-Encoding: deflate\r\n"
    if chance.random() < 0.5:
        headers += chance.choice(_HEADERS)
    if "Content-Length" not in headers and "chunked" not in headers:
        headers += f"Content-Length: {len(body)}\r\n"
    return f"{method} {path} {version}\r\n{headers}\r\n".encode("latin-1", "replace") + body
