"""One play: a plan of steps, played on real services that break meanwhile, and what every checker says of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import redis.asyncio

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from tests.checkers import check
from tests.support.processes import ServiceProcess
from tests.support.recording import Recording
from tests.support.targets import Replicas
from tests.support.world import World

# Steps of a few milliseconds, a restart now and then: a play that takes this long hangs.
PLAY_SECONDS = 300.0
MAX_SESSIONS = 3
MAX_READERS = 8

_PACES = (0.0, 0.001, 0.004, 0.02)
_WAITS = (0.0, 0.02, 0.1, 0.5)


class Step(NamedTuple):
    """What to do, with three numbers that say to whom and how much; any number means something."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass
class House:
    """The services of all plays, and what all plays together saw."""

    replicas: Replicas
    valkey_url: str
    checked: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    # Outcomes of appends and publishes, kinds of items, reasons of refusals.
    saw: Counter[str] = field(default_factory=Counter)
    plays: int = 0

    def count(self, recording: Recording) -> None:
        """Add up what a play saw."""
        for append in recording.appends:
            if append.result is None:
                self.saw["unanswered"] += 1
                continue
            name = history_pb2.AppendOutcome.Name(append.result.outcome)
            self.saw[name.removeprefix("APPEND_OUTCOME_").lower()] += 1
        for publish in recording.publishes:
            if publish.result is not None:
                name = relay_pb2.PublishOutcome.Name(publish.result.outcome)
                self.saw[f"frames {name.removeprefix('PUBLISH_OUTCOME_').lower()}"] += 1
        for reader in recording.readers:
            for connection in reader.connections:
                self.saw["connections"] += 1
                self.saw.update(item.WhichOneof("item") or "" for item in connection.items)
                if connection.refusal is not None:
                    self.saw[connection.refusal.reason or connection.refusal.code.name] += 1


class Play:
    """Plays one plan to its end."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._world = World(house.replicas.target)
        self._restarts: dict[ServiceProcess, asyncio.Task[None]] = {}

    async def play(self, plan: Sequence[Step]) -> None:
        """Raise AssertionError with the story when a guarantee does not hold, or something never comes to its end."""
        try:
            async with asyncio.timeout(PLAY_SECONDS), self._world:
                try:
                    await self._acts(plan)
                finally:
                    await self._all_back()
        except (AssertionError, TimeoutError) as error:
            story = "\n".join(self._world.story)
            raise AssertionError(f"{type(error).__name__}: {error}\n\nwhat was done:\n{story}") from error

    async def _acts(self, plan: Sequence[Step]) -> None:
        await self._world.open_conversation()
        for step in plan:
            await STEPS[step.kind](self, step)
            self._house.steps[step.kind] += 1
            # Lets what was begun get somewhere, and mostly not to its end.
            await asyncio.sleep(_PACES[step.c % len(_PACES)])
        await self._all_back()
        recording = await self._world.settle()
        self._house.checked.update(check(recording))
        self._house.count(recording)
        self._house.plays += 1

    async def open_conversation(self) -> None:
        """Another session, up to a few."""
        if len(self._world.conversations) < MAX_SESSIONS:
            await self._world.open_conversation()

    async def chat(self, turn: int, pieces: int, times: int) -> None:
        """Many short messages in a row."""
        for _ in range(times):
            await self._world.say(turn, pieces)
            await self._world.complete(turn)
            await asyncio.sleep(0)

    async def join(self, step: Step) -> None:
        """Another reader, up to a few; one of five wants no frames."""
        if len(self._world.followers) < MAX_READERS:
            await self._world.join(step.a, step.b, start=step.c % 20, events_only=step.c % 5 == 4)

    async def wait(self, which: int) -> None:
        """Let some time pass."""
        await asyncio.sleep(_WAITS[which % len(_WAITS)])

    async def restart(self, which: int, *, kill: bool) -> None:
        """End one of the services and bring it back, while the play goes on."""
        processes = self._house.replicas.all
        process = processes[which % len(processes)]
        pending = self._restarts.pop(process, None)
        if pending is not None:
            await pending
        self._world.tell(f"{'kill' if kill else 'end'} {process.module} at {process.address}")
        begun = time.monotonic()
        if kill:
            await asyncio.to_thread(process.kill9)
        self._restarts[process] = asyncio.create_task(self._come_back(process, begun, killed=kill))

    async def _come_back(self, process: ServiceProcess, begun: float, *, killed: bool) -> None:
        if not killed:
            code = await process.terminate()
            assert code == 0, f"{process.module} ended with {code}:\n{process.log_tail()}"
        await process.start()
        self._world.tell(f"{process.module} at {process.address} is back")
        self._world.recording.outages.append((begun, time.monotonic()))

    async def empty_the_bus(self) -> None:
        """FLUSHALL."""
        self._world.tell("FLUSHALL")
        async with redis.asyncio.Redis.from_url(self._house.valkey_url) as client:
            await client.flushall()

    async def _all_back(self) -> None:
        restarts, self._restarts = list(self._restarts.values()), {}
        await asyncio.gather(*restarts)

    @property
    def world(self) -> World:
        """Where it is played."""
        return self._world


STEPS: dict[str, Callable[[Play, Step], Coroutine[object, object, None]]] = {
    "wait": lambda play, step: play.wait(step.a),
    "open conversation": lambda play, step: play.open_conversation(),
    "begin": lambda play, step: play.world.begin(step.a, step.b),
    "again": lambda play, step: play.world.again(step.a, step.b),
    "take over": lambda play, step: play.world.take_over(step.a, step.b),
    "say": lambda play, step: play.world.say(step.a, 1 + step.b % 40),
    "complete": lambda play, step: play.world.complete(step.a),
    "chat": lambda play, step: play.chat(step.a, 1 + step.b % 5, 2 + step.c % 10),
    "use tools": lambda play, step: play.world.use_tools(step.a, 1 + step.b % 3),
    "end": lambda play, step: play.world.end(step.a, with_last=step.b % 2 == 1),
    "state fact": lambda play, step: play.world.state_fact(step.a, step.b),
    "resend": lambda play, step: play.world.resend(step.a, step.b, altered=False),
    "alter": lambda play, step: play.world.resend(step.a, step.b, altered=True),
    "end wrongly": lambda play, step: play.world.end_wrongly(step.a, step.b, step.c % 3),
    "intrude": lambda play, step: play.world.intrude(step.a, step.b, step.c % 3),
    "output of the past": lambda play, step: play.world.output_of_the_past(step.b),
    "repeat frames": lambda play, step: play.world.repeat_frames(step.a, step.b),
    "send malformed": lambda play, step: play.world.send_malformed(step.a, step.b),
    "join": lambda play, step: play.join(step),
    "leave": lambda play, step: play.world.leave(step.a),
    "come back": lambda play, step: play.world.come_back(step.a),
    "stall": lambda play, step: play.world.stall(step.a),
    "go on": lambda play, step: play.world.go_on(step.a),
    "read": lambda play, step: play.world.read(step.a, step.b, step.c, step.c % 8),
    "kill": lambda play, step: play.restart(step.a, kill=True),
    "end process": lambda play, step: play.restart(step.a, kill=False),
    "empty the bus": lambda play, step: play.empty_the_bus(),
}
