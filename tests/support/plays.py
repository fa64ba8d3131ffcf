"""Plans of steps, and playing them in a `World`: whole runs of which nobody chose the course, for the checkers.

A plan is plain values. What a step means depends on its numbers alone, whatever the services do, so a plan can be made
by anybody, printed and played again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from tests.checkers import check
from tests.support.recording import Recording
from tests.support.targets import Target
from tests.support.world import World

# Steps of a few milliseconds, a restart now and then: a play that takes this long hangs.
PLAY_SECONDS = 300.0
MAX_SESSIONS = 3
MAX_READERS = 8
# The numbers of a step are below this.
NUMBERS = 1_000

_PACES = (0.0, 0.001, 0.004, 0.02)
_WAITS = (0.0, 0.02, 0.1, 0.5)


class Step(NamedTuple):
    """What to do, with three numbers that say to whom and how much; any number means something."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


# How often a step comes, beside the others.
WEIGHTS = {
    "wait": 8,
    "open conversation": 2,
    "begin": 6,
    "again": 3,
    "take over": 2,
    "say": 18,
    "complete": 8,
    "chat": 18,
    "use tools": 6,
    "end": 5,
    "state fact": 5,
    "resend": 4,
    "alter": 3,
    "end wrongly": 3,
    "intrude": 3,
    "output of the past": 4,
    "repeat frames": 3,
    "send malformed": 3,
    "mark incomplete": 3,
    "trim": 2,
    "join": 12,
    "leave": 3,
    "come back": 4,
    "stall": 3,
    "go on": 4,
    "read": 6,
}


def kinds(weights: Mapping[str, int]) -> list[str]:
    """Each kind as often as its weight, to pick from."""
    return [kind for kind, weight in weights.items() for _ in range(weight)]


def random_plan(seed: int, length: int) -> list[Step]:
    """A plan in which nothing breaks."""
    dice = random.Random(seed)
    return [Step(dice.choice(kinds(WEIGHTS)), *(dice.randrange(NUMBERS) for _ in range(3))) for _ in range(length)]


@dataclass
class Tally:
    """What all plays together did and saw."""

    plays: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    # Outcomes of appends and publishes, kinds of items, reasons of refusals.
    saw: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)

    def add(self, recording: Recording, checked: Mapping[str, int]) -> None:
        """Count a play."""
        self.plays += 1
        self.checked.update(checked)
        for append in recording.appends:
            if append.result is None:
                self.saw["unanswered"] += 1
                continue
            name = history_pb2.AppendOutcome.Name(append.result.outcome)
            self.saw[name.removeprefix("APPEND_OUTCOME_").lower()] += 1
        self.saw["trimmed"] += sum(bool(trim.answered) for trim in recording.trims)
        self.saw["marked"] += sum(mark.entry is not None for mark in recording.marks)
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

    def __str__(self) -> str:
        lines = [
            f"{title}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
            for title, counts in (("steps", self.steps), ("saw", self.saw), ("looked at", self.checked))
        ]
        return "\n".join([f"{self.plays} plays", *lines])


class Play:
    """Plays one plan to its end, on services that nobody breaks."""

    def __init__(self, target: Target, tally: Tally) -> None:
        self.world = World(target)
        self._tally = tally

    async def play(self, plan: Sequence[Step]) -> None:
        """Raise AssertionError with the story when a guarantee does not hold, or something never comes to its end."""
        try:
            async with asyncio.timeout(PLAY_SECONDS), self.world:
                try:
                    await self.world.open_conversation()
                    for step in plan:
                        await self.act(step)
                        self._tally.steps[step.kind] += 1
                        # Lets what was begun get somewhere, and mostly not to its end.
                        await asyncio.sleep(_PACES[step.c % len(_PACES)])
                finally:
                    await self.stop_breaking()
                recording = await self.world.settle()
                self._tally.add(recording, check(recording))
        except (AssertionError, TimeoutError) as error:
            story = "\n".join(self.world.story)
            raise AssertionError(f"{type(error).__name__}: {error}\n\nwhat was done:\n{story}") from error

    async def act(self, step: Step) -> None:
        """Take one step."""
        await _STEPS[step.kind](self, step)

    async def stop_breaking(self) -> None:
        """Everything is to be there again."""

    async def open_conversation(self) -> None:
        """Another session, up to a few."""
        if len(self.world.conversations) < MAX_SESSIONS:
            await self.world.open_conversation()

    async def chat(self, turn: int, pieces: int, times: int) -> None:
        """Many short messages in a row."""
        for _ in range(times):
            await self.world.say(turn, pieces)
            await self.world.complete(turn)
            await asyncio.sleep(0)

    async def join(self, step: Step) -> None:
        """Another reader, up to a few; one of five wants no frames."""
        if len(self.world.followers) < MAX_READERS:
            await self.world.join(step.a, step.b, start=step.c % 20, events_only=step.c % 5 == 4)

    async def wait(self, which: int) -> None:
        """Let some time pass."""
        await asyncio.sleep(_WAITS[which % len(_WAITS)])


_STEPS: dict[str, Callable[[Play, Step], Coroutine[object, object, None]]] = {
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
    "mark incomplete": lambda play, step: play.world.mark_incomplete(step.a, step.b),
    "trim": lambda play, step: play.world.trim(step.a, step.b, step.c),
    "join": lambda play, step: play.join(step),
    "leave": lambda play, step: play.world.leave(step.a),
    "come back": lambda play, step: play.world.come_back(step.a),
    "stall": lambda play, step: play.world.stall(step.a),
    "go on": lambda play, step: play.world.go_on(step.a),
    "read": lambda play, step: play.world.read(step.a, step.b, step.c, step.c % 8),
}
