"""Readers that obey the cursor rule, come back by themselves, and load anew when the log is another one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc.aio

from hearth.types.v1 import session_pb2
from hearth.watch import RESUMABLE
from tests.faults.restored import RELOAD
from tests.support.recording import Connection, Key, Reader
from tests.support.relay_reader import StrictReader

_PAUSE_SECONDS = 0.1


class Follower:
    """One reader of one session. `lives` are what it got, anew after each time that it had to load again."""

    def __init__(
        self,
        key: Key,
        channels: Sequence[grpc.aio.Channel],
        chance: random.Random,
        *,
        after: session_pb2.Cursor | None = None,
        tail: bool = False,
    ) -> None:
        self.key = key
        self.lives: list[Reader] = []
        self.failure = ""
        self._session = session_pb2.SessionKey(project=key[0], session=key[1])
        self._channels = channels
        self._chance = chance
        self._begin(StrictReader(channels[0], self._session, after=after, tail=tail))
        self._task = asyncio.create_task(self._follow(), name=f"follower of {key[1]}")

    @property
    def sequence(self) -> int:
        """The last event that it has."""
        return self._reader.cursor.sequence if self._reader.cursor is not None else 0

    @property
    def connections(self) -> list[Connection]:
        """All it got."""
        return [connection for life in self.lives for connection in life.connections]

    async def leave(self) -> None:
        """Go away."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._reader.disconnect()
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    async def catch_up(self, sequence: int) -> None:
        """Return when it has everything up to `sequence`, or cannot get it."""
        while self.sequence < sequence and not self._task.done():  # noqa: ASYNC110 - its stream changes without a word
            await asyncio.sleep(0.02)
        if self.sequence >= sequence:
            self.lives[-1].caught_up = True

    def _begin(self, reader: StrictReader) -> None:
        self._reader = reader
        self.lives.append(Reader(self.key, reader.recording))

    async def _follow(self) -> None:
        while True:
            self._reader.use(self._chance.choice(self._channels))
            self._reader.connect()
            await self._reader.over()
            refusal = self._reader.recording[-1].refusal
            if refusal is not None and refusal.reason in RELOAD:
                self._begin(StrictReader(self._channels[0], self._session))
            elif self._reader.error is None or self._reader.error.code() not in RESUMABLE:
                self.failure = f"a reader of {self.key[1]} was turned away: {self._reader.error!r}"
                return
            await asyncio.sleep(_PAUSE_SECONDS * self._chance.uniform(0.5, 1.5))


class Audience:
    """Readers of many sessions: one of each that stays, and others that come and go."""

    def __init__(self, keys: Sequence[Key], channels: Sequence[grpc.aio.Channel], chance: random.Random) -> None:
        self._keys = keys
        self._channels = channels
        self._chance = chance
        self.staying = [Follower(key, channels, chance) for key in keys]
        self.gone: list[Follower] = []
        self._visitors = asyncio.create_task(self._receive_visitors(), name="visitors")

    @property
    def all(self) -> list[Follower]:
        """Everybody who ever read."""
        return [*self.staying, *self.gone]

    @property
    def delivered(self) -> int:
        """Events that those who stay have."""
        return sum(follower.sequence for follower in self.staying)

    async def end_visits(self) -> None:
        """No visitors any more."""
        self._visitors.cancel()
        await asyncio.wait([self._visitors])
        if not self._visitors.cancelled() and (error := self._visitors.exception()) is not None:
            raise error

    async def leave(self) -> None:
        """Everybody goes."""
        for follower in self.staying:
            await follower.leave()

    async def _receive_visitors(self) -> None:
        while True:
            visitor = self._visitor()
            try:
                await asyncio.sleep(self._chance.uniform(0.2, 3.0))
            finally:
                await visitor.leave()
                self.gone.append(visitor)

    def _visitor(self) -> Follower:
        """Somebody who comes for the beginning, for the end, or with a cursor from before."""
        key = self._chance.choice(self._keys)
        match self._chance.choice(["start", "tail", "cursor"]):
            case "start":
                return Follower(key, self._channels, self._chance)
            case "tail":
                return Follower(key, self._channels, self._chance, tail=True)
        known = next(follower for follower in self.staying if follower.key == key)
        cursors = [item.cursor for connection in known.lives[-1].connections for item in connection.events[-50:]]
        return Follower(key, self._channels, self._chance, after=self._chance.choice(cursors) if cursors else None)
