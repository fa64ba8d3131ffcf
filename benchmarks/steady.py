"""Frames at a fixed rate to readers of one or many sessions: how late they come, and what a delivery costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import live, machine
from benchmarks.clients import clients, receive_all
from benchmarks.figures import latency, per_item
from benchmarks.rig import Rig, Service
from benchmarks.runs import Part

_LEAD_SECONDS = 0.3
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`readers` of each of the `sessions`, in so many client processes."""

    sessions: int
    readers: int
    rate: float
    seconds: float
    reader_processes: int = 1


def names(prefix: str, count: int) -> tuple[str, ...]:
    """Names of sessions. Pure."""
    return tuple(f"{prefix}-{number}" for number in range(count))


def shares(seats: Sequence[str], count: int) -> list[list[str]]:
    """The seats of each of `count` processes; none is empty. Pure."""
    return [share for share in (list(seats[place::count]) for place in range(count)) if share]


async def measure(rig: Rig, history: Service, relay: Service, shape: Shape, prefix: str, sessions: str) -> Part:
    """Publish and read on fresh sessions; figures are of the time after the warm-up."""
    keys = names(sessions, shape.sessions)
    seats = keys * shape.readers
    frames = round((shape.seconds + _WARM_UP_SECONDS + 2 * _LEAD_SECONDS) * shape.rate)
    publisher = ("benchmarks.live:publish", history.address, relay.address, live.Plan(keys, frames, shape.rate))
    readers = [
        ("benchmarks.live:subscribe", relay.address, share, frames) for share in shares(seats, shape.reader_processes)
    ]
    async with clients(*readers) as reading, clients(publisher) as (publishing,):
        await receive_all([*reading, publishing])
        start = time.time() + _LEAD_SECONDS
        await publishing.send(start)
        await asyncio.sleep(start + _WARM_UP_SECONDS - time.time())
        watched = {client_name(place): client.pid for place, client in enumerate(reading)}
        watched |= {"publisher": publishing.pid, **rig.pids(history, relay)}
        with machine.measured(watched) as usage:
            since = time.time()
            await asyncio.sleep(shape.seconds)
            until = time.time()
        published: live.Published = await publishing.receive()
        await receive_all(reading)
        seen: list[live.Saw] = await receive_all(reading)
    pairs = [pair for saw in seen for pair in zip(saw.made, saw.took, strict=True)]
    deliveries = sum(since <= made + took < until for made, took in pairs)
    cpu = {name: seconds for name, seconds in usage.cpu.items() if not name.startswith("reader")}
    cpu["readers"] = sum(usage.cpu.values()) - sum(cpu.values())
    figures = {
        f"{prefix}deliveries_per_s": deliveries / usage.seconds,
        **latency(prefix, [took for made, took in pairs if since <= made < until]),
        **per_item(f"{prefix}", cpu, deliveries),
        **{f"{prefix}{name}_cores": seconds / usage.seconds for name, seconds in cpu.items()},
        f"{prefix}frames_per_response": sum(saw.covered for saw in seen) / sum(saw.responses for saw in seen),
        f"{prefix}publisher_late_p99_ms": published.late_p99_ms,
        f"{prefix}gaps": sum(saw.gaps for saw in seen),
    }
    return Part(figures, usage.others_cores, live.check(published, seen, seats, frames))


def client_name(place: int) -> str:
    """What a reader process is called in measurements."""
    return f"reader{place}"
