"""Sessions that stream through all four services while something else is measured, and the journal of their agents."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.clients import Link, clients
from benchmarks.warm_turns import House, addresses_of
from hearth.client import Addresses, Client, session_key
from hearth.session.v1 import session_service_pb2

PROJECT = "bench"
# More than any measurement takes at this rate.
_WORDS = 1_000_000
_BEGIN_SECONDS = 60.0
_END_SECONDS = 30.0


def journal_settings(path: Path) -> dict[str, str]:
    """Settings of a house whose agents write down what they are asked, synced before its effect."""
    return {"HEARTH_SCRIPTED_LOG": str(path), "HEARTH_LOCAL_INHERIT": "HEARTH_SCRIPTED_LOG"}


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt that reached an agent. `cancelled` is when its cancel did, seconds since 1970; 0: none did."""

    execution_id: str
    text: str
    at: float
    cancelled: float = 0.0


def prompts(lines: Iterable[str]) -> list[Prompted]:
    """The prompts of a journal, in order. A cancel belongs to the last prompt of its agent's session. Pure."""
    found: list[Prompted] = []
    last: dict[tuple[int, str], int] = {}
    for line in lines:
        entry: dict[str, Any] = json.loads(line)
        agent = (entry["pid"], entry.get("session", ""))
        if entry["event"] == "prompt":
            last[agent] = len(found)
            found.append(Prompted(entry["message_id"] or "", entry["text"], entry["time"]))
        elif entry["event"] == "cancel" and agent in last:
            asked = found[last[agent]]
            found[last[agent]] = Prompted(asked.execution_id, asked.text, asked.at, asked.cancelled or entry["time"])
    return found


def read_journal(path: Path) -> list[Prompted]:
    """The prompts of a journal file. A line that is being written is left out."""
    text = path.read_text() if path.exists() else ""
    return prompts(text[: text.rfind("\n") + 1].splitlines())


@dataclass(slots=True)
class Streamed:
    """What readers of the streaming sessions got while something was measured."""

    frames: int = 0
    gaps: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Frames of all sessions."""
        return self.frames / self.seconds if self.seconds else 0.0


async def read(link: Link, addresses: Addresses, token: str, names: list[str]) -> None:
    """Follow sessions in a process of its own: says when all of them stream, then what came between two signals."""
    frames = dict.fromkeys(names, 0)
    gaps = dict.fromkeys(names, 0)
    arrived = asyncio.Event()

    async def follow(client: Client, name: str) -> None:
        async for item in client.watch(session_key(PROJECT, name)):
            # Stages of the turn are frames too, and come before the agent says anything.
            if item.HasField("frame") and item.frame.frame.HasField("text_delta"):
                frame = item.frame.frame
                last = frame.merged_through if frame.HasField("merged_through") else frame.frame_index
                frames[name] += last - frame.frame_index + 1
                if frames[name] == 1:
                    arrived.set()
            elif item.HasField("gap"):
                gaps[name] += 1

    async with Client(addresses, token=token) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(client, name)) for name in names]
        while not all(frames.values()):
            await arrived.wait()
            arrived.clear()
        await link.send()
        await link.receive()
        before, since = sum(frames.values()), time.monotonic()
        await link.receive()
        silent = [name for name in names if not frames[name]]
        await link.send(
            Streamed(
                sum(frames.values()) - before,
                sum(gaps.values()),
                time.monotonic() - since,
                [f"{name} streamed nothing" for name in silent],
            )
        )
        for task in tasks:
            task.cancel()


def names(sessions: int) -> list[str]:
    """New sessions to stream."""
    run = uuid.uuid4().hex[:6]
    return [f"stream-{run}-{number}" for number in range(sessions)]


@asynccontextmanager
async def streaming(house: House, them: list[str], rate: float) -> AsyncIterator[Streamed]:
    """These sessions stream at `rate` frames a second during the block, each with a reader; filled in at its end."""
    streamed = Streamed()
    if not them:
        yield streamed
        return
    where = addresses_of(house.services, house.pools[:1])
    async with clients(("benchmarks.control_streams:read", where, house.token, them)) as (reader,):
        try:
            for name in them:
                await house.client.send(session_key(PROJECT, name), f"stream {_WORDS} words at {rate:g}/s")
            await reader.receive(_BEGIN_SECONDS)
            await reader.send()
            yield streamed
            await reader.send()
            told: Streamed = await reader.receive(_END_SECONDS)
            streamed.frames, streamed.gaps, streamed.seconds = told.frames, told.gaps, told.seconds
            streamed.problems = told.problems
        finally:
            for name in them:
                await _end(house.client, name)


async def _end(client: Client, name: str) -> None:
    request = session_service_pb2.KillSessionRequest(session=session_key(PROJECT, name), request_id=str(uuid.uuid4()))
    try:
        await client.sessions.KillSession(request, timeout=_END_SECONDS)
    except grpc.aio.AioRpcError as error:
        # One that was never begun.
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise


def shares(counts: Mapping[str, int], name: str) -> float:
    """The share of one name among all that were counted; 0 of nothing. Pure."""
    total = sum(counts.values())
    return counts.get(name, 0) / total if total else 0.0
