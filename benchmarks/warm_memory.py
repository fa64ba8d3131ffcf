"""What live agent sessions weigh in a pool process: many of them parked, all in one stub of a daemon.

Only the pool is of interest, so the sandbox service and the daemon are stubs in this process: the first hands out the
second, which has a server for each session and answers prompts at once.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from aiohttp import web

from benchmarks import machine, warm_turns
from benchmarks.rig import Rig
from benchmarks.runs import Part
from hearth.client import Addresses, Client, session_key
from hearth.pool.v1 import pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc

_WIDTH = 8
_WARM_UP = 5
_SECONDS = 300.0
_TOKEN = "bench"


@dataclass(slots=True)
class _Server:
    """One agent server: its messages by number, from 1."""

    messages: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, message: dict[str, Any]) -> None:
        """Add a message, and wake whoever follows."""
        self.messages.append(json.dumps({"jsonrpc": "2.0", **message}).encode())
        self.changed.set()
        self.changed = asyncio.Event()


class StubDaemon:
    """As much of a daemon as a conversation needs. Every prompt is answered with one chunk of text."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/acp/{server}", self._post),
                web.get("/v1/acp/{server}", self._stream),
                web.delete("/v1/acp/{server}", self._delete),
                web.post("/v1/processes/run", self._run),
            ]
        )
        return app

    async def _post(self, request: web.Request) -> web.Response:
        server = self._servers.setdefault(request.match_info["server"], _Server())
        message = await request.json()
        session = message.get("params", {}).get("sessionId", "")
        match message.get("method"):
            case "initialize":
                result: dict[str, Any] = {"protocolVersion": 1, "agentCapabilities": {}}
            case "session/new":
                result = {"sessionId": str(uuid.uuid4())}
            case "session/prompt":
                chunk = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "hello"}}
                server.say({"method": "session/update", "params": {"sessionId": session, "update": chunk}})
                result = {"stopReason": "end_turn"}
            case _:
                return web.Response(status=202)
        answer = {"id": message["id"], "result": result}
        server.say(answer)
        return web.json_response({"jsonrpc": "2.0", **answer})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        server = self._servers.get(request.match_info["server"])
        if server is None:
            return web.Response(status=404)
        headers = {"Content-Type": "text/event-stream", "Hearth-Newest-Event": str(len(server.messages))}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        last = int(request.headers.get("Last-Event-ID", "0"))
        try:
            while True:
                changed = server.changed
                for message in server.messages[last:]:
                    last += 1
                    await response.write(b"event: message\nid: %d\ndata: %b\n\n" % (last, message))
                await changed.wait()
        except ConnectionError:
            return response

    async def _delete(self, request: web.Request) -> web.Response:
        self._servers.pop(request.match_info["server"], None)
        return web.Response(status=204)

    async def _run(self, _request: web.Request) -> web.Response:
        # A listing of processes with the daemon alone.
        return web.json_response({"exitCode": 0, "stdout": "3 2\n2 1 9 S\n3 2 0 S\n"})


class StubSandboxes(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Every session has a sandbox, and each is in the same daemon."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, str] = {}

    async def Acquire(
        self, request: sandbox_service_pb2.AcquireRequest, context: object
    ) -> sandbox_service_pb2.AcquireResponse:
        known = request.session.session in self._known
        sandbox_id = self._known.setdefault(request.session.session, str(uuid.uuid4()))
        return sandbox_service_pb2.AcquireResponse(
            sandbox_id=sandbox_id,
            how=sandbox_pb2.ACQUIRE_HOW_ATTACHED if known else sandbox_pb2.ACQUIRE_HOW_CREATED,
            endpoint=sandbox_pb2.Endpoint(url=self._url, token=_TOKEN),
            workspace="/workspace",
        )

    async def Release(
        self, request: sandbox_service_pb2.ReleaseRequest, context: object
    ) -> sandbox_service_pb2.ReleaseResponse:
        kept = request.reason == sandbox_pb2.RELEASE_REASON_CLEAN_TURN
        done = sandbox_pb2.DISPOSITION_PARKED if kept else sandbox_pb2.DISPOSITION_STOPPED
        return sandbox_service_pb2.ReleaseResponse(disposition=done)

    async def RenewClaims(
        self, request: sandbox_service_pb2.RenewClaimsRequest, context: object
    ) -> sandbox_service_pb2.RenewClaimsResponse:
        results = [sandbox_pb2.RenewalResult(outcome=sandbox_pb2.RENEWAL_OUTCOME_OK) for _ in request.renewals]
        return sandbox_service_pb2.RenewClaimsResponse(results=results)


@asynccontextmanager
async def stubs() -> AsyncIterator[str]:
    """Daemon and sandbox service; the address of the latter."""
    runner = web.AppRunner(StubDaemon().application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    server = grpc.aio.server()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        # The pool asks for nothing else.
        servicer = StubSandboxes(f"http://127.0.0.1:{runner.addresses[0][1]}")  # type: ignore[abstract]
        sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.5)
        await runner.cleanup()


async def measure(rig: Rig, count: int) -> Part:
    """A fresh pool takes `count` sessions through a turn each and keeps their agents; how much it grows by that."""
    async with stubs() as sandbox:
        history = await rig.history()
        relay = await rig.relay(history)
        pool = await rig.service(
            "pool",
            HEARTH_HISTORY_ADDRESS=history.address,
            HEARTH_RELAY_ADDRESS=relay.address,
            HEARTH_SANDBOX_ADDRESS=sandbox,
            HEARTH_POOL_ENTRIES=str(count + _WARM_UP),
            HEARTH_LOCAL_WARM_WINDOW="3600",
            HEARTH_TRACE_FILE=str(rig.directory / "memory.traces.jsonl"),
        )
        async with Client(Addresses(pool=pool.address, history=history.address, relay=relay.address)) as client:
            # What a process loads at its first turns belongs to no entry.
            await _park(client, range(_WARM_UP))
            before = machine.resident_bytes(pool.pid)
            await _park(client, range(_WARM_UP, _WARM_UP + count))
            after = machine.resident_bytes(pool.pid)
            parked = await _idle(client)
        await pool.stop()
    problems = [] if parked == count + _WARM_UP else [f"{parked} entries are parked, not {count + _WARM_UP}"]
    figures = {
        "parked_growth_mib": (after - before) / 2**20,
        "parked_entry_kib": (after - before) / 2**10 / count,
        "pool_mib_before": before / 2**20,
    }
    return Part(figures, problems=problems)


async def _park(client: Client, numbers: range) -> None:
    """One turn of each session, some at a time, until all are parked."""
    waiting = asyncio.Semaphore(_WIDTH)

    async def one(number: int) -> None:
        async with waiting:
            key = session_key(warm_turns.PROJECT, f"parked-{number}")
            await client.send(key, warm_turns.TEXT, request_id=str(uuid.uuid4()))

    async with asyncio.timeout(_SECONDS):
        await asyncio.gather(*(one(number) for number in numbers))
        while await _idle(client) < numbers.stop:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.2)


async def _idle(client: Client) -> int:
    stats = await client.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=10.0)
    return stats.entries_by_state.get("IDLE", 0)
