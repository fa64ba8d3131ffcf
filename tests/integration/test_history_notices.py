"""Notices on the bus: what relays hear after a commit, and that history serves all the same when there is no bus."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from hearth.embedded.valkey import EmbeddedValkey
from hearth.relay.v1 import bus_pb2
from hearth.secret import Secret
from hearth.types.v1 import session_pb2
from services.chassis.pubsub import PubSub
from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import Client, ids
from tests.support.waiting import eventually


class Heard:
    """The notices of one session."""

    def __init__(self) -> None:
        self.notices: list[bus_pb2.Notice] = []

    def take(self, _channel: bytes, data: bytes) -> None:
        assert data[:1] == b"E"
        self.notices.append(bus_pb2.Notice.FromString(data[1:]))

    @property
    def sequences(self) -> list[int]:
        return [number for it in self.notices for number in range(it.first_sequence, it.last_sequence + 1)]

    async def until(self, sequence: int) -> None:
        await eventually(lambda: self.sequences[-1:] == [sequence])


@asynccontextmanager
async def listening(url: str, session: session_pb2.SessionKey) -> AsyncIterator[Heard]:
    heard = Heard()
    bus = await PubSub.connect(Secret(url), heard.take)
    await bus.subscribe(f"hearth:live:{session.project}/{session.session}".encode())
    yield heard
    await bus.close()


async def test_every_commit_is_told_with_its_events(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=valkey_url)
    session = events.key()
    async with grpc.aio.insecure_channel(service.address) as channel, listening(valkey_url, session) as heard:
        history = Client(channel)
        await history.accepted(session, events.user_message(), events.user_message())
        await heard.until(2)
        await history.accepted(session, *(events.user_message() for _ in range(3)))
        await heard.until(5)
        items = await history.read(session)
        assert heard.sequences == [1, 2, 3, 4, 5]
        assert [item for notice in heard.notices for item in notice.events] == items
        for notice in heard.notices:
            before = notice.first_sequence - 1
            assert notice.log_id == items[0].cursor.log_id
            assert notice.previous_tag == (items[before - 1].cursor.tag if before else "")
            assert len(notice.traceparent) == 55

        await history.append(session, items[0].event)
        large = events.custom(70_000)
        await history.accepted(session, large)
        await heard.until(6)
        assert not heard.notices[-1].events
        assert ids(await history.read(session))[-1] == large.event_id


async def test_history_starts_and_serves_without_a_bus_and_finds_it_later(
    start_service: StartService, migrated_dsn: str, scratch: Path
) -> None:
    bus = EmbeddedValkey(scratch / "valkey")
    port = (await asyncio.to_thread(bus.start_detached)).port
    await asyncio.to_thread(bus.stop)
    url = f"redis://127.0.0.1:{port}/0"
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=url)
    session = events.key()
    bus = EmbeddedValkey(scratch / "valkey", port=port)
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            history = Client(channel)
            await history.accepted(session, events.user_message())
            assert service.serving()
            for _ in range(2):
                await asyncio.to_thread(bus.start_detached)
                async with listening(url, session) as heard:
                    await told(history, session, heard)
                await asyncio.to_thread(bus.stop)
                await history.accepted(session, *(events.custom(1_000) for _ in range(100)))
            await history.read(session)
    finally:
        await asyncio.to_thread(bus.remove)


async def told(history: Client, session: session_pb2.SessionKey, heard: Heard) -> None:
    """Append until a notice comes; history looks for the bus every two seconds at the latest."""
    async with asyncio.timeout(10):
        while True:
            (sequence,) = await history.accepted(session, events.user_message())
            await asyncio.sleep(0.05)
            if heard.notices:
                break
    assert heard.sequences[0] <= sequence


async def test_a_bus_that_hangs_delays_no_commit(start_service: StartService, migrated_dsn: str, scratch: Path) -> None:
    bus = EmbeddedValkey(scratch / "valkey")
    running = await asyncio.to_thread(bus.start_detached)
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=running.url)
    session = events.key()
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            history = Client(channel)
            await history.accepted(session, events.user_message())
            os.kill(running.pid, signal.SIGSTOP)
            async with asyncio.timeout(4):
                for _ in range(100):
                    await history.accepted(session, events.user_message())
            os.kill(running.pid, signal.SIGCONT)
            async with listening(running.url, session) as heard:
                await told(history, session, heard)
    finally:
        os.kill(running.pid, signal.SIGCONT)
        await asyncio.to_thread(bus.remove)
