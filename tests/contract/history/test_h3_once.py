"""H3: a reader that obeys the cursor rule applies each event once, over reconnects, replicas and retries."""

from __future__ import annotations

import asyncio
import random

import pytest

from hearth.types.v1 import session_pb2
from tests.contract.history import checks
from tests.support import events
from tests.support.history_client import Client, ids

TOTAL = 150


class Reader:
    """Applies what is delivered, and forgets its stream again and again; only a delivered event moves its cursor."""

    def __init__(self, clients: list[Client], seed: int) -> None:
        self._clients = clients
        self._random = random.Random(seed)
        self._cursor: session_pb2.Cursor | None = None
        self.applied: list[str] = []

    async def follow(self, session: session_pb2.SessionKey) -> None:
        while len(self.applied) < TOTAL:
            client = self._random.choice(self._clients)
            if self._random.random() < 0.5:
                found = list((await client.page(session, self._cursor, self._random.randint(1, 40))).events)
            else:
                found = [item for chunk in await client.chunks(session, self._cursor) for item in chunk.events]
            # The connection breaks somewhere inside of what was on its way.
            for item in found[: self._random.randint(0, len(found))]:
                self.applied.append(item.event.event_id)
                self._cursor = item.cursor


async def test_readers_that_reconnect_everywhere_apply_everything_once(history: Client, other: Client) -> None:
    session = events.key()
    readers = [Reader([history, other], seed) for seed in range(4)]

    async def write(client: Client) -> None:
        for _ in range(TOTAL // 2):
            event = events.user_message()
            await client.accepted(session, event)
            await asyncio.gather(history.append(session, event), other.append(session, event))

    await asyncio.gather(write(history), write(other), *(reader.follow(session) for reader in readers))
    log = ids(await history.read(session))
    for reader in readers:
        checks.once(log, reader.applied)


def test_the_check_sees_a_loss_a_repetition_and_a_swap() -> None:
    log = ["a", "b", "c"]
    for applied in (["a", "c"], ["a", "b", "b", "c"], ["a", "c", "b"], ["a", "b"]):
        with pytest.raises(AssertionError):
            checks.once(log, applied)
