"""Postgres is gone for a while under load: nothing is taken over, nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc.aio

from benchmarks import control_streams, machine, warm_turns
from benchmarks.control_streams import PROJECT
from benchmarks.figures import Figures
from benchmarks.report import Target, least, most
from benchmarks.rig import Rig
from benchmarks.runs import Part
from benchmarks.warm_turns import House, ending_of
from hearth.client import session_key
from hearth.errors import CallError
from hearth.types.v1 import session_pb2

_AGAIN_SECONDS = 0.2
_BEFORE_SECONDS = 3.0
_PATIENCE_SECONDS = 120.0
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Shape:
    """`streams` sessions stream at `rate` and `talkers` send short turns one after the other, through `away` seconds
    without Postgres and until they were answered once more; as many others send their first message meanwhile."""

    away: float = 60.0
    streams: int = 5
    rate: float = 75.0
    talkers: int = 5
    pools: int = 2


QUICK = Shape(away=4.0, streams=2, talkers=2)


@dataclass(slots=True)
class Talked:
    """What one person did: the executions of their messages, and how often they had to send one again."""

    key: session_pb2.SessionKey
    executions: list[str] = field(default_factory=list)
    refused: int = 0
    back: float = 0.0


async def part(rig: Rig, shape: Shape) -> Part:
    """The whole of it on a house of its own, with the default settings."""
    room = {"HEARTH_LOCAL_WARM_CAP": str(shape.talkers)}
    async with warm_turns.house(rig, shape.pools, **room) as house:
        names = control_streams.names(shape.streams)
        streams = [session_key(PROJECT, name) for name in names]
        async with control_streams.streaming(house, names, shape.rate) as streamed:
            before = {key.session: (await house.client.get_session(key)).execution for key in streams}
            with machine.measured(rig.pids(*house.services.values())) as usage:
                talked = await _talk_through(rig, house, shape)
            problems = []
            for key in streams:
                now = (await house.client.get_session(key)).execution
                was = before[key.session]
                if (now.execution_id, now.epoch, now.state) != (was.execution_id, was.epoch, was.state):
                    problems.append(f"{key.session} is not in the turn any more that it was in")
        endings, started = await _endings(house, [*streams, *(one.key for one in talked)])
    problems += [*streamed.problems, *check(talked, endings, started)]
    figures: Figures = {
        "away_turns": sum(len(one.executions) for one in talked),
        "away_refused_sends": sum(one.refused for one in talked),
        "away_lost": sum(ending == ["execution_lost"] for ending in endings.values()),
        "away_taken_over": sum(count > 1 for count in started.values()),
        "away_back_most_s": max(one.back for one in talked),
        "away_streamed_frames": streamed.frames,
        "away_streamed_gaps": streamed.gaps,
    }
    return Part(figures, usage.others_cores, problems)


async def _talk_through(rig: Rig, house: House, shape: Shape) -> list[Talked]:
    back = asyncio.Event()
    returned = 0.0

    async def talk(number: int) -> Talked:
        talked = Talked(session_key(PROJECT, f"talk-{number}-{uuid.uuid4().hex[:6]}"))
        while not back.is_set():
            await _turn(house, talked, shape)
        # And once more, as whoever comes after.
        await _turn(house, talked, shape)
        talked.back = time.monotonic() - returned
        return talked

    async def knock(number: int) -> Talked:
        talked = Talked(session_key(PROJECT, f"knock-{number}-{uuid.uuid4().hex[:6]}"))
        await _turn(house, talked, shape)
        talked.back = time.monotonic() - returned
        return talked

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(talk(number)) for number in range(shape.talkers)]
        await asyncio.sleep(_BEFORE_SECONDS)
        async with rig.without_postgres():
            # Who talks waits for an ending that cannot be written; only who comes now is refused.
            tasks += [group.create_task(knock(number)) for number in range(shape.talkers)]
            await asyncio.sleep(shape.away)
        returned = time.monotonic()
        back.set()
    return [task.result() for task in tasks]


async def _turn(house: House, talked: Talked, shape: Shape) -> None:
    """Send a message, again and again under one request id until it is accepted, and wait for its ending."""
    request_id = str(uuid.uuid4())
    ends = time.monotonic() + shape.away + _PATIENCE_SECONDS
    while True:
        try:
            answer = await house.client.send(talked.key, "stream 20 words at 50/s", request_id=request_id)
            break
        except CallError as error:
            if error.code not in _GONE or time.monotonic() > ends:
                raise
            talked.refused += 1
            await asyncio.sleep(_AGAIN_SECONDS)
    # Behind a turn that is not settled yet a message waits for a moment.
    execution_id, input_id = answer.started.execution.execution_id, answer.queued.input_id
    async with asyncio.timeout(shape.away + _PATIENCE_SECONDS):
        async for item in house.client.watch(talked.key, events_only=True):
            event = item.event.event
            if event.HasField("input_promoted") and event.input_promoted.input_id == input_id:
                execution_id = event.input_promoted.execution_id
            if execution_id and event.execution_id == execution_id and ending_of(event):
                break
    talked.executions.append(execution_id)


async def _endings(house: House, keys: list[session_pb2.SessionKey]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The endings of every execution in these logs, and how often each was opened."""
    endings: dict[str, list[str]] = {}
    started: Counter[str] = Counter()
    for key in keys:
        async for item in house.client.history(key):
            event = item.event
            if event.HasField("execution_started"):
                started[event.execution_id] += 1
            elif ending := ending_of(event):
                endings.setdefault(event.execution_id, []).append(ending)
    return endings, started


def check(talked: list[Talked], endings: Mapping[str, list[str]], started: Mapping[str, int]) -> list[str]:
    """What is wrong with turns that a database which was away for a while must not have harmed. Pure."""
    problems = []
    for one in talked:
        for execution_id in one.executions:
            if endings.get(execution_id) != ["execution_completed"]:
                problems.append(f"an accepted message ended as {endings.get(execution_id)}")
            elif started.get(execution_id) != 1:
                problems.append("a message was started again")
    return problems


def targets(figures: Mapping[str, float]) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "away_lost", 0, "turns"),
        most(figures, "away_taken_over", 0, "turns"),
        # Else nobody came while it was away.
        least(figures, "away_refused_sends", 1, "refused sends"),
    ]
