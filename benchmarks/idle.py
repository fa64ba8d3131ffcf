"""Thousands of readers of quiet sessions: what each costs in memory, and how they come back when the relay restarts."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from benchmarks import machine
from benchmarks.clients import Client, Link, clients, receive_all, send_all
from benchmarks.rig import Service
from benchmarks.runs import Part
from benchmarks.steady import shares
from benchmarks.writing import begin, check_stored, key, message, producer
from hearth.channel import open_channel
from hearth.errors import CallError
from hearth.relay.v1 import relay_service_pb2_grpc
from hearth.watch import Watch

STREAMS_ON_A_CONNECTION = 100
_PROCESSES = 2
_WAVE = 250
_BACK_SECONDS = 120.0
_SETTLE_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_TOLD_EVERY = 50


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the readers of one process stand: how many are connected, got the event, were refused for good."""

    ready: int
    events: int
    reconnects: int
    refused: tuple[str, ...]


class _Reader:
    """One reader that reconnects for as long as the errors allow it, as the client library has it."""

    def __init__(self, channel: grpc.aio.Channel, session: str) -> None:
        self.watch = Watch(relay_service_pb2_grpc.RelayServiceStub(channel), key(session))
        # The connection, by number of reconnects, on which it was told to be ready last.
        self.ready_on = -1
        self.events = 0
        self.refused = ""

    async def run(self) -> None:
        """Read until cancelled or refused."""
        try:
            async for item in self.watch:
                if item.HasField("ready"):
                    self.ready_on = self.watch.reconnects
                elif item.HasField("event"):
                    self.events += 1
        except CallError as error:
            self.refused = f"{error.code.name}: {error.message}"


async def stay(link: Link, relay: str, seats: Sequence[str]) -> None:
    """Client process: has a reader for each entry of `seats`, and begins as many of them as it is told.

    Says where they stand when it is asked (None), and ends when told False.
    """
    count = -(-len(seats) // STREAMS_ON_A_CONNECTION)
    channels = [open_channel(relay) for _ in range(count)]
    readers = [_Reader(channels[place % count], session) for place, session in enumerate(seats)]
    waiting = iter(readers)
    tasks: list[asyncio.Task[None]] = []
    while (told := await link.receive()) is not False:
        if told is not None:
            tasks += [asyncio.create_task(reader.run()) for reader in itertools.islice(waiting, told)]
            continue
        await link.send(
            Standing(
                ready=sum(reader.ready_on == reader.watch.reconnects for reader in readers),
                events=sum(reader.events for reader in readers),
                reconnects=sum(reader.watch.reconnects for reader in readers),
                refused=tuple(reader.refused for reader in readers if reader.refused),
            )
        )
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for channel in channels:
        await channel.close()


async def write(link: Link, history: str, sessions: Sequence[str]) -> None:
    """Client process: begin each of the sessions, and when told some of them, write another event to each of these."""
    async with producer(history) as made:
        begun = await asyncio.gather(*(begin(made, session) for session in sessions))
        writers = dict(zip(sessions, (writer for writer, _ in begun), strict=True))
        await link.send()
        told: Sequence[str] = await link.receive()
        for result in await asyncio.gather(*(writers[session].event(message("m1", "hello")) for session in told)):
            check_stored(result)
        await link.send()


async def measure(history: Service, relay: Service, readers: int) -> Part:
    """Connect that many readers, each to a session of its own, restart the relay under them, and write to each."""
    seats = [f"idle-{number}" for number in range(readers)]
    jobs = [("benchmarks.idle:stay", relay.address, share) for share in shares(seats, _PROCESSES)]
    figures: dict[str, float] = {"idle_readers": readers}
    problems: list[str] = []
    async with clients(("benchmarks.idle:write", history.address, seats)) as (writer,), clients(*jobs) as group:
        await writer.receive()
        before = machine.resident_bytes(relay.pid)
        began = time.monotonic()
        # What many need at once while they connect is used again by the next ones: it is no part of what one costs.
        for there in range(0, readers, _WAVE):
            wave = seats[there : there + _WAVE]
            for client, share in zip(group, shares(wave, _PROCESSES), strict=True):
                await client.send(len(share))
            figures["connect_s"] = await _all_ready(group, there + len(wave), began)
        await asyncio.sleep(_SETTLE_SECONDS)
        figures["idle_kib"] = (machine.resident_bytes(relay.pid) - before) / readers / 1024
        with machine.measured({"relay": relay.pid}) as usage:
            await asyncio.sleep(_SETTLE_SECONDS)
        figures["idle_relay_cores"] = usage.cpu["relay"] / usage.seconds
        refused: list[str] = []
        for name, number in (("restart", signal.SIGTERM), ("kill", signal.SIGKILL)):
            await relay.stop(number)
            began = time.monotonic()
            await relay.start()
            figures[f"{name}_serving_s"] = time.monotonic() - began
            figures[f"{name}_back_s"] = await _all_ready(group, readers, began)
            standing = await _ask(group)
            refused = [found for one in standing for found in one.refused]
            figures[f"{name}_refused"] = len(refused) + readers - sum(one.ready for one in standing)
            figures[f"{name}_reconnects"] = sum(one.reconnects for one in standing)
        figures["kill_reconnects"] -= figures["restart_reconnects"]
        problems += sorted({f"a reader was refused for good: {found}" for found in refused})
        told = seats[::_TOLD_EVERY]
        await writer.send(told)
        await writer.receive()
        # Each has the event that began its session, and none of them has it twice.
        problems += await _all_told(group, readers + len(told))
        await send_all(group, False)
    return Part(figures, usage.others_cores, problems)


async def _ask(group: Sequence[Client]) -> list[Standing]:
    await send_all(group)
    return await receive_all(group)


async def _all_ready(group: Sequence[Client], readers: int, began: float) -> float:
    """Seconds from `began` until all readers are connected; infinity when they do not come."""
    there = await _until(group, lambda standing: standing.ready, readers, began + _BACK_SECONDS)
    return time.monotonic() - began if there == readers else float("inf")


async def _all_told(group: Sequence[Client], events: int) -> list[str]:
    got = await _until(group, lambda standing: standing.events, events, time.monotonic() + _BACK_SECONDS / 4)
    return [] if got == events else [f"readers got {got} events over the restarts, {events} were written"]


async def _until(group: Sequence[Client], count: Callable[[Standing], int], wanted: int, ends: float) -> int:
    """Ask until all of them together have `wanted`, or it is too late; how many they have."""
    while True:
        found = sum(map(count, await _ask(group)))
        if found >= wanted or time.monotonic() > ends:
            return found
        await asyncio.sleep(_LOOK_SECONDS)
