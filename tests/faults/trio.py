"""Three replicas of the pool that notice each other's end within seconds, and what agents wrote down of prompts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hearth.pool.v1 import pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis import crashpoints
from services.pool.sealing import new_key
from tests.contract.pool.house import ENDINGS, Backend, House, eventually
from tests.support.processes import ServiceProcess
from tests.support.replicas import FAST, replicas_by
from tests.support.servers import Servers
from tests.support.waiting import eventually as until

AGENT = "logged"
_SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]


class Trio:
    """The services; `use` and `clean_up` stand around each test. Replicas are called by number, from 0."""

    def __init__(self, servers: Servers, dsn: str, valkey_url: str, env: Mapping[str, str] | None = None) -> None:
        directory = servers.scratch()
        self._journal = directory / "agents.jsonl"
        agent = {"command": _SCRIPTED, "env": {"HEARTH_SCRIPTED_LOG": str(self._journal)}}
        self.house = House(
            directory,
            dsn,
            valkey_url,
            {
                "HEARTH_AGENTS": json.dumps({AGENT: agent}),
                "HEARTH_DEFAULT_AGENT": AGENT,
                "HEARTH_DEFAULT_PERMISSION": "ask",
                "HEARTH_SECRET_KEY": new_key(),
                "HEARTH_SHUTDOWN_GRACE": "10",
                **FAST,
                **(env or {}),
            },
            pools=3,
        )
        self._plans: list[Path] = []
        for name in self.house.pools:
            plan = directory / f"{name}.plan"
            self.house.processes[name].env[crashpoints.VARIABLE] = f"@{plan}"
            self._plans.append(plan)
        self.backends: list[Backend] = []

    @property
    def replicas(self) -> list[ServiceProcess]:
        """The processes."""
        return [self.house.processes[name] for name in self.house.pools]

    async def use(self) -> list[Backend]:
        """A backend of each replica."""
        self.backends = [await self._connected(name) for name in self.house.pools]
        return self.backends

    async def _connected(self, name: str) -> Backend:
        # One that was refused before is not tried again at once, but waited for.
        backend = Backend(self.house, pool=name)
        request = pool_service_pb2.GetPoolStatsRequest()
        await backend.pools.GetPoolStats(request, timeout=20, wait_for_ready=True)
        return backend

    async def clean_up(self) -> None:
        """Nothing frozen, all three there and known to each other."""
        for plan in self._plans:
            plan.unlink(missing_ok=True)
        for replica in self.replicas:
            if replica.running:
                replica.thaw()
            else:
                await replica.start()
        addresses = {replica.address for replica in self.replicas}
        first = await self._connected("pool")

        async def complete() -> bool:
            return set(await replicas_by(first.pools)) == addresses

        await eventually(complete)
        for backend in [first, *self.backends]:
            await backend.close()
        counts = Counter(line["message_id"] for line in self.journal())
        assert {one: times for one, times in counts.items() if times > 1} == {}

    def aim(self, number: int, point: str, *, how: str = "stop") -> None:
        """The next passage of a replica through a point freezes it, or kills it with `how` = "kill"."""
        draft = self._plans[number].with_suffix(".draft")
        draft.write_text(f"pool.{point}={how}")
        draft.rename(self._plans[number])

    async def reached(self, number: int) -> None:
        """Return when a replica is frozen, or dead, at the point that it was aimed at."""
        replica = self.replicas[number]
        await until(
            lambda: not replica.running or psutil.Process(replica.pid).status() == psutil.STATUS_STOPPED, timeout=30
        )
        self._plans[number].unlink(missing_ok=True)

    async def given_up(self, number: int, backend: Backend) -> None:
        """Return when the others have declared a replica dead."""

        async def gone() -> bool:
            return self.replicas[number].address not in await replicas_by(backend.pools)

        await eventually(gone)

    async def back(self, number: int, backend: Backend) -> None:
        """Return when a replica that was given up says again that it lives."""

        async def there() -> bool:
            return self.replicas[number].address in await replicas_by(backend.pools)

        await eventually(there)

    def journal(self, event: str = "prompt") -> list[dict[str, Any]]:
        """What agents wrote down, each line on the disk before anything came of it."""
        if not self._journal.exists():
            return []
        lines = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def handed_over(self, execution_id: str) -> int:
        """How often the prompt of an execution reached an agent."""
        return sum(line["message_id"] == execution_id for line in self.journal())

    async def at_work(self, backend: Backend, session: session_pb2.SessionKey, text: str) -> str:
        """A turn whose agent has its prompt, and whose row says so; its execution."""
        execution_id = (await backend.send(session, text)).started.execution.execution_id
        await until(lambda: self.handed_over(execution_id), timeout=30)
        return execution_id

    async def parked(self, backend: Backend, session: session_pb2.SessionKey) -> None:
        """Return when the agent of a session is kept, by whichever replica has it."""

        async def found() -> bool:
            return [one.tenure for one in await backend.running_sandboxes(session)] == [sandbox_pb2.TENURE_PARKED]

        await eventually(found)

    async def check(self, backend: Backend, session: session_pb2.SessionKey) -> list[event_pb2.Event]:
        """H6: each execution that was started has one ending, and nothing of its run follows it; the endings."""
        events = await backend.events(session)
        started = [event.execution_id for event in events if event.HasField("execution_started")]
        endings = [event for event in events if event.WhichOneof("body") in ENDINGS]
        assert sorted(event.execution_id for event in endings) == sorted(set(started))
        over: set[str] = set()
        for event in events:
            if event.scope == event_pb2.EVENT_SCOPE_RUNNER:
                assert event.execution_id not in over, event
            if event.WhichOneof("body") in ENDINGS:
                over.add(event.execution_id)
        return endings


async def waits(call: asyncio.Future[Any], replica: ServiceProcess) -> None:
    """Return when the bytes of a call wait at the door of a frozen replica."""
    port = int(replica.address.rpartition(":")[2])

    def unread() -> int:
        total = 0
        # gRPC serves IPv4 by sockets of IPv6.
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, queues, *_ = line.split()
                if int(local.rpartition(":")[2], 16) == port and state == "01":
                    total += int(queues.partition(":")[2], 16)
        return total

    await until(lambda: unread() > 0 or call.done())
