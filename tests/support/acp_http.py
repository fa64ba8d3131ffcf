"""A plain client of the daemons' HTTP dialect, for tests: it shows what is on the wire and decides nothing."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.harness import HarnessDaemon

Message = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An HTTP answer; `body` is its JSON, None when it is empty."""

    status: int
    body: Any
    content_type: str

    @property
    def slug(self) -> str:
        """Last part of the type of a problem."""
        assert self.content_type == "application/problem+json", self
        return str(self.body["type"]).removeprefix("urn:sandbox-agent:error:")

    @property
    def result(self) -> Message:
        """Result of a JSON-RPC answer."""
        assert self.status == 200, self
        assert "result" in self.body, self
        found: Message = self.body["result"]
        return found


class AcpHttp:
    """Calls to one daemon."""

    def __init__(self, daemon: HarnessDaemon, session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.session = session
        self._ids = itertools.count(1)

    async def call(self, method: str, path: str, **options: Any) -> Reply:
        """Any HTTP request; the token is sent unless `headers` say otherwise."""
        async with self.session.request(method, self.daemon.url + path, **options) as response:
            text = await response.text()
            is_json = "json" in response.content_type
            return Reply(response.status, json.loads(text) if text and is_json else text or None, response.content_type)

    async def post(self, server: str, message: Any, *, agent: str | None = None) -> Reply:
        """POST one message to a server."""
        query = {"agent": agent} if agent else {}
        body = io.BytesIO(json.dumps(message).encode())
        headers = {"Content-Type": "application/json"}
        return await self.call("POST", f"/v1/acp/{server}", data=body, params=query, headers=headers)

    async def request(self, server: str, method: str, params: Message, *, agent: str | None = None) -> Reply:
        """POST a request with a fresh id."""
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        return await self.post(server, message, agent=agent)

    async def notify(self, server: str, method: str, params: Message) -> Reply:
        """POST a notification."""
        return await self.post(server, {"jsonrpc": "2.0", "method": method, "params": params})

    async def open(self, server: str, agent: str, cwd: str) -> str:
        """Start an agent and open a session in it → session id."""
        hello = {"protocolVersion": 1, "clientCapabilities": {}}
        assert (await self.request(server, "initialize", hello, agent=agent)).result["protocolVersion"] == 1
        session: str = (await self.request(server, "session/new", {"cwd": cwd, "mcpServers": []})).result["sessionId"]
        return session

    async def prompt(self, server: str, session: str, text: str, **meta: Any) -> Reply:
        """POST a prompt and wait for its answer."""
        content = [{"type": "text", "text": text}]
        return await self.request(server, "session/prompt", {"sessionId": session, "prompt": content, "_meta": meta})

    async def delete(self, server: str) -> Reply:
        """DELETE a server."""
        return await self.call("DELETE", f"/v1/acp/{server}")

    async def delete_for_good(self, server: str) -> None:
        """DELETE, in the way that works with both daemons: the first call of the real one never ends."""
        try:
            reply = await asyncio.wait_for(self.delete(server), 0.5 if self.daemon.kind == "sandbox-agent" else 5)
        except TimeoutError:
            reply = await self.delete(server)
        assert reply.status == 204

    async def servers(self) -> dict[str, Message]:
        """The servers by id."""
        return {entry["serverId"]: entry for entry in (await self.call("GET", "/v1/acp")).body["servers"]}

    @asynccontextmanager
    async def stream(self, server: str, last: int | None = None) -> AsyncIterator[Stream]:
        """Follow a server's messages, from the start or after number `last`."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(last)} if last is not None else {})
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{self.daemon.url}/v1/acp/{server}"
        async with self.session.get(url, headers=headers, timeout=timeout, read_bufsize=2**22) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            stream = Stream()
            reading = asyncio.create_task(stream.read(response))
            try:
                yield stream
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


@dataclass
class Stream:
    """What came on one event stream so far."""

    events: list[tuple[int, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        """Numbers of the messages."""
        return [number for number, _ in self.events]

    @property
    def messages(self) -> list[Message]:
        """The messages, without what is no object."""
        return [message for _, message in self.events if isinstance(message, dict)]

    @property
    def updates(self) -> list[Message]:
        """The session updates."""
        return [m["params"]["update"] for m in self.messages if m.get("method") == "session/update"]

    @property
    def text(self) -> str:
        """The agent's words."""
        return "".join(u["content"]["text"] for u in self.updates if u["sessionUpdate"] == "agent_message_chunk")

    def named(self, method: str) -> list[Message]:
        """The requests and notifications of this method."""
        return [message for message in self.messages if message.get("method") == method]

    async def until(self, condition: Callable[[Stream], object], timeout: float = 20.0) -> Stream:
        """Wait until `condition` holds of this stream; AssertionError when it does not in time."""
        try:
            async with asyncio.timeout(timeout):
                while not condition(self):
                    assert not self.ended, f"the stream ended: {_tail(self.messages)}"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout} s; last came {_tail(self.messages)}") from None
        return self

    async def until_end(self, timeout: float = 10.0) -> None:
        """Wait until the daemon ends the stream."""
        async with asyncio.timeout(timeout):
            while not self.ended:
                self._changed.clear()
                await self._changed.wait()

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Take in all that comes."""
        rest = b""
        async for chunk in response.content.iter_any():
            *blocks, rest = (rest + chunk).split(b"\n\n")
            for block in blocks:
                self._take(block.decode())
            self._changed.set()
        self.ended = True
        self._changed.set()

    def _take(self, block: str) -> None:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        self.comments += [line for line in block.split("\n") if line.startswith(":")]
        if fields:
            assert fields.keys() == {"event", "id", "data"}, block
            assert fields["event"] == "message"
            self.events.append((int(fields["id"]), json.loads(fields["data"])))


@asynccontextmanager
async def client_of(daemon: HarnessDaemon) -> AsyncIterator[AcpHttp]:
    """A client with the daemon's token."""
    headers = {"Authorization": f"Bearer {daemon.token}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield AcpHttp(daemon, session)


def _tail(messages: Sequence[Message]) -> str:
    return " | ".join(json.dumps(message)[:300] for message in messages[-3:]) or "nothing"
