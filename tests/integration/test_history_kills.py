"""H4: what history acknowledged survives kill -9 of history and of Postgres, and a frozen replica holds nobody up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest_asyncio

from hearth.embedded import daemons
from hearth.embedded.postgres import EmbeddedPostgres
from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import APPENDED, Client
from tests.support.history_load import Pusher, check_nothing_lost
from tests.support.processes import ServiceProcess
from tests.support.waiting import eventually

SESSIONS = 6


class Load:
    """Pushers that run until the block ends, and then must have lost nothing."""

    def __init__(self, addresses: list[str], log: Path, dsn: str) -> None:
        self.pushers = [Pusher(lambda place=place: addresses[place % len(addresses)], log) for place in range(SESSIONS)]  # type: ignore[misc]
        self._addresses = addresses
        self._dsn = dsn
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(pusher.push(self._stop)) for pusher in self.pushers]
        return self

    async def more(self, count: int = 100) -> None:
        """Return when `count` more events are acknowledged."""
        wanted = self.total + count
        await eventually(lambda: self.total >= wanted or any(task.done() for task in self._tasks), timeout=60)
        for task in self._tasks:
            assert not task.done(), task.exception()

    @property
    def total(self) -> int:
        return sum(pusher.acknowledged for pusher in self.pushers)

    async def __aexit__(self, *error: object) -> None:
        self._stop.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*self._tasks)
        async with grpc.aio.insecure_channel(self._addresses[0]) as channel:
            await check_nothing_lost(Client(channel), self.pushers, self._dsn)


async def test_history_is_killed_under_load(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url}
    service = await start_service("services.history", **env)
    async with Load([service.address], scratch / "acks", migrated_dsn) as load:
        for _ in range(2):
            await load.more()
            await asyncio.to_thread(service.kill9)
            await service.restart()
        await load.more()
    assert any(pusher.retried for pusher in load.pushers)


async def test_one_of_two_replicas_is_killed_under_load(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url}
    first = await start_service("services.history", **env)
    second = await start_service("services.history", **env)
    addresses = [first.address, second.address]
    async with Load(addresses, scratch / "acks", migrated_dsn) as load:
        await load.more()
        await asyncio.to_thread(second.kill9)
        addresses[1] = first.address
        await load.more()
    assert any(pusher.retried for pusher in load.pushers)


async def test_a_stop_in_order_answers_what_it_has_taken(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url}
    service = await start_service("services.history", **env)
    async with Load([service.address], scratch / "acks", migrated_dsn) as load:
        await load.more()
        assert await service.terminate(10) == 0
        await service.restart()
        await load.more()


@pytest_asyncio.fixture
async def own_postgres(scratch: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres that nobody else uses."""
    server = EmbeddedPostgres(scratch / "postgres")
    await asyncio.to_thread(server.start_detached)
    yield server
    await asyncio.to_thread(server.remove)


async def test_postgres_is_killed_under_load(
    start_service: StartService, own_postgres: EmbeddedPostgres, valkey_url: str, scratch: Path
) -> None:
    running = own_postgres.start_detached()
    again = EmbeddedPostgres(own_postgres.directory, port=running.port)
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=running.url, HEARTH_VALKEY_URL=valkey_url)
    async with Load([service.address], scratch / "acks", running.url) as load:
        for _ in range(2):
            await load.more()
            os.kill(running.pid, signal.SIGKILL)
            # A signal is not an end: who looks at once finds a server that still runs.
            assert daemons.wait_gone(running.pid, 20)
            running = await asyncio.to_thread(again.start_detached)
            await load.more()
    assert any(pusher.retried for pusher in load.pushers)
    assert service.running


async def test_a_frozen_replica_holds_no_lock(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url}
    frozen: ServiceProcess = await start_service("services.history", **env)
    awake: ServiceProcess = await start_service("services.history", **env)
    async with (
        Load([frozen.address], scratch / "acks", migrated_dsn) as load,
        grpc.aio.insecure_channel(awake.address) as channel,
    ):
        for _ in range(3):
            await load.more(50)
            frozen.freeze()
            try:
                for pusher in load.pushers:
                    note = events.custom()
                    (result,) = await asyncio.wait_for(Client(channel).append(pusher.session, note), 1.0)
                    assert result.outcome == APPENDED
                    pusher.sent.insert(result.sequence - 1, note)
            finally:
                frozen.thaw()
