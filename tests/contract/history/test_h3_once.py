"""H3: a reader that obeys the cursor rule applies each event once, over reconnects, replicas and retries."""

from __future__ import annotations

import asyncio
import random

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import session_pb2
from tests.checkers import check
from tests.support import events
from tests.support.history_client import Client
from tests.support.recording import Connection, Log, Reader, Recording

TOTAL = 150


class Applier:
    """Applies what is delivered, and forgets its stream again and again; only a delivered event moves its cursor."""

    def __init__(self, clients: list[Client], seed: int) -> None:
        self._clients = clients
        self._random = random.Random(seed)
        self._cursor = session_pb2.Cursor()
        self.applied = 0
        self.connections: list[Connection] = []

    async def follow(self, session: session_pb2.SessionKey) -> None:
        while self.applied < TOTAL:
            client = self._random.choice(self._clients)
            if self._random.random() < 0.5:
                found = list((await client.page(session, self._cursor, self._random.randint(1, 40))).events)
            else:
                found = [item for chunk in await client.chunks(session, self._cursor) for item in chunk.events]
            # The connection breaks somewhere inside of what was on its way.
            taken = found[: self._random.randint(0, len(found))]
            self.connections.append(Connection(self._cursor, [relay_pb2.Item(event=item) for item in taken]))
            for item in taken:
                self.applied += 1
                self._cursor = item.cursor


async def test_readers_that_reconnect_everywhere_apply_everything_once(history: Client, other: Client) -> None:
    session = events.key()
    appliers = [Applier([history, other], seed) for seed in range(4)]

    async def write(client: Client) -> None:
        for _ in range(TOTAL // 2):
            event = events.user_message()
            await client.accepted(session, event)
            await asyncio.gather(history.append(session, event), other.append(session, event))

    await asyncio.gather(write(history), write(other), *(applier.follow(session) for applier in appliers))
    key = (session.project, session.session)
    readers = [Reader(key, applier.connections, caught_up=True) for applier in appliers]
    looked = check(Recording(readers=readers, logs={key: Log(await history.read(session))}))
    assert looked["H3"] == 5 * TOTAL
