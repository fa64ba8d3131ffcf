"""A pool that is frozen, killed and doubled in the middle of what it does, and what must hold whatever happened to it.

Its crash points are aimed while it runs, so a test decides the order of two things that race: it freezes one of them
half done, does the other, and lets the first go on. Those of the sandbox service serve as well: then it is the pool
that waits.

What must hold is not taken from the pool's own words: what was handed over to agents is in the journal that they write
themselves, what runs is told by the witness of the daemons and by the list of processes, what readers are told by the
log, and how many are kept by the slots of the sandbox service.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import grpc.aio
import psutil

from hearth.pool.v1 import pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis import crashpoints
from services.pool.sealing import new_key
from tests.contract.pool.house import ENDINGS, Backend, House, eventually
from tests.support.processes import MARKER, ServiceProcess
from tests.support.sandboxes import FAST, members
from tests.support.servers import Servers
from tests.support.waiting import eventually as until
from tests.support.witnessed_agentd import VARIABLE as WITNESS_VARIABLE
from tests.support.witnessed_agentd import Witness

_T = TypeVar("_T")

WARM_CAP = 3
AGENT = "logged"
_SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]
# Codes of calls whose service was frozen or killed meanwhile.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})


class Aim:
    """A point at which a service is about to freeze or die."""

    def __init__(self, scene: PoolScene, service: ServiceProcess, point: str, how: str) -> None:
        self._scene = scene
        self.service = service
        self._line = f"crash point reached: {point} ({how})"
        self._before = service.log().count(self._line)

    async def reached(self) -> None:
        """Return when it is frozen there, or dead."""
        await until(self._is_reached, timeout=30)
        self._scene.aim_nowhere()

    def _is_reached(self) -> bool:
        if self.service.log().count(self._line) <= self._before:
            assert self.service.running, f"it ended elsewhere:\n{self.service.log_tail()}"
            return False
        return not self.service.running or psutil.Process(self.service.pid).status() == psutil.STATUS_STOPPED

    def thaw(self) -> None:
        """Let it go on."""
        self.service.thaw()


class PoolScene:
    """All four services, started once; `pool` is started again after each test that ended it."""

    def __init__(self, servers: Servers) -> None:
        directory = servers.scratch()
        self._plan = directory / "plan"
        self._journal = directory / "agents.jsonl"
        self.root = directory / "sandboxes"
        self.witness = Witness(directory / "witness")
        agent = {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_LOG": str(self._journal)}}
        self.house = House(
            directory,
            servers.create_database(migrated=True),
            servers.empty_valkey(),
            {
                crashpoints.VARIABLE: f"@{self._plan}",
                "HEARTH_AGENTS": json.dumps({AGENT: agent}),
                "HEARTH_DEFAULT_AGENT": AGENT,
                "HEARTH_DEFAULT_PERMISSION": "allow",
                "HEARTH_SECRET_KEY": new_key(),
                "HEARTH_SHUTDOWN_GRACE": "10",
                "HEARTH_LOCAL_INHERIT": f"{MARKER},{WITNESS_VARIABLE}",
                "HEARTH_LOCAL_WARM_CAP": str(WARM_CAP),
                **self.witness.environment(),
            },
        )
        self._usual = dict(self.house.pool.env)
        self._backends: list[Backend] = []
        self._prompts_before = self._daemons_before = 0

    @property
    def pool(self) -> ServiceProcess:
        """The pool process."""
        return self.house.pool

    def start(self) -> None:
        """Start all services."""
        self.house.start_blocking()
        self._usual = dict(self.pool.env)

    def stop(self) -> None:
        """Stop them."""
        self.aim_nowhere()
        self.house.stop()

    # Aiming

    def aim(self, point: str, *, how: str = "stop", passage: int = 1, service: ServiceProcess | None = None) -> Aim:
        """From now on the service that has this point freezes there, or dies with `how` = "kill", the n-th time."""
        name = point.partition(".")[0]
        process = service or self.house.processes[name]
        found = Aim(self, process, point, {"stop": "SIGSTOP", "kill": "SIGKILL"}[how])
        draft = self._plan.with_suffix(".draft")
        draft.write_text(f"{point}@{passage}={how}")
        draft.rename(self._plan)
        return found

    def aim_nowhere(self) -> None:
        """Every point lets pass."""
        self._plan.unlink(missing_ok=True)

    async def arrived(self, process: ServiceProcess, calling: Awaitable[_T], *more: Awaitable[_T]) -> list[Any]:
        """Begin calls to a frozen service, and return when the bytes of each wait at its door; their tasks."""
        tasks = []
        for call in (calling, *more):
            before = _unread(process)
            tasks.append(asyncio.ensure_future(call))
            await until(lambda before=before: _unread(process) > before)  # type: ignore[misc]
        return tasks

    # Starting and ending the pool

    @property
    def backend(self) -> Backend:
        """Calls to the pool that was started last."""
        return self._backends[-1]

    async def begin(self) -> None:
        """Before a test: what came before is not looked at again."""
        self._prompts_before, self._daemons_before = len(self.journal()), len(self.witness.started())
        await self._connect(self.house)

    async def pool_again(self, **changes: str) -> Backend:
        """Start the pool anew, as usual but for these variables; a backend of it."""
        if self.pool.running:
            self.pool.thaw()
            assert await self.pool.terminate() == 0
        self.aim_nowhere()
        self.pool.env.clear()
        self.pool.env.update({**self._usual, **changes})
        await self.pool.start()
        return await self._connect(self.house)

    @asynccontextmanager
    async def hasty_leases(self) -> AsyncIterator[None]:
        """A sandbox service for which a claim that is not renewed ends within seconds, not minutes."""
        service = self.house.processes["sandbox"]
        usual = dict(service.env)
        service.env.update(FAST)
        await service.restart()
        try:
            yield
        finally:
            service.env.clear()
            service.env.update(usual)
            await service.restart()

    async def until_all_ended(self) -> None:
        """S2: return when no daemon and no process of any sandbox is left."""
        ids = {one.sandbox_id for one in self.witness.started()}
        await until(lambda: not self.witness.alive() and not any(members(one) for one in ids), timeout=60)

    async def a_minute_after_deletion(self, session: session_pb2.SessionKey) -> None:
        """Let a minute pass for a session that is being deleted."""
        connection = await asyncpg.connect(self.house.dsn)
        try:
            await connection.execute(
                "UPDATE pool.session SET deleted_at = deleted_at - interval '1 minute' WHERE session = $1",
                session.session,
            )
        finally:
            await connection.close()

    async def clean_up(self) -> None:
        """After a test: nothing frozen, one pool, as usual; and what the test made can be ended to the last process."""
        self.aim_nowhere()
        for process in self.house.processes.values():
            if process.running:
                process.thaw()
        if self.pool.running and self.pool.env == self._usual:
            await self._connect(self.house)
        else:
            await self.pool_again()
        request = sandbox_service_pb2.ListSandboxesRequest()
        left = (await self.backend.sandboxes.ListSandboxes(request, timeout=20)).sandboxes
        sessions = {(one.session.project, one.session.session): one.session for one in left}
        await asyncio.gather(*(_end(self.backend, one) for one in sessions.values()))
        await until(lambda: not self.witness.alive(), timeout=30)
        self.check_agents()
        while self._backends:
            await self._backends.pop().close()

    async def _connect(self, house: House) -> Backend:
        # Before anything is frozen: a connection cannot be opened to what is.
        backend = Backend(house)
        self._backends.append(backend)
        await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=20, wait_for_ready=True)
        return backend

    # Evidence

    def journal(self, event: str = "prompt") -> list[dict[str, Any]]:
        """What agents wrote down, each line on the disk before anything came of it."""
        if not self._journal.exists():
            return []
        lines = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def handed_over(self, execution_id: str) -> int:
        """How often the prompt of an execution reached an agent."""
        return sum(line["message_id"] == execution_id for line in self.journal())

    async def until_handed_over(self, execution_id: str) -> None:
        """Return when an agent has the prompt of an execution."""
        await until(lambda: self.handed_over(execution_id), timeout=30)

    async def sandboxes(
        self, backend: Backend, session: session_pb2.SessionKey, *, gone: bool = False
    ) -> list[sandbox_pb2.Sandbox]:
        """Those of a session."""
        request = sandbox_service_pb2.ListSandboxesRequest(
            project=session.project, session=session.session, include_gone=gone
        )
        return list((await backend.sandboxes.ListSandboxes(request, timeout=20)).sandboxes)

    def daemons(self, session: session_pb2.SessionKey) -> list[int]:
        """The daemons of a session that live, by the witness."""
        home = str(self.workspace(session) / ".home")
        return [one.pid for one in self.witness.alive() if one.home == home]

    def workspace(self, session: session_pb2.SessionKey) -> Path:
        """Where the agents of a session work."""
        return self.root / "workspaces" / session.project / session.session

    async def until_nothing_runs(self, backend: Backend, session: session_pb2.SessionKey) -> None:
        """S2: return when no process of any sandbox that the session ever had is left."""
        ids = [one.sandbox_id for one in await self.sandboxes(backend, session, gone=True)]
        await until(lambda: not self.daemons(session) and not any(members(one) for one in ids), timeout=30)

    def check_agents(self) -> None:
        """In this test no prompt was handed over twice, and no daemon started beside another one of its session."""
        assert [one for one in self.witness.started()[self._daemons_before :] if one.second] == []
        counts = Counter(line["message_id"] for line in self.journal()[self._prompts_before :])
        assert {one: times for one, times in counts.items() if times > 1} == {}

    async def check(
        self, backend: Backend, session: session_pb2.SessionKey, *, failed: int = 0
    ) -> list[event_pb2.Event]:
        """S1, H6, P2 for a session whose turns are over; its endings. `failed` of them may be failures."""
        self.check_agents()
        events = await backend.events(session)
        started = [event.execution_id for event in events if event.HasField("execution_started")]
        endings = [event for event in events if event.WhichOneof("body") in ENDINGS]
        assert len(started) == len(set(started))
        assert sorted(event.execution_id for event in endings) == sorted(started)
        failures = [event for event in endings if event.HasField("execution_failed")]
        assert len(failures) == failed, failures
        for event in endings:
            handed = self.handed_over(event.execution_id)
            assert handed == 1 or (handed == 0 and not event.HasField("execution_completed")), event
        assert len(self.daemons(session)) <= 1
        return endings

    async def check_cap(self, backend: Backend) -> None:
        """S3: what is kept running is within the cap, by the slots, the rows and the processes."""
        usage = await backend.sandboxes.GetUsage(sandbox_service_pb2.GetUsageRequest(), timeout=20)
        assert all(slots.used <= WARM_CAP for slots in usage.slots)
        assert usage.orphans == 0
        found = (
            await backend.sandboxes.ListSandboxes(sandbox_service_pb2.ListSandboxesRequest(), timeout=20)
        ).sandboxes
        parked = [one for one in found if one.tenure == sandbox_pb2.TENURE_PARKED]
        assert sum(bool(members(one.sandbox_id)) for one in parked) <= WARM_CAP


# What a user or an operator asks for


async def tried(call: Awaitable[_T]) -> _T | None:
    """The answer of a call whose service may die meanwhile; None when there is none."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() not in _PASSING:
            raise
        return None


async def evict(backend: Backend, session: session_pb2.SessionKey) -> None:
    """Let the agent of a session go."""
    request = pool_service_pb2.EvictEntryRequest(session=session, request_id=_new_id())
    await backend.pools.EvictEntry(request, timeout=30)


async def kill(backend: Backend, session: session_pb2.SessionKey, request_id: str = "") -> None:
    """Kill a session."""
    request = calls.KillSessionRequest(session=session, request_id=request_id or _new_id())
    await backend.sessions.KillSession(request, timeout=30)


async def delete(backend: Backend, session: session_pb2.SessionKey) -> None:
    """Delete a session."""
    request = calls.DeleteSessionRequest(session=session, request_id=_new_id())
    await backend.sessions.DeleteSession(request, timeout=30)


async def _end(backend: Backend, session: session_pb2.SessionKey) -> None:
    try:
        await kill(backend, session)
    except grpc.aio.AioRpcError as error:
        # Of a deleted session nothing may be left anyway.
        if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
            raise


async def is_deleted(backend: Backend, session: session_pb2.SessionKey) -> bool:
    """Whether it is refused as deleted."""
    try:
        await backend.send(session, "hello")
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return False


async def all_ended(backend: Backend, session: session_pb2.SessionKey, count: int) -> list[event_pb2.Event]:
    """The endings of a session, when there are so many of them."""

    async def found() -> list[event_pb2.Event] | None:
        ended = [event for event in await backend.events(session) if event.WhichOneof("body") in ENDINGS]
        return ended if len(ended) >= count else None

    return await eventually(found)


def _new_id() -> str:
    return str(uuid.uuid4())


def _unread(process: ServiceProcess) -> int:
    """How many bytes wait in the sockets of a process that serves; it is frozen, so they only grow."""
    port = int(process.address.rpartition(":")[2])
    total = 0
    # gRPC serves IPv4 by sockets of IPv6.
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port and state == "01":
                total += int(queues.partition(":")[2], 16)
    return total
