"""Everything that a round needs, as real processes that can be killed, frozen, cut off and brought back.

Of each service the last replica reaches what it needs through proxies that can cut its connections.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio

from hearth.embedded import daemons
from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.valkey import EmbeddedValkey
from tests.support.cutter import Cutter
from tests.support.processes import ServiceProcess


class House:
    """Use `house`. Addresses stay the same over restarts."""

    def __init__(self, directory: Path, *, histories: int, relays: int) -> None:
        self.directory = directory
        self.histories: list[ServiceProcess] = []
        self.relays: list[ServiceProcess] = []
        self.cutters: dict[str, Cutter] = {}
        self._counts = (histories, relays)
        self._stack = AsyncExitStack()
        self._postgres = EmbeddedPostgres(directory / "postgres")
        self._valkey = EmbeddedValkey(directory / "valkey")
        self._copy: Path | None = None
        self._names = 0

    # --- start and end ---

    async def start(self) -> None:
        """Start everything; the first history makes the tables."""
        postgres, valkey = await asyncio.gather(
            asyncio.to_thread(self._postgres.start_detached), asyncio.to_thread(self._valkey.start_detached)
        )
        self._postgres = EmbeddedPostgres(self._postgres.directory, port=postgres.port)
        self._valkey = EmbeddedValkey(self._valkey.directory, port=valkey.port)
        self.dsn, self.valkey_url = postgres.url, valkey.url
        cut_dsn = _with_address(self.dsn, await self._cutter("history-postgres", f"127.0.0.1:{postgres.port}"))
        cut_valkey = _with_address(self.valkey_url, await self._cutter("relay-valkey", f"127.0.0.1:{valkey.port}"))
        histories, relays = self._counts
        for number in range(histories):
            dsn = cut_dsn if number == histories - 1 else self.dsn
            await self._begin(self.histories, "services.history", HEARTH_POSTGRES_DSN=dsn)
        history = await self._cutter("relay-history", self.histories[-1].address)
        for number in range(relays):
            last = number == relays - 1
            address = history if last else self.histories[number % histories].address
            url = cut_valkey if last else self.valkey_url
            await self._begin(self.relays, "services.relay", HEARTH_HISTORY_ADDRESS=address, HEARTH_VALKEY_URL=url)
        await self._cutter("producer-history", self.histories[-1].address)
        await self._cutter("producer-relay", self.relays[-1].address)
        await self._cutter("reader-relay", self.relays[0].address)

    async def stop(self) -> list[str]:
        """End everything, and remove the data; what ended badly, in words."""
        wrong = []
        for process in (*self.relays, *self.histories):
            code = await process.terminate()
            if code not in (0, None):
                wrong.append(f"{process.module} ended with {code}")
        await self._stack.aclose()
        await asyncio.to_thread(self._postgres.remove)
        await asyncio.to_thread(self._valkey.remove)
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        return wrong

    async def _begin(self, replicas: list[ServiceProcess], module: str, **env: str) -> None:
        process = ServiceProcess(module, self.directory, {"HEARTH_VALKEY_URL": self.valkey_url, **env})
        replicas.append(process)
        await process.start()

    async def _cutter(self, link: str, target: str) -> str:
        self.cutters[link] = await self._stack.enter_async_context(Cutter(target))
        return self.cutters[link].address

    # --- addresses ---

    @property
    def history(self) -> str:
        """All histories under one name: whoever connects takes the first that answers."""
        return _any_of([process.address for process in self.histories])

    @property
    def relay(self) -> str:
        """All relays under one name."""
        return _any_of([process.address for process in self.relays])

    # --- what can happen to it ---

    async def kill(self, part: str, pick: int) -> None:
        """kill -9 of a server, or of one replica."""
        match part:
            case "postgres":
                await _kill9(int((self._postgres._data / "postmaster.pid").read_text().split()[0]))
            case "valkey":
                await _kill9(int((self._valkey.directory / "pid").read_text()))
            case _:
                await asyncio.to_thread(self.replica(part, pick).kill9)

    def launch(self, part: str, pick: int) -> asyncio.Task[None]:
        """Start it again; the task is done when it serves."""
        return asyncio.create_task(self._launched(part, pick))

    async def _launched(self, part: str, pick: int) -> None:
        match part:
            case "postgres":
                await asyncio.to_thread(self._postgres.start_detached)
            case "valkey":
                await asyncio.to_thread(self._valkey.start_detached)
            case _:
                await self.replica(part, pick).start(timeout=60.0)

    def replica(self, service: str, pick: int) -> ServiceProcess:
        """One of the replicas of a service."""
        replicas = self.histories if service == "history" else self.relays
        return replicas[pick % len(replicas)]

    async def flush(self) -> None:
        """FLUSHALL."""
        async with redis.asyncio.Redis.from_url(self.valkey_url) as client:
            await client.flushall()

    async def copy_database(self) -> None:
        """Copy the data of Postgres, which is stopped for it."""
        await asyncio.to_thread(self._postgres.stop)
        data = self._postgres._data
        self._copy = data.with_name(f"{data.name}.copy")
        await asyncio.to_thread(_copy, data, self._copy)
        await asyncio.to_thread(self._postgres.start_detached)

    async def restore_database(self) -> None:
        """kill -9 Postgres, and put the copy in the place of its data."""
        assert self._copy is not None, "nothing was copied"
        await self.kill("postgres", 0)
        # Its backends end with it, in a moment.
        await asyncio.to_thread(self._postgres.stop)
        data = self._postgres._data
        await asyncio.to_thread(shutil.rmtree, data)
        self._copy.rename(data)
        self._copy = None
        await asyncio.to_thread(self._postgres.start_detached)

    def errors(self) -> list[str]:
        """What the services logged as errors."""
        found = []
        for process in (*self.histories, *self.relays):
            lines = [line for line in process.log().splitlines() if '"ERROR"' in line or '"CRITICAL"' in line]
            found += [f"{process.module}: {line}" for line in lines]
        return found


@asynccontextmanager
async def house(directory: Path, *, histories: int, relays: int) -> AsyncIterator[House]:
    """A started house; the block fails when it ends badly."""
    made = House(directory, histories=histories, relays=relays)
    wrong: list[str] = []
    try:
        await made.start()
        yield made
    finally:
        wrong += await made.stop()
    assert not wrong, "\n".join(wrong)


def _any_of(addresses: list[str]) -> str:
    return addresses[0] if len(addresses) == 1 else "ipv4:" + ",".join(addresses)


def _with_address(url: str, address: str) -> str:
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at}{address}"))


def _copy(source: Path, target: Path) -> None:
    # With owners and modes: the server may run as another user.
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


async def _kill9(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    # A signal is not an end: who looks at once finds a server that still runs.
    assert await asyncio.to_thread(daemons.wait_gone, pid, 20), f"{pid} was killed and is still there"
