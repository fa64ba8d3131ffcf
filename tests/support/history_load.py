"""Producers that keep history busy while it is being killed, and the check that nothing acknowledged was lost.

Each session is written by one pusher, pipelined on a stream of its own. What is acknowledged goes to a file first, with
fsync; a stream that breaks is opened again, and everything from its first unacknowledged request on is sent again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from tests.support import events
from tests.support.history_client import APPENDED, DUPLICATE, Client

_WINDOW = 8
_PAUSE_SECONDS = 0.05
# What a producer sends again for: the service or its database is away.
_AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}

# What gRPC makes of a write whose connection is gone: it asks for no status then.
_BROKEN_WRITE = "Internal error from Core"


@dataclass
class Pusher:
    """Writes one execution of one session until told to stop, then its ending."""

    address: Callable[[], str]
    log: Path
    session: session_pb2.SessionKey = field(default_factory=events.key)
    run: events.Run = field(default_factory=events.Run)
    acknowledged: int = 0
    sent: list[event_pb2.Event] = field(default_factory=list)
    retried: int = 0
    _waiting: deque[event_pb2.Event] = field(default_factory=deque)
    _ended: bool = False

    async def push(self, stop: asyncio.Event) -> None:
        """Return when everything, the ending too, is acknowledged."""
        self._waiting.append(self._keep(self.run.started()))
        while self._waiting or not self._ended:
            async with grpc.aio.insecure_channel(self.address()) as channel:
                call = Client(channel).stub.AppendStream()
                try:
                    await self._use(call, stop)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    code, details = await call.code(), await call.details()
                    assert code in _AGAIN or details == _BROKEN_WRITE, (code, details)
                    self.retried += 1
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _use(self, call: Any, stop: asyncio.Event) -> None:
        """Use one stream: send again what waits, then go on until all is answered."""
        sent = number = 0
        while self._waiting or not self._ended:
            if len(self._waiting) < _WINDOW and not self._ended:
                self._ended = stop.is_set()
                event = self.run.completed() if self._ended else self.run.message("x" * 200)
                self._waiting.append(self._keep(event))
            if sent < len(self._waiting):
                number += 1
                sets = [events.append_set(self.session, self._waiting[sent])]
                await call.write(history_service_pb2.AppendStreamRequest(number=number, sets=sets))
                sent += 1
                continue
            response = await call.read()
            if response is grpc.aio.EOF:
                raise asyncio.InvalidStateError
            for reply in response.replies:
                self._acknowledge(self._waiting.popleft(), reply.sets[0].results[0])
                sent -= 1

    def _keep(self, event: event_pb2.Event) -> event_pb2.Event:
        self.sent.append(event)
        return event

    def _acknowledge(self, event: event_pb2.Event, result: history_pb2.AppendResult) -> None:
        assert result.outcome in (APPENDED, DUPLICATE), result
        line = {"session": self.session.session, "event_id": event.event_id, "sequence": result.sequence}
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
            log.flush()
            os.fsync(log.fileno())
        self.acknowledged += 1


async def check_nothing_lost(client: Client, pushers: list[Pusher], dsn: str) -> None:
    """Every acknowledged event once and where it was said to be, every log whole, one ending each."""
    for pusher in pushers:
        items = await client.read(pusher.session)
        found = {item.event.event_id: item.cursor.sequence for item in items}
        assert len(found) == len(items)
        for line in pusher.log.read_text().splitlines():
            said = json.loads(line)
            if said["session"] == pusher.session.session:
                assert found[said["event_id"]] == said["sequence"]
        assert [item.event.event_id for item in items] == [event.event_id for event in pusher.sent]
        assert sum(item.event.type == "execution.completed" for item in items) == 1
        (head,) = await client.heads(pusher.session)
        assert head.ended
        assert head.head == items[-1].cursor
    connection = await asyncpg.connect(dsn)
    try:
        row = await connection.fetchrow(
            "SELECT (SELECT count(*) FROM history.events) AS events, (SELECT sum(head) FROM history.logs) AS heads"
        )
    finally:
        await connection.close()
    assert row is not None
    assert row["events"] == row["heads"] == sum(len(pusher.sent) for pusher in pushers)
