"""The client for Node: sends, watches over a killed relay by its cursor, and stops; its transcript is the log's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import hearth
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import ResourceExhausted, Unauthenticated
from tests.clients.serving import aborted, serving_readers
from tests.contract.pool.house import House
from tests.support import processes

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "node"
_UNREACHABLE = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "E401", "E403")


@pytest.fixture(scope="module")
def node() -> str:
    """Node, with the packages that the client's lock file names beside it."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("node and npm are not installed")
    with (CLIENT / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = CLIENT / "node_modules" / ".installed"
        if not done.exists() or done.read_text() != lock.read():
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            result = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=120, check=False)
            if result.returncode != 0 and any(code in result.stderr for code in _UNREACHABLE):
                pytest.skip(f"the npm registry cannot be reached: {result.stderr.strip().splitlines()[0]}")
            assert result.returncode == 0, result.stderr
            done.write_text((CLIENT / "package-lock.json").read_text())
    return program


class Run:
    """A run of chat.js: what it printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    async def until(self, word: str) -> dict[str, Any]:
        """Read on until it says something with this word."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while not (self.said and word in self.said[-1]):
                line = await self.process.stdout.readline()
                assert line, f"it ended without {word!r}: {self.said}"
                self.said.append(json.loads(line))
        return self.said[-1]


@asynccontextmanager
async def chatting(node: str, addresses: hearth.Addresses, *arguments: str) -> AsyncIterator[Run]:
    where = {"HEARTH_POOL_ADDRESS": addresses.pool, "HEARTH_RELAY_ADDRESS": addresses.relay}
    process = await asyncio.create_subprocess_exec(
        *(node, "chat.js", *arguments),
        cwd=CLIENT,
        stdout=asyncio.subprocess.PIPE,
        limit=1024 * 1024,
        env={**os.environ, **where, processes.MARKER: processes.marker()},
    )
    try:
        yield Run(process)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_watches_over_a_killed_relay(
    node: str, house: House, client: hearth.Client, addresses: hearth.Addresses
) -> None:
    session = f"node-{uuid.uuid4().hex[:8]}"
    async with chatting(node, addresses, "acme", session, "stream 300 words at 100/s") as run:
        await run.until("first_frame")
        relay = house.processes["relay"]
        relay.kill9()
        await relay.restart()
        told = await run.until("outcome")
    log = [item async for item in client.history(hearth.session_key("acme", session))]
    assert any("reset" in said for said in run.said)
    assert [said["sequence"] for said in run.said if "event" in said] == list(range(1, len(log) + 1))
    messages = [item.event.message_completed for item in log if item.event.HasField("message_completed")]
    assert [entry["text"] for entry in told["entries"]] == [hearth.text_of(message.content) for message in messages]
    assert [entry["kind"] for entry in told["entries"]] == ["user", "agent"]
    assert told["outcome"] == "completed"


_WATCHING = """
import { Client } from "./hearth.js";
// Asked for twice with each stream.
let asked = 0;
const client = new Client({ relay: process.argv[1], token: () => ((asked += 1) > 4 ? "second" : "first") });
for await (const { item } of client.watch({ project: "acme", session: "s" })) {
  if (item === "event") break;
}
client.close();
"""


async def test_comes_again_over_a_limit_and_with_a_renewed_token(node: str) -> None:
    called = list[str]()

    async def subscribe(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        called.append(str(dict(context.invocation_metadata() or ())["authorization"]))
        if len(called) == 1:
            await aborted(context, ResourceExhausted("too many", reason="OVERLOADED", retry_after=0.1))
        if called[-1] != "Bearer second":
            await aborted(context, Unauthenticated("another token counts by now", reason="TOKEN_UNKNOWN"))
        item = event_pb2.EventItem(event=event_pb2.Event(type="acme.x"), cursor=session_pb2.Cursor(sequence=1))
        yield relay_service_pb2.SubscribeResponse(items=[relay_pb2.Item(event=item)])

    async with serving_readers(subscribe) as address:
        process = await asyncio.create_subprocess_exec(
            *(node, "--input-type=module", "--eval", _WATCHING, address), cwd=CLIENT
        )
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    assert called == ["Bearer first", "Bearer first", "Bearer second"]


async def test_stops(node: str, addresses: hearth.Addresses, house: House) -> None:
    session = f"node-{uuid.uuid4().hex[:8]}"
    async with chatting(node, addresses, "acme", session, "stream 5000 words at 50/s", "5") as run:
        await run.until("stop")
        told = await run.until("outcome")
    assert told["outcome"] == "stopped"
    assert all(entry["final"] for entry in told["entries"])
