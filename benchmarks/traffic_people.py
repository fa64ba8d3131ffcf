"""Sessions that somebody uses: short turns, bursts, long breaks, stops, kills and deletions, all drawn from a seed.

A person writes, waits until everything that was accepted has come to its end, does something else. What each of them
does comes from the seed alone; how it interleaves is the machine's.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio

from hearth.client import Client, session_key
from hearth.errors import FAILED_CALLS, read_error
from hearth.paging import CALL_SECONDS
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from hearth.watch import Watch

PROJECT = "traffic"
# A turn that says so much by itself is cut off by whoever wanted to.
LONG = "stream 2000 words at 20/s"
# After that long without an ending something is wrong.
PATIENCE_SECONDS = 240.0
_ASK_AGAIN = 1.0
_ENDINGS = ("execution_completed", "execution_stopped", "execution_failed", "execution_lost", "execution_paused")
# What a call may be refused with because something else came first.
_RACES = frozenset({"EXECUTION_MISMATCH", "SESSION_NOT_FOUND"})
_T = TypeVar("_T")

_ACTS = {"talk": 62, "burst": 14, "stop": 10, "kill": 7, "delete": 7}


@dataclass(frozen=True, slots=True)
class Habits:
    """How people use their sessions. `window`: seconds for which a sandbox is kept; breaks are longer or shorter than
    that. `at_once`: how many of them act at one time, at most."""

    window: float
    at_once: int
    short_break: float = 0.6


@dataclass(slots=True)
class Story:
    """What is known of a session: the ids of accepted inputs, whether stops and kills were asked for, its log once it
    was read. One that was deleted in the middle of a turn has no log."""

    session: str
    accepted: list[str] = field(default_factory=list)
    stops: int = 0
    kills: int = 0
    deleted: bool = False
    log: list[event_pb2.Event] | None = None


@dataclass(slots=True)
class Diary:
    """What all of them did, and what they found wrong."""

    stories: list[Story] = field(default_factory=list)
    acts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Reader:
    """Follows the log of one session: what runs, and what of the accepted has not come to its end."""

    def __init__(self, client: Client, key: session_pb2.SessionKey) -> None:
        self.running = ""
        self.paused = False
        self._runs: dict[str, str] = {}
        self._over: set[str] = set()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read(client, key))

    def open(self, accepted: list[str]) -> bool:
        """Whether an accepted input has not come to its end."""
        return any(input_id not in self._over for input_id in accepted)

    async def change(self, seconds: float) -> None:
        """Return when something was read, or after that long."""
        if self._task.done():
            self._task.result()
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, client: Client, key: session_pb2.SessionKey) -> None:
        async for item in Watch(client.relays, key, events_only=True):
            if item.HasField("event"):
                self._take(item.event.event)
                self._changed.set()

    def _take(self, event: event_pb2.Event) -> None:
        if event.HasField("execution_started"):
            self.running = event.execution_id
            self.paused = False
            self._runs[event.execution_id] = event.execution_started.input_id
        elif event.HasField("input_removed"):
            self._over.add(event.input_removed.input_id)
        elif (kind := event.WhichOneof("body")) in _ENDINGS:
            self.running = ""
            # What waits goes on only after a turn that ended by itself.
            self.paused = kind != "execution_completed"
            self._over.add(self._runs.get(event.execution_id, ""))


class Person:
    """One of them. Their session is replaced by a new one when it was deleted."""

    def __init__(
        self, client: Client, diary: Diary, habits: Habits, number: int, seed: int, room: asyncio.Semaphore
    ) -> None:
        self._client = client
        self._diary = diary
        self._habits = habits
        self._number = number
        self._chance = random.Random(f"{seed} {number}")
        self._room = room
        self._sessions = 0
        self._begin()

    def _begin(self) -> None:
        self._sessions += 1
        name = f"s{self._number}-{self._sessions}"
        self._key = session_key(PROJECT, name)
        self._story = Story(name)
        self._diary.stories.append(self._story)
        self._reader: Reader | None = None

    async def live(self, done: asyncio.Event) -> None:
        """Use the session until told to stop, and then until all of it has ended."""
        # Not all at once.
        await self._pause(self._chance.uniform(0, 2 * self._habits.window), done)
        try:
            while not done.is_set():
                act = self._chance.choices(list(_ACTS), list(_ACTS.values()))[0]
                async with self._room:
                    if done.is_set():
                        break
                    self._diary.acts[act] += 1
                    await self._do(act, done)
                await self._rest(done)
        finally:
            if self._reader is not None:
                await self._reader.close()

    async def _rest(self, done: asyncio.Event) -> None:
        window, chance = self._habits.window, self._chance
        if chance.random() < self._habits.short_break:
            await self._pause(chance.uniform(0.05, 0.6) * window, done)
        else:
            self._diary.acts["long break"] += 1
            await self._pause(chance.uniform(1.1, 5.0) * window, done)

    async def _pause(self, seconds: float, done: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                await done.wait()
        except TimeoutError:
            return

    async def _do(self, act: str, done: asyncio.Event) -> None:
        chance = self._chance
        match act:
            case "talk":
                await self._send(f"hello {chance.randint(1, 999)}")
            case "burst":
                for number in range(chance.randint(2, 4)):
                    await self._send(f"stream {chance.randint(1, 10)} words\nburst {number}")
            case "stop":
                execution_id = await self._send(LONG)
                await self._pause(chance.uniform(0.0, 3.0), done)
                self._story.stops += 1
                await self._try(lambda: self._client.stop(self._key, execution_id=execution_id), "stop")
            case "kill":
                await self._send(LONG if chance.random() < 0.7 else "hello")
                await self._pause(chance.uniform(0.0, 3.0), done)
                self._story.kills += 1
                request = session_service_pb2.KillSessionRequest(session=self._key, request_id=str(uuid.uuid4()))
                await self._try(lambda: self._client.sessions.KillSession(request, timeout=CALL_SECONDS), "kill")
            case "delete":
                await self._send("hello")
                if chance.random() < 0.5:
                    await self._until_over()
                    self._story.log = await read_log(self._client, self._key)
                else:
                    await self._pause(chance.uniform(0.0, 3.0), done)
                await self._delete()
                return
        await self._until_over()

    async def _send(self, text: str) -> str:
        """Send a message; the execution that runs it at once, or nothing when it waits."""
        if self._reader is None:
            self._reader = Reader(self._client, self._key)
        request_id = str(uuid.uuid4())
        answer = await self._try(
            lambda: self._client.send(self._key, text, request_id=request_id, on_busy=sessions.ON_BUSY_QUEUE), "send"
        )
        if answer is None:
            return ""
        if answer.HasField("started"):
            self._story.accepted.append(answer.started.input_id)
            return answer.started.execution.execution_id
        self._story.accepted.append(answer.queued.input_id)
        return ""

    async def _delete(self) -> None:
        if self._reader is not None:
            await self._reader.close()
        request = session_service_pb2.DeleteSessionRequest(session=self._key, request_id=str(uuid.uuid4()))
        ends = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                await self._client.sessions.DeleteSession(request, timeout=2 * CALL_SECONDS)
                break
            except grpc.aio.AioRpcError as error:
                # Trouble of the provider is told, since the workspace has to be gone. Asked again, it goes on.
                refused = read_error(error)
                if time.monotonic() > ends:
                    self._wrong(f"is not deleted: {refused}")
                    break
                self._diary.acts[f"delete again after {refused.reason or refused.code.name}"] += 1
                await asyncio.sleep(_ASK_AGAIN)
        self._story.deleted = True
        self._begin()

    async def _until_over(self) -> None:
        """Return when everything that was accepted has ended; what waits behind a turn that was cut off goes on."""
        reader, ends = self._reader, time.monotonic() + PATIENCE_SECONDS
        assert reader is not None
        while reader.open(self._story.accepted):
            if time.monotonic() > ends:
                self._wrong(f"has an input without an end after {PATIENCE_SECONDS:.0f} s")
                await reader.close()
                self._begin()
                return
            if reader.paused and not reader.running:
                request = session_service_pb2.ResumeQueueRequest(session=self._key, request_id=str(uuid.uuid4()))
                await self._try(lambda: self._client.sessions.ResumeQueue(request, timeout=CALL_SECONDS), "resume")  # noqa: B023
            await reader.change(_ASK_AGAIN)

    async def _try(self, call: Callable[[], Awaitable[_T]], what: str) -> _T | None:
        try:
            return await call()
        except FAILED_CALLS as error:
            refused = read_error(error)
            if refused.reason not in _RACES:
                self._wrong(f"{what} was refused: {refused}")
            return None

    def _wrong(self, what: str) -> None:
        self._diary.problems.append(f"session {self._story.session} {what}")


async def use(
    client: Client, diary: Diary, habits: Habits, *, people: int, seed: int, enough: Callable[[], Awaitable[None]]
) -> None:
    """Let so many people use sessions until `enough` returns, and then until everything they began has ended; their
    logs are read in the end."""
    done = asyncio.Event()
    room = asyncio.Semaphore(habits.at_once)
    async with asyncio.TaskGroup() as group:
        for number in range(people):
            group.create_task(Person(client, diary, habits, number, seed, room).live(done))
        await enough()
        done.set()
    for story in diary.stories:
        if not story.deleted and story.accepted:
            story.log = await read_log(client, session_key(PROJECT, story.session))


async def read_log(client: Client, key: session_pb2.SessionKey) -> list[event_pb2.Event]:
    """The whole log of a session."""
    return [item.event async for item in client.history(key)]
