"""A sandbox service that is killed, frozen and doubled, and what must hold whatever happened to it.

S1 is judged by the witness of the daemons and by the list of processes, S2 and S3 by the list of processes; rows are
only asked when the system says that it has settled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints
from services.chassis.clock import SystemClock
from services.chassis.errors import HearthError
from services.sandbox.compatibility import Spec
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import CreateRequest
from services.sandbox.rows import Key, instance_name
from tests.support.faulty_sandbox import Faults
from tests.support.processes import MARKER, ServiceProcess
from tests.support.sandboxes import PROJECT, Daemon, Sandboxes, left_below, members, new_id, state
from tests.support.witnessed_agentd import VARIABLE as WITNESS_VARIABLE
from tests.support.witnessed_agentd import Witness

# Faster than in production, with the same proportions. The lease is long enough for a busy machine to renew in time.
TIMES = {
    "HEARTH_LEASE": "2.0",
    "HEARTH_LEASE_READ_INTERVAL": "0.2",
    "HEARTH_LEASE_GAP": "1.5",
    "HEARTH_RECONCILE_INTERVAL": "0.4",
    "HEARTH_LOOK_AGAIN": "0.1",
    "HEARTH_WORKER_GONE": "0.5",
}
_CLOSED = "SELECT closed_epoch FROM sandbox.sessions WHERE project = $1 AND session = $2"


class Scene:
    """Services over one database and one directory of sandboxes, the evidence, and what is done with them."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self.dsn = dsn
        self.directory = directory
        self.root = directory / "sandboxes"
        self.witness = Witness(directory / "witness")
        self.faults = Faults(directory / "faults")
        self.me = new_id()
        self.services: list[ServiceProcess] = []

    def service(self, **more: str) -> ServiceProcess:
        """A service, not started; `more` are further variables."""
        environment = {
            "HEARTH_POSTGRES_DSN": self.dsn,
            "HEARTH_LOCAL_ROOT": str(self.root),
            "HEARTH_LOCAL_INHERIT": f"{MARKER},{WITNESS_VARIABLE}",
            **TIMES,
            **self.witness.environment(),
            **self.faults.environment(),
            **more,
        }
        found = ServiceProcess("tests.support.faulty_sandbox", self.directory, environment)
        self.services.append(found)
        return found

    async def started(self, **more: str) -> ServiceProcess:
        """A service that serves."""
        found = self.service(**more)
        await found.start()
        return found

    async def deployment(self) -> str:
        """The id with which its instances are labelled."""
        connection = await asyncpg.connect(self.dsn)
        try:
            return str(await connection.fetchval("SELECT deployment_id FROM sandbox.deployment"))
        finally:
            await connection.close()

    async def closed(self, session: str, epoch: int) -> None:
        """Return when a release has closed the claims of a session up to `epoch`; what it does next is not known."""
        connection = await asyncpg.connect(self.dsn)
        try:
            async with asyncio.timeout(30):
                while (await connection.fetchval(_CLOSED, PROJECT, session) or 0) < epoch:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            await connection.close()

    async def stranger(self, deployment: str, *, age: float = 10_000.0) -> str:
        """An instance with our label that no row knows; its name."""
        provider = LocalProvider(self.root, SystemClock())
        labels = {"hearth-deployment": deployment}
        request = CreateRequest(instance_name(new_id()), labels, Key(PROJECT, "stranger"), Spec("local", "scripted"))
        made = await provider.create(request)
        path = Path(made.provider_id) / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "created": time.time() - age}))
        return made.name

    async def check_settled(self, calls: Sandboxes, *sessions: str) -> None:
        """Nobody renews anything any more. S2: all is ended. Then each session gets one sandbox, and all can go."""
        await self.until_settled(calls)
        for session in sessions:
            answer = await calls.acquire(session, 99, holder=self.me)
            async with aiohttp.ClientSession() as http:
                assert await Daemon(http, answer.endpoint).health() == 200
            live = [one for one in self.witness.alive() if one.home == f"{answer.workspace}/.home"]
            assert [one.sandbox_id for one in live] == [answer.sandbox_id]
            assert len(members(answer.sandbox_id)) == 1
            await calls.release(session, 99, reason="KILLED")
        await calls.clear()
        self.witness.check()
        assert self.witness.alive() == []
        assert left_below(self.root) == []

    async def until_settled(self, calls: Sandboxes, *, seconds: float = 60.0) -> None:
        """Return when nothing runs, and the rows say the same; AssertionError after `seconds`."""
        ends = time.monotonic() + seconds
        while True:
            rows = [state(row) for row in await calls.list()]
            live = self.witness.alive()
            usage = await calls.usage()
            if not live and set(rows) <= {"STOPPED/FREE"} and usage.orphans == 0 and usage.slots[0].used == 0:
                return
            assert time.monotonic() < ends, f"not settled: rows {rows}, daemons {live}, usage {usage}"
            await asyncio.sleep(0.05)


async def died(service: ServiceProcess, point: str) -> None:
    """Return when the service was killed by its crash point; AssertionError when it ended otherwise or lives on."""
    code = await service.wait(60)
    assert code == -9, f"ended with {code}:\n{service.log_tail()}"
    assert f"crash point reached: {point} (SIGKILL)" in service.log()


def armed(point: str) -> dict[str, str]:
    """The variable for a process that shall die at `point`."""
    return {crashpoints.VARIABLE: point}


async def tried(call: Awaitable[Any]) -> Any:
    """The answer of a call whose service may die meanwhile; None when there is none."""
    try:
        return await call
    except HearthError as error:
        if error.code.name not in ("UNAVAILABLE", "FAILED_PRECONDITION", "ABORTED", "CANCELLED"):
            raise
        return None


def spec(**fields: Any) -> sandbox_pb2.SandboxSpec:
    """For the scripted agent."""
    return sandbox_pb2.SandboxSpec(agent="scripted", **fields)


@asynccontextmanager
async def scene(dsn: str, directory: Path) -> AsyncIterator[Scene]:
    """A scene; its services are ended with it, its sandboxes must have been."""
    found = Scene(dsn, directory)
    try:
        yield found
    finally:
        for service in reversed(found.services):
            if service.running:
                service.thaw()
                await service.terminate()


def endings(answers: Sequence[object]) -> list[str]:
    """How racing calls ended: `ok`, or the reason."""
    return [getattr(answer, "reason", "failed") if isinstance(answer, BaseException) else "ok" for answer in answers]
