"""Messages that wait in many sessions while replicas of the pool are killed at random: each reaches its agent once.

The agents write down every prompt, synced to the disk before anything comes of it; that journal is the judge. People
send again what was not answered, and let a queue go on that a lost turn has paused, until nothing waits any more.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks import control_streams, machine, warm_turns
from benchmarks.control_kills import FAST
from benchmarks.control_streams import PROJECT, Prompted
from benchmarks.figures import Figures
from benchmarks.report import Target, most
from benchmarks.rig import Rig, Service
from benchmarks.runs import Part, Say
from benchmarks.warm_turns import House, ending_of
from hearth.client import session_key
from hearth.errors import CallError
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2

_ITEM = re.compile(r"^item (\S+)$", re.MULTILINE)
_LOOK_SECONDS = 0.2
_AGAIN_SECONDS = 0.2
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Shape:
    """`inputs` over `sessions`, through so many `crashes` of one of `pools` processes. After `patience` seconds without
    progress it is given up."""

    inputs: int = 500
    sessions: int = 50
    crashes: int = 20
    pools: int = 3
    seed: int = 1
    patience: float = 180.0


QUICK = Shape(inputs=24, sessions=4, crashes=2)


@dataclass(slots=True)
class Seen:
    """What became of all inputs. `accepted` are input ids by item, `runs` the executions of each input, `endings` those
    of each execution, `listed` what still waits at the end."""

    accepted: dict[str, str] = field(default_factory=dict)
    runs: dict[str, list[str]] = field(default_factory=dict)
    endings: dict[str, list[str]] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)


async def part(rig: Rig, shape: Shape, say: Say) -> Part:
    """The whole workload on a house of its own."""
    journal = rig.directory / "prompts.jsonl"
    room = {"HEARTH_LOCAL_WARM_CAP": str(shape.sessions)}
    async with warm_turns.house(rig, shape.pools, **FAST, **room, **control_streams.journal_settings(journal)) as house:
        with machine.measured(rig.pids(*house.services.values())) as usage:
            began = time.monotonic()
            seen = Seen()
            await _through_crashes(house, journal, shape, seen, say)
            took = time.monotonic() - began
        await _read_back(house, shape, seen)
    prompted = await asyncio.to_thread(control_streams.read_journal, journal)
    figures, problems = verdict(seen, prompted, shape)
    return Part({**figures, "inputs_s": took}, usage.others_cores, problems)


async def _through_crashes(house: House, journal: Path, shape: Shape, seen: Seen, say: Say) -> None:
    chance = random.Random(shape.seed)
    items = {name: [f"{name}.{n}" for n in range(shape.inputs // shape.sessions)] for name in _names(shape)}
    async with asyncio.TaskGroup() as group:
        resuming = group.create_task(_resume(house))
        sending = [group.create_task(_send(house, name, of_it, seen, chance)) for name, of_it in items.items()]
        await _crash(house, journal, shape, chance, say)
        await asyncio.gather(*sending)
        await _until_quiet(house, journal, shape)
        resuming.cancel()


async def _send(house: House, name: str, items: Iterable[str], seen: Seen, chance: random.Random) -> None:
    """Send all items of a session, each until it was accepted."""
    for item in items:
        # Not all equally long, or all sessions would go in step.
        text = f"stream {chance.randint(20, 60)} words at 20/s\nitem {item}"
        while True:
            try:
                answer = await house.client.send(session_key(PROJECT, name), text, request_id=item)
            except CallError as error:
                if error.code not in _GONE:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            kind = answer.WhichOneof("result")
            seen.accepted[item] = (answer.started if kind == "started" else answer.queued).input_id
            break


async def _crash(house: House, journal: Path, shape: Shape, chance: random.Random, say: Say) -> None:
    """Kill one of the replicas whenever a random number of prompts has been made; it comes back a little later."""
    # The last ones are left to be done in peace, or there might be nothing left to disturb.
    points = sorted(chance.sample(range(1, int(shape.inputs * 0.9)), shape.crashes))
    ends = time.monotonic() + shape.patience

    async def come_back(victim: Service) -> None:
        await asyncio.sleep(chance.uniform(0, 1))
        await victim.start()
        serving.append(victim)

    serving = list(house.pools)
    async with asyncio.TaskGroup() as group:
        for number, point in enumerate(points, 1):
            while (count := len(await asyncio.to_thread(control_streams.read_journal, journal))) < point or not serving:
                if time.monotonic() > ends:
                    raise TimeoutError(f"{count} of {point} prompts were made, and no more came")
                await asyncio.sleep(_LOOK_SECONDS / 10)
            # Just now an agent was asked; a crash may come at any time.
            await asyncio.sleep(chance.uniform(0, 2 * _LOOK_SECONDS))
            victim = serving.pop(chance.randrange(len(serving)))
            await victim.stop(signal.SIGKILL)
            say(f"crash {number} of {shape.crashes} after {count} prompts: {victim.name}")
            group.create_task(come_back(victim))
            ends = time.monotonic() + shape.patience


async def _resume(house: House) -> None:
    """Let each queue go on that is paused and has something in it."""
    while True:
        try:
            async for session in house.client.sessions_of(PROJECT):
                if session.queue_paused and session.queued_inputs and not _active(session):
                    await house.client.resume_queue(session.session)
        except CallError as error:
            if error.code not in _GONE:
                raise
        await asyncio.sleep(_LOOK_SECONDS)


async def _until_quiet(house: House, journal: Path, shape: Shape) -> None:
    """Return when nothing waits and nothing runs any more."""
    made, ends = -1, 0.0
    while True:
        found = [session async for session in house.client.sessions_of(PROJECT)]
        if len(found) == shape.sessions and not any(one.queued_inputs or _active(one) for one in found):
            return
        count = len(await asyncio.to_thread(control_streams.read_journal, journal))
        if count != made:
            made, ends = count, time.monotonic() + shape.patience
        if time.monotonic() > ends:
            raise TimeoutError(f"inputs wait after {shape.patience:.0f} s in which none was prompted")
        await asyncio.sleep(_LOOK_SECONDS)


def _active(session: control_pb2.Session) -> bool:
    execution = session.execution
    return bool(execution.execution_id) and execution.state != control_pb2.EXECUTION_STATE_TERMINAL


async def _read_back(house: House, shape: Shape, seen: Seen) -> None:
    for name in _names(shape):
        key = session_key(PROJECT, name)
        seen.listed += [waiting.input_id async for waiting in house.client.inputs(key)]
        async for item in house.client.history(key):
            take(seen, item.event)


def take(seen: Seen, event: event_pb2.Event) -> None:
    """Take an event of a log. Pure but for `seen`."""
    if event.HasField("execution_started"):
        runs = seen.runs.setdefault(event.execution_started.input_id, [])
        # A takeover opens the same execution again.
        if event.execution_id not in runs:
            runs.append(event.execution_id)
    elif ending := ending_of(event):
        seen.endings.setdefault(event.execution_id, []).append(ending)


def verdict(seen: Seen, prompted: Iterable[Prompted], shape: Shape) -> tuple[Figures, list[str]]:
    """What became of the inputs, and what is wrong with it. Pure."""
    counts = Counter(found[1] for prompt in prompted if (found := _ITEM.search(prompt.text)) is not None)
    problems = [f"{item} was never accepted" for item in _items(shape) if item not in seen.accepted]
    never, lost = [], 0
    for item, input_id in seen.accepted.items():
        runs = seen.runs.get(input_id, [])
        endings = [ending for run in runs for ending in seen.endings.get(run, [])]
        lost += endings == ["execution_lost"]
        if len(runs) != 1 or len(endings) != 1:
            problems.append(f"{item} has {len(runs)} executions and {len(endings)} endings")
        if counts[item] > 1:
            problems.append(f"{item} was prompted {counts[item]} times")
        elif not counts[item]:
            never.append(item)
            if endings != ["execution_lost"]:
                problems.append(f"{item} was never prompted, and ended as {endings}")
    problems += [f"{input_id} still waits" for input_id in seen.listed]
    figures: Figures = {
        "inputs": len(seen.accepted),
        "inputs_prompted_once": sum(counts[item] == 1 for item in seen.accepted),
        "inputs_prompted_again": sum(counts[item] > 1 for item in seen.accepted),
        # Killed between the commit that says "the agent is being asked" and the asking itself.
        "inputs_lost_unasked": len(never),
        "inputs_listed": len(seen.listed),
        "turns_lost": lost,
        "crashes": shape.crashes,
    }
    return figures, problems


def _names(shape: Shape) -> list[str]:
    return [f"inputs-{number}" for number in range(shape.sessions)]


def _items(shape: Shape) -> list[str]:
    return [f"{name}.{number}" for name in _names(shape) for number in range(shape.inputs // shape.sessions)]


def targets(figures: Mapping[str, float]) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "inputs_prompted_again", 0, "inputs"),
        most(figures, "inputs_lost_unasked", 0, "inputs"),
        most(figures, "inputs_listed", 0, "inputs"),
    ]
