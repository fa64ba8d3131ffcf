"""The containers of docker-compose.yml as processes: the very commands and environments of the file, with its names and
ports led to this machine, its files to a directory, and its stores to those of the tests."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio

from hearth.embedded import daemons, valkey
from tests.deployment import compose
from tests.deployment.compose import Service
from tests.support import processes

_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Container:
    """A replica of a service."""

    service: Service
    number: int
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        """As Compose calls it."""
        return f"{self.service.name}-{self.number}"

    @property
    def address(self) -> str:
        """Where it is on this machine."""
        return f"127.0.0.1:{self.environment['HEARTH_LISTEN'].rpartition(':')[2]}"

    def stop(self) -> int:
        """As `docker stop` does, within the time that the file gives it; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(float(self.service.raw["stop_grace_period"].removesuffix("s")))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} does not end in time:\n{daemons.tail(self.log)}") from None


@dataclass(slots=True)
class Placed:
    """What runs. `account` is who the containers run as, `path` where their programs are."""

    directory: Path
    services: Mapping[str, Service]
    path: str
    image: Mapping[str, str] = field(default_factory=dict)
    account: int | None = None
    ports: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    stores: dict[str, str] = field(default_factory=dict)
    # What stands before a service, by its name: where all the others are led to then.
    fronts: dict[str, str] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)

    def address(self, name: str) -> str:
        """Of all replicas of a service, for its callers."""
        if name in self.fronts:
            return self.fronts[name]
        found = self.ports[name, self.services[name].port]
        return ",".join(f"127.0.0.1:{port}" for port in found)

    def of(self, name: str) -> list[Container]:
        """The replicas of a service that run."""
        return [it for it in self.containers if it.service.name == name and it.process.poll() is None]

    async def start(self, name: str) -> list[Container]:
        """All replicas of a service; returns when the health check of the image says that they serve."""
        return await asyncio.gather(*(self.add(name, at + 1) for at in range(self.services[name].replicas)))

    async def add(self, name: str, number: int) -> Container:
        """One replica, from the image as it is now."""
        container = self._launch(self.services[name], number)
        await self.healthy(container)
        return container

    async def healthy(
        self, container: Container, check: Sequence[str] = ("hearth", "health"), timeout: float = 120
    ) -> None:
        """Return when the health check passes, as often tried as Docker would. It is that of this release."""
        environment = {name: value for name, value in container.environment.items() if name != "PYTHONPATH"}
        ends = time.monotonic() + timeout
        while True:
            asked = await asyncio.create_subprocess_exec(
                *check,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self.directory,
                **self._identity(),
            )
            said, _ = await asked.communicate()
            if asked.returncode == 0:
                return
            assert container.process.poll() is None, f"{container.name} ended:\n{daemons.tail(container.log)}"
            assert time.monotonic() < ends, f"{container.name}: {said.decode()}\n{daemons.tail(container.log)}"
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, *, well: bool = True) -> None:
        """Callers before the called. Every one that still runs has to end `well`."""
        codes = {}
        for container in sorted(self.containers, key=lambda it: compose.SERVICES.index(it.service.name), reverse=True):
            if container.process.poll() is None:
                codes[container.name] = await asyncio.to_thread(container.stop)
        assert not (well and any(codes.values())), codes

    def _launch(self, service: Service, number: int) -> Container:
        inside = {**self.image, **service.environment}
        environment = {name: self._here(name, value, service, number) for name, value in inside.items()}
        # What an image has beside its own ENV, and what finds what a test leaves.
        environment |= {"PATH": self.path, "HOME": str(self.directory), processes.MARKER: processes.marker()}
        environment["HEARTH_LOCAL_INHERIT"] = processes.MARKER
        log = self.directory / f"{service.name}-{number}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*service.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
                **self._identity(),
            )
        container = Container(service, number, environment, log, process)
        self.containers.append(container)
        return container

    def _identity(self) -> dict[str, Any]:
        return {} if self.account is None else {"user": self.account, "group": self.account, "extra_groups": []}

    def _here(self, name: str, value: str, service: Service, number: int) -> str:
        """A setting of a container as it is on this machine."""
        if name in self.stores:
            return self.stores[name]
        for inside, outside in service.files.items():
            value = value.replace(inside, str(self._file(outside)))
        if name.endswith("_LISTEN"):
            host, _, port = value.rpartition(":")
            return f"{host}:{self._port(service.name, int(port), number)}"
        if found := re.fullmatch(r"dns:///(\w+):(\d+)", value):
            other = found[1], int(found[2])
            if other[0] in self.fronts:
                return self.fronts[other[0]]
            replicas = range(1, self.services[other[0]].replicas + 1)
            return ",".join(f"127.0.0.1:{self._port(*other, replica)}" for replica in replicas)
        return value

    def _file(self, outside: str) -> Path:
        if outside.startswith((".", "/")):
            return self.directory / outside
        volume = self.directory / "volumes" / outside
        if not volume.exists():
            volume.mkdir(parents=True)
            if self.account is not None:
                os.chown(volume, self.account, self.account)
        return volume

    def _port(self, name: str, inside: int, number: int) -> int:
        taken = self.ports.setdefault((name, inside), [])
        while len(taken) < number:
            taken.append(daemons.free_port())
        return taken[number - 1]


@asynccontextmanager
async def valkey_of(service: Service, directory: Path) -> AsyncIterator[str]:
    """The Valkey of the file, by its command; its URL as the services get it, but for the place."""
    directory.mkdir()
    port = daemons.free_port()
    program, *arguments = service.command
    assert program == valkey._NAME
    command = [str(valkey._program()), *arguments, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    environment = {**os.environ, processes.MARKER: processes.marker()}
    pid = daemons.spawn(command, log=directory / "log", cwd=directory, env=environment)
    password = service.environment["REDISCLI_AUTH"]
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    try:
        async with redis.asyncio.Redis.from_url(url) as client, asyncio.timeout(20):
            while True:
                try:
                    assert await client.ping()
                    break
                except (redis.asyncio.ConnectionError, OSError):
                    assert daemons.alive(pid), daemons.tail(directory / "log")
                    await asyncio.sleep(0.02)
        yield url
    finally:
        await asyncio.to_thread(daemons.end, pid, ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)))


def postgres_of(dsn: str, given: str) -> str:
    """`given`, what the file tells the services, at the server and with the database of `dsn`."""
    wanted, real = urlsplit(given), urlsplit(dsn)
    return wanted._replace(
        netloc=f"{wanted.username}:{wanted.password}@{real.hostname}:{real.port}", path=real.path
    ).geturl()


def services_of(environment_file: Path, **changes: str) -> dict[str, Service]:
    """The file with traces going nowhere: a collector is no part of these tests."""
    return compose.read(environment_file, {"OTEL_EXPORTER_OTLP_ENDPOINT": "", "COMPOSE_PROFILES": "stores", **changes})
