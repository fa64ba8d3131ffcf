"""How fast a log is read back: a long one whole, and one of usual length from a small and from a large store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks import machine, peers
from benchmarks.clients import Client, Link, clients
from benchmarks.figures import Figures, per_item
from benchmarks.reading import ContentDigest, Replayed, compare, replay
from benchmarks.report import Report, Target, least, most
from benchmarks.rig import Rig, Service
from benchmarks.runs import Options, Part, Say, collect
from benchmarks.writing import EVENT_BYTES, begin, check_stored, message, padding, producer
from hearth.channel import open_channel

WORKLOAD = "replay"
LONG, USUAL = "long", "usual"
_FILLER_LOG_EVENTS = 10_000
_FILLER_ROWS = 200_000
_CALLERS = 500
# A log of usual length is read in a moment; so many times make a measurement.
_REPEATS = 20
# Until every connection to the database knows its statements.
_WARM_UPS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many events: of the long log, of the usual one, and beside it in the large store."""

    long: int
    usual: int
    stored: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a log must hold: its event ids by sequence, and a digest of all contents in order."""

    ids: dict[int, str]
    digest: str


def sizes(*, quick: bool, large: bool) -> Sizes:
    """The sizes of a run. Pure."""
    stored = 10_000_000 if large else 100_000 if quick else 1_000_000
    return Sizes(10_000, 10_000, stored) if quick else Sizes(100_000, 10_000, stored)


async def load(link: Link, address: str, session: str, events: int) -> None:
    """Client process: write a log, and say what it must hold."""
    text = padding()
    ids: dict[int, str] = {}
    contents: dict[int, bytes] = {}
    async with producer(address) as made:
        writer, ids[1] = await begin(made, session)
        left = events - 1

        async def call() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                event = message(f"m{left % 10}", text)
                sequence = check_stored(await writer.event(event))
                ids[sequence] = event.event_id
                contents[sequence] = event.SerializeToString(deterministic=True)

        await asyncio.gather(*(call() for _ in range(_CALLERS)))
    digest = ContentDigest()
    for sequence in sorted(contents):
        digest.add_serialized(contents[sequence])
    await link.send(Loaded(ids, digest.text))


async def read(link: Link) -> None:
    """Client process: read the logs that it is told, (address, session, thorough) each, on warm connections."""
    channels: dict[str, Any] = {}
    while True:
        address, session, thorough = await link.receive()
        channel = channels.setdefault(address, open_channel(address))
        await channel.channel_ready()
        found = await replay(channel, session, thorough=thorough)
        await link.send(found if thorough else replace(found, ids=[]))


async def run(options: Options, say: Say) -> Report:
    """The whole benchmark."""
    size = sizes(quick=options.quick, large=options.large)
    async with Rig() as rig:
        dsns = {name: await rig.database(name) for name in ("small", "large")}
        small, large = [await rig.history(name, dsn=dsn) for name, dsn in dsns.items()]
        report = Report(
            WORKLOAD,
            {
                "events": size.long,
                "event_bytes": EVENT_BYTES,
                "stored_small": size.usual,
                "stored_large": size.stored,
                "runs": options.runs,
                **await rig.description(),
            },
        )
        say(f"storing {size.stored:,} events")
        await fill(rig, dsns["large"], size.stored)
        async with clients(("benchmarks.replay:read",)) as (reader,):
            for service, session, events in (
                (small, USUAL, size.usual),
                (large, USUAL, size.usual),
                (large, LONG, size.long),
            ):
                say(f"writing {events:,} events to {service.name}")
                loaded = await write(service, session, events)
                report.problems += await check(reader, service, session, loaded)
            for dsn in dsns.values():
                # Else it may begin by itself while something is measured.
                await rig.execute(dsn, "VACUUM ANALYZE history.events")
            await rig.execute(rig.dsn, "CHECKPOINT")
            parts = {
                "long log": partial(measure_long, rig, reader, large, size.long),
                "small and large store": partial(measure_stores, reader, small, large, size.usual),
            }
            await collect(report, parts, options, say, derive=_ratio)
    report.targets = targets(report.figures)
    report.peers = await peers.run(WORKLOAD, options, say)
    return report


async def fill(rig: Rig, dsn: str, events: int) -> None:
    """Put events of other sessions into a store, past the service: it would take an hour."""
    logs = events // _FILLER_LOG_EVENTS
    await rig.execute(
        dsn,
        "INSERT INTO history.logs (project, session, log_id, revision, head, tail_id) SELECT 'filler', 'f' || number,"
        " gen_random_uuid(), gen_random_uuid(), $2, gen_random_uuid() FROM generate_series(1, $1::int) AS number",
        logs,
        _FILLER_LOG_EVENTS,
    )
    at_once = _FILLER_ROWS // _FILLER_LOG_EVENTS
    for first in range(1, logs + 1, at_once):
        await rig.execute(
            dsn,
            "INSERT INTO history.events (log, sequence, event_id, digest, body)"
            " SELECT l.id, s, gen_random_uuid(), sha256(l.session::bytea), $4"
            " FROM generate_series($1::int, $2) AS number"
            " JOIN history.logs l ON l.project = 'filler' AND l.session = 'f' || number,"
            " generate_series(1, $3::bigint) AS s",
            first,
            min(first + at_once - 1, logs),
            _FILLER_LOG_EVENTS,
            bytes(index * 89 % 251 for index in range(EVENT_BYTES)),
        )


async def write(service: Service, session: str, events: int) -> Loaded:
    """Write a log through the service."""
    async with clients(("benchmarks.replay:load", service.address, session, events)) as (client,):
        loaded: Loaded = await client.receive(600)
    return loaded


async def check(reader: Client, service: Service, session: str, loaded: Loaded) -> list[str]:
    """What is wrong with a log that was written as `loaded` says."""
    found = await _read(reader, service, session, thorough=True)
    problems = found.problems + compare(session, found.ids, loaded.ids)
    if not problems and found.digest != loaded.digest:
        problems.append(f"{session}: contents differ from those written")
    return problems


async def measure_long(rig: Rig, reader: Client, service: Service, events: int) -> Part:
    """One pass over the long log."""
    with machine.measured({"history": service.pid, "client": reader.pid, **rig.pids()}) as usage:
        found = await _read(reader, service, LONG)
    figures = {
        "events_per_s": found.events / found.seconds,
        "first_chunk_ms": found.first_chunk * 1000,
        **per_item("", usage.cpu, found.events),
    }
    return Part(figures, usage.others_cores, found.problems + _count(found, events))


async def measure_stores(reader: Client, small: Service, large: Service, events: int) -> Part:
    """Passes over two logs of one length, in turns."""
    passes: dict[str, list[Replayed]] = {small.name: [], large.name: []}
    for service in (small, large) * _WARM_UPS:
        await _read(reader, service, USUAL)
    with machine.measured({}) as usage:
        for number in range(_REPEATS):
            # In turns, and each of them first as often as second.
            for service in (small, large) if number % 2 else (large, small):
                passes[service.name].append(await _read(reader, service, USUAL))
    figures: Figures = {}
    problems: list[str] = []
    for name, found in passes.items():
        figures[f"{name}_events_per_s"] = events / median(one.seconds for one in found)
        figures[f"{name}_first_chunk_ms"] = median(one.first_chunk for one in found) * 1000
        problems += [problem for one in found for problem in one.problems + _count(one, events)]
    return Part(figures, usage.others_cores, problems)


def targets(figures: Figures) -> list[Target]:
    """What must be reached."""
    return [
        least(figures, "events_per_s", 100_000, "events/s"),
        most(figures, "first_chunk_ms", 50, "ms"),
        least(figures, "large_to_small", 0.8, "of the rate from a small store"),
    ]


def _ratio(run: Figures) -> Figures:
    return {"large_to_small": run["large_events_per_s"] / run["small_events_per_s"]}


def _count(found: Replayed, events: int) -> list[str]:
    return [] if found.events == events else [f"{found.events} events came, {events} were written"]


async def _read(reader: Client, service: Service, session: str, *, thorough: bool = False) -> Replayed:
    await reader.send((service.address, session, thorough))
    found: Replayed = await reader.receive()
    return found
