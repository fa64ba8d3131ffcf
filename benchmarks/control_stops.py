"""Stops: from the request to the agent, to the settled ending, and what the next turn finds.

A turn streams, somebody stops it, the same session goes on with another turn at once. The agent writes down when it was
told to stop, the trace of the turn says when it was settled; all clocks are that of this machine.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import control_streams, machine, warm_turns
from benchmarks.control_streams import PROJECT, Prompted, shares
from benchmarks.figures import Figures, latency
from benchmarks.report import Target, least, most
from benchmarks.rig import Rig
from benchmarks.runs import Part
from benchmarks.warm_turns import House, ending_of
from hearth.client import Client, session_key
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2

RATE = 75.0
_TURN_SECONDS = 60.0
_TRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.05
# Somebody reads a little before they stop it: so many frames, then up to so many seconds.
_FRAMES_BEFORE = 5
_MOST_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """`stops` over `sessions` that take turns, while `streams` other sessions stream."""

    stops: int = 200
    sessions: int = 4
    streams: int = 20
    seed: int = 1


QUICK = Shape(stops=6, sessions=2, streams=2)


@dataclass(slots=True)
class Stop:
    """One Stop. `asked` and `seen` (its ending at the reader) are nanoseconds since 1970; `how` is how the turn after
    it was got."""

    execution_id: str
    asked: int
    seen: int
    ending: str
    outcome: str
    how: str
    after: str


class Talk:
    """One session and its reader, for `async with`: frames counted by execution, endings by execution."""

    def __init__(self, client: Client, name: str) -> None:
        self.key = session_key(PROJECT, name)
        self._client = client
        self._frames: Counter[str] = Counter()
        self._endings: dict[str, tuple[event_pb2.Event, int]] = {}
        self._changed = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Talk:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def send(self, text: str) -> str:
        """Send a message that starts at once; its execution."""
        answer = await self._client.send(self.key, text)
        return answer.started.execution.execution_id

    async def frames(self, execution_id: str, count: int) -> None:
        """Wait until so many frames of an execution have come, or its ending."""
        async with asyncio.timeout(_TURN_SECONDS), self._changed:
            await self._changed.wait_for(lambda: self._frames[execution_id] >= count or execution_id in self._endings)

    async def ending(self, execution_id: str, seconds: float = _TURN_SECONDS) -> tuple[event_pb2.Event, int]:
        """The ending of an execution, and when it came."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: execution_id in self._endings)
            return self._endings[execution_id]

    async def _read(self) -> None:
        async for item in self._client.watch(self.key):
            async with self._changed:
                if item.HasField("frame"):
                    # Stages of the turn are frames too, and come before the agent was asked.
                    self._frames[item.frame.execution_id] += item.frame.frame.HasField("text_delta")
                elif item.HasField("event") and ending_of(item.event.event):
                    self._endings[item.event.event.execution_id] = item.event.event, time.time_ns()
                else:
                    continue
                self._changed.notify_all()


async def measure(rig: Rig, house: House, journal: Path, shape: Shape) -> Part:
    """All stops, one at a time."""
    chance = random.Random(shape.seed)
    names = [f"stop-{number}-{uuid.uuid4().hex[:6]}" for number in range(shape.sessions)]
    stops: list[Stop] = []
    async with control_streams.streaming(house, control_streams.names(shape.streams), RATE) as streamed:
        with machine.measured(rig.pids(*house.services.values())) as usage:
            for name in names:
                async with Talk(house.client, name) as talk:
                    first = await talk.send("hello")
                    await talk.ending(first)
                    for _ in range(shape.stops // shape.sessions):
                        stops.append(await _one(house.client, talk, chance))
    settled = await _settled([stop.execution_id for stop in stops], house.trace_file)
    asked = {prompt.execution_id: prompt for prompt in await asyncio.to_thread(control_streams.read_journal, journal)}
    problems = [*streamed.problems, *check(stops, asked, settled)]
    if problems:
        return Part({}, usage.others_cores, problems)
    figures = figures_of(stops, asked, settled)
    figures |= {
        "streamed_frames_per_s": streamed.per_second,
        "streamed_share": streamed.per_second / max(shape.streams * RATE, 1.0),
        "streamed_gaps": streamed.gaps,
    }
    figures |= {f"{name}_cores": seconds / usage.seconds for name, seconds in usage.cpu.items()}
    return Part(figures, usage.others_cores)


async def _one(client: Client, talk: Talk, chance: random.Random) -> Stop:
    execution_id = await talk.send(f"stream 3000 words at {RATE:g}/s")
    await talk.frames(execution_id, _FRAMES_BEFORE)
    await asyncio.sleep(chance.uniform(0, _MOST_PAUSE))
    asked = time.time_ns()
    command = await client.stop(talk.key, execution_id=execution_id)
    event, seen = await talk.ending(execution_id)
    after = await talk.send("hello")
    next_event, _ = await talk.ending(after)
    command = await client.get_command(talk.key, command.command_id)
    return Stop(
        execution_id,
        asked,
        seen,
        ending_of(event),
        control_pb2.CommandOutcome.Name(command.outcome).removeprefix("COMMAND_OUTCOME_"),
        getattr(next_event, ending_of(next_event)).summary.how,
        ending_of(next_event),
    )


async def _settled(executions: Sequence[str], trace_file: Path) -> dict[str, int]:
    """When each was settled; spans reach the file a moment after they ended."""
    ends = time.monotonic() + _TRACE_SECONDS
    while True:
        text = await asyncio.to_thread(trace_file.read_text)
        found = warm_turns.settlements(text[: text.rfind("\n") + 1].splitlines())
        if set(executions) <= found.keys() or time.monotonic() > ends:
            return found
        await asyncio.sleep(_LOOK_SECONDS)


def check(stops: Sequence[Stop], asked: Mapping[str, Prompted], settled: Mapping[str, int]) -> list[str]:
    """What is wrong with stops of turns that would have gone on for long. Pure."""
    problems = []
    for stop in stops:
        prompt = asked.get(stop.execution_id)
        if stop.ending != "execution_stopped":
            problems.append(f"a stopped turn ended as {stop.ending}")
        elif stop.outcome != "STOPPED":
            problems.append(f"a Stop came out as {stop.outcome}")
        elif stop.after != "execution_completed":
            problems.append(f"the turn after a Stop ended as {stop.after}")
        elif prompt is None or not prompt.cancelled:
            problems.append("an agent did not hear of a Stop")
        elif not prompt.at < stop.asked / 1e9 < prompt.cancelled:
            problems.append("an agent heard of a Stop before it was asked for")
        elif stop.execution_id not in settled:
            problems.append("a stopped turn was not settled")
    return problems


def figures_of(stops: Sequence[Stop], asked: Mapping[str, Prompted], settled: Mapping[str, int]) -> Figures:
    """Latencies from the request, and how the next turns were got. Pure."""
    hows = Counter(stop.how for stop in stops)
    return {
        **latency("stop_to_cancel_", [asked[stop.execution_id].cancelled - stop.asked / 1e9 for stop in stops]),
        **latency("stop_to_settled_", [(settled[stop.execution_id] - stop.asked) / 1e9 for stop in stops]),
        **latency("stop_to_reader_", [(stop.seen - stop.asked) / 1e9 for stop in stops]),
        "warm_after_stop": shares(hows, "warm"),
        "stops": len(stops),
    }


def targets(figures: Mapping[str, float]) -> list[Target]:
    """What must be reached."""
    return [
        most(figures, "stop_to_cancel_p50_ms", 20, "ms"),
        most(figures, "stop_to_cancel_p99_ms", 80, "ms"),
        most(figures, "stop_to_settled_p99_ms", 200, "ms"),
        least(figures, "warm_after_stop", 0.99, "of the turns after a Stop"),
        least(figures, "streamed_share", 0.95, "of the frames that were to stream"),
    ]
