"""Known failures of systems like this, each by its code in docs/failures.md: what the client that follows does instead.

The client speaks to a real relay, through a proxy where its connection has to break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from hearth import watch
from hearth.channel import open_channel
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import session_pb2
from hearth.watch import Watch
from tests.support import events
from tests.support.cutter import Cutter
from tests.support.relay_stack import RelayStack, relay_processes, relay_stack
from tests.support.relay_turns import append
from tests.support.servers import Servers
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(servers, module_postgres_dsn, HEARTH_RELAY_HEARTBEAT="0.3") as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        yield processes


class Watching:
    """A `Watch` that runs, what it gave and what it asked the relay for."""

    def __init__(self, stub: relay_service_pb2_grpc.RelayServiceStub, session: session_pb2.SessionKey) -> None:
        self._stub = stub
        self._session = session
        self.requests: list[relay_service_pb2.SubscribeRequest] = []
        self.items: list[relay_pb2.Item] = []

    def Subscribe(self, request: relay_service_pb2.SubscribeRequest) -> Any:
        """As the stub does."""
        self.requests.append(request)
        return self._stub.Subscribe(request)

    async def run(self, *, events_only: bool) -> None:
        """Take items for ever."""
        self.watch = Watch(self, self._session, events_only=events_only)  # type: ignore[arg-type]
        async for item in self.watch:
            self.items.append(item)

    def count(self, kind: str) -> int:
        """How many items of a kind came."""
        return sum(item.WhichOneof("item") == kind for item in self.items)

    @property
    def cursors(self) -> list[session_pb2.Cursor]:
        """Of the events."""
        return [item.event.cursor for item in self.items if item.HasField("event")]

    async def until(self, kind: str, count: int = 1) -> None:
        """Return when so many items of a kind have come."""
        await eventually(lambda: self.count(kind) >= count, timeout=20)


@asynccontextmanager
async def watching(
    address: str, session: session_pb2.SessionKey, *, events_only: bool = False
) -> AsyncIterator[Watching]:
    """A watch of a session by the relay at `address`."""
    async with open_channel(address) as channel:
        found = Watching(relay_service_pb2_grpc.RelayServiceStub(channel), session)
        task = asyncio.create_task(found.run(events_only=events_only))
        try:
            yield found
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.parametrize("events_only", [False, True])
async def test_r18_r20_each_reconnect_sends_the_cursor_and_the_filter(stack: RelayStack, events_only: bool) -> None:
    session, history = events.key(), stack.channel(stack.history)
    async with (
        Cutter(stack.relay.address) as cutter,
        watching(cutter.address, session, events_only=events_only) as reader,
    ):
        for number in range(1, 4):
            await append(history, session, events.custom(), events.custom())
            await reader.until("event", 2 * number)
            cutter.cut()
            await eventually(lambda number=number: len(reader.requests) > number, timeout=20)  # type: ignore[misc]
        await append(history, session, events.custom())
        await reader.until("event", 7)
        cursors = reader.cursors
    assert [cursor.sequence for cursor in cursors] == [1, 2, 3, 4, 5, 6, 7]
    assert all(request.WhichOneof("start") == "after" for request in reader.requests)
    asked = [request.after for request in reader.requests]
    assert asked[0] == session_pb2.Cursor()
    # A connection may break again before it brings anything; then the same cursor goes out again.
    assert [cursor for place, cursor in enumerate(asked) if cursor not in asked[:place]] == [
        session_pb2.Cursor(),
        cursors[1],
        cursors[3],
        cursors[5],
    ]
    assert {request.events_only for request in reader.requests} == {events_only}
    assert all(request.session == session for request in reader.requests)


async def test_r22_frames_never_move_the_cursor(stack: RelayStack) -> None:
    turn = stack.turn()
    await turn.start()
    async with Cutter(stack.relay.address) as cutter, watching(cutter.address, turn.session) as reader:
        await reader.until("ready")
        (started,) = reader.cursors
        await turn.say("m", "some", " text")
        await reader.until("frame")
        turn.lose(2)
        await turn.say("m", " and more")
        await reader.until("gap")
        await reader.until("heartbeat", reader.count("heartbeat") + 1)
        assert reader.watch.cursor == started
        cutter.cut()
        await reader.until("ready", 2)
        assert reader.watch.cursor == reader.requests[-1].after == started
        assert reader.count("event") == 1
        await turn.complete("m")
        await reader.until("event", 2)
        assert reader.watch.cursor == reader.cursors[-1]
        assert reader.watch.cursor.sequence == 2


async def test_r25_a_silent_connection_is_left_for_a_new_one(
    stack: RelayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_SECONDS", 2.0)
    session, history = events.key(), stack.channel(stack.history)
    await append(history, session, events.custom())
    async with watching(stack.relay.address, session) as reader:
        # Heartbeats alone keep a connection, for longer than silence would.
        await reader.until("heartbeat", 10)
        assert len(reader.requests) == 1
        stack.relay.freeze()
        try:
            await eventually(lambda: len(reader.requests) >= 2, timeout=10)
        finally:
            stack.relay.thaw()
        await append(history, session, events.custom())
        await reader.until("event", 2)
        assert [cursor.sequence for cursor in reader.cursors] == [1, 2]
        assert reader.requests[1].after == reader.cursors[0]


async def test_g13_a_connection_that_got_old_is_a_resume(servers: Servers, migrated_dsn: str) -> None:
    async with relay_stack(
        servers, migrated_dsn, HEARTH_CONNECTION_AGE="0.5", HEARTH_CONNECTION_AGE_GRACE="0.3"
    ) as stack:
        session, history = events.key(), stack.channel(stack.history)
        async with watching(stack.relay.address, session) as reader:
            sent = 0
            async with asyncio.timeout(30):
                while len(reader.requests) < 4:
                    await append(history, session, events.custom())
                    sent += 1
                    await asyncio.sleep(0.02)
            await reader.until("event", sent)
            assert [cursor.sequence for cursor in reader.cursors] == list(range(1, sent + 1))
