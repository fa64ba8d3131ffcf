"""What a benchmark runs against: its own Postgres and Valkey, and service processes, all gone afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import machine
from hearth.embedded.daemons import Running
from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.valkey import EmbeddedValkey

_ROOT = Path(__file__).resolve().parents[1]
_PREFIX = "hearth-bench-"
_START_SECONDS = 60.0
_STOP_SECONDS = 35.0
_POLL_SECONDS = 0.02
_LOG_LINES = 30
# Where a service says its address, and the home of a program in a sandbox.
_PLACES = ("HEARTH_ADDRESS_FILE", "HOME")


class RigError(Exception):
    """A part did not start; the message holds the end of its log."""


class Service:
    """`python -m services.<name>` on a free port that it keeps over restarts."""

    def __init__(self, name: str, module: str, directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.address = "127.0.0.1:0"
        self._module = module
        self._environment = dict(environment)
        self._log = directory / f"{name}.log"
        self._address_file = directory / f"{name}.address"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process that was started last is there."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start it and return when it serves. Raises `RigError`."""
        await asyncio.to_thread(self._launch)
        assert self._process is not None
        ends = time.monotonic() + _START_SECONDS
        while not await self._serves():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RigError(f"{self.name} does not serve:\n{self.log_tail()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait for that; one that does not end in time is killed."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        """The end of what it wrote."""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:])

    def _launch(self) -> None:
        self._address_file.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HEARTH_", "OTEL_"))}
        own = {"HEARTH_LISTEN": self.address, "HEARTH_ADDRESS_FILE": str(self._address_file)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env={**inherited, **self._environment, **own},
                start_new_session=True,
            )

    async def _serves(self) -> bool:
        if not self._address_file.exists():
            return False
        self.address = self._address_file.read_text()
        async with grpc.aio.insecure_channel(self.address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Rig:
    """Stores and services of one benchmark, for `async with`."""

    def __init__(self) -> None:
        _clean_up_after_the_dead()
        # The embedded Postgres may run as another user, who has to get through to its directory.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.directory.chmod(0o755)
        self._postgres = EmbeddedPostgres(self.directory / "postgres")
        self._valkey = EmbeddedValkey(self.directory / "valkey")
        self._services: list[Service] = []
        self._stores: dict[str, Running] = {}

    async def __aenter__(self) -> Self:
        try:
            self._stores["postgres"] = await asyncio.to_thread(self._postgres.start_detached)
            self._stores["valkey"] = await asyncio.to_thread(self._valkey.start_detached)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for service in reversed(self._services):
            await service.stop()
        # Sandboxes outlive the services that made them; the next ones would take them over.
        await asyncio.to_thread(_end_members, self.directory)
        await asyncio.to_thread(self._postgres.remove)
        await asyncio.to_thread(self._valkey.remove)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def dsn(self) -> str:
        """The database that exists from the start."""
        return self._stores["postgres"].url

    async def database(self, name: str) -> str:
        """A new database; its DSN."""
        await self.execute(self.dsn, f'CREATE DATABASE "{name}"')
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{name}"))

    async def execute(self, dsn: str, statement: str, *arguments: object) -> Any:
        """Run one statement; the first value of the first row, if there is one."""
        connection = await asyncpg.connect(dsn)
        try:
            if arguments:
                return await connection.fetchval(statement, *arguments, timeout=1800)
            return await connection.fetchval(statement, timeout=1800)
        finally:
            await connection.close()

    async def history(self, name: str = "history", *, dsn: str = "", **environment: str) -> Service:
        """Start a history service, on the first database unless another one is named."""
        stores = {"HEARTH_POSTGRES_DSN": dsn or self.dsn, "HEARTH_VALKEY_URL": self._stores["valkey"].url}
        return await self._start(Service(name, "services.history", self.directory, {**stores, **environment}))

    async def relay(self, history: Service, **environment: str) -> Service:
        """Start a relay in front of `history`."""
        stores = {"HEARTH_VALKEY_URL": self._stores["valkey"].url, "HEARTH_HISTORY_ADDRESS": history.address}
        return await self._start(Service("relay", "services.relay", self.directory, {**stores, **environment}))

    async def service(self, name: str, module: str = "", **environment: str) -> Service:
        """Start any service on the first database; `environment` names the others and its settings. One of several of
        a kind has a name of its own, and the `module` of all."""
        stores = {"HEARTH_POSTGRES_DSN": self.dsn, "HEARTH_VALKEY_URL": self._stores["valkey"].url}
        module = f"services.{module or name}"
        return await self._start(Service(name, module, self.directory, {**stores, **environment}))

    @asynccontextmanager
    async def without_postgres(self) -> AsyncIterator[None]:
        """No Postgres for the block: it ends as in a crash, and comes back on its port."""
        running = self._stores["postgres"]
        os.kill(running.pid, signal.SIGQUIT)
        await asyncio.to_thread(self._postgres.stop)
        try:
            yield
        finally:
            again = EmbeddedPostgres(self.directory / "postgres", port=running.port)
            self._stores["postgres"] = await asyncio.to_thread(again.start_detached)

    def pids(self, *services: Service) -> dict[str, int]:
        """Pids by name of the stores and of `services`, to be measured."""
        found = {name: running.pid for name, running in self._stores.items()}
        return found | {service.name: service.pid for service in services}

    async def description(self) -> dict[str, object]:
        """What the figures depend on beside the workload."""
        durability = {
            name: await self.execute(self.dsn, f"SHOW {name}")
            for name in ("server_version", "fsync", "synchronous_commit", "shared_buffers")
        }
        # Where root runs it, Postgres may keep its data elsewhere.
        data = Path(str(await self.execute(self.dsn, "SHOW data_directory")))
        return {**machine.description(), "filesystem": machine.filesystem_of(data), "postgres": durability}

    async def _start(self, service: Service) -> Service:
        self._services.append(service)
        await service.start()
        return service


def _clean_up_after_the_dead() -> None:
    """Remove what a benchmark that was killed has left."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).split("-", 1)[0]
        if not pid.isdigit() or psutil.pid_exists(int(pid)) or not os.access(directory, os.W_OK):
            continue
        _end_members(directory)
        EmbeddedPostgres(directory / "postgres").remove()
        EmbeddedValkey(directory / "valkey").remove()
        shutil.rmtree(directory, ignore_errors=True)


def _end_members(directory: Path) -> None:
    """End the services of a benchmark and what runs in their sandboxes: all that has a place below its directory."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if any(environment.get(name, "").startswith(f"{directory}/") for name in _PLACES):
            with suppress(psutil.NoSuchProcess):
                process.kill()
