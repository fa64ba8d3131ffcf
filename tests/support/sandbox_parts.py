"""The parts of a sandbox service in this process, over a provider that fails on command.

Faults of a provider cannot be had from outside, so these tests put the service's own parts over the local provider with
switches in front of it. Several sets of parts over one database are several replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp

from hearth.secret import Secret
from services.chassis.clock import Clock, SystemClock, SystemIds
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.tasks import Tasks
from services.sandbox.acquire import Acquired
from services.sandbox.assembly import Parts, assemble
from services.sandbox.claims import Claim
from services.sandbox.compatibility import Spec
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import Address, CreateRequest, DaemonRequest, Instance
from services.sandbox.rows import Key, Row
from services.sandbox.settings import SandboxSettings
from services.sandbox.starting import Want
from services.sandbox.states import Disposition
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.sandboxes import new_id


class Switches:
    """What a faulty provider does at its next calls, by the name of the method.

    `fail[name]` holds errors, raised one a call before anything is done; `always[name]` is raised at every call.
    `hold[name]` is waited for before the work is done, `hold_after[name]` after it; `entered[name]` is set meanwhile.
    """

    def __init__(self) -> None:
        self.fail: dict[str, list[Exception]] = {}
        self.always: dict[str, Exception] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.hold_after: dict[str, asyncio.Event] = {}
        self.entered: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    def pause(self, name: str, *, after: bool = False) -> asyncio.Event:
        """Hold the next calls of a method; set the result to let them go."""
        event = asyncio.Event()
        (self.hold_after if after else self.hold)[name] = event
        self.entered[name] = asyncio.Event()
        return event

    async def before(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hold:
            self.entered[name].set()
            await self.hold[name].wait()
        if name in self.always:
            raise self.always[name]
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    async def after(self, name: str) -> None:
        if name in self.hold_after:
            self.entered[name].set()
            await self.hold_after[name].wait()


class FaultyProvider(LocalProvider):
    """The local provider behind switches."""

    def __init__(self, root: Path, switches: Switches) -> None:
        super().__init__(root, SystemClock(), inherit=[RUN_MARKER])
        self.switches = switches

    async def create(self, request: CreateRequest) -> Instance:
        await self.switches.before("create")
        made = await super().create(request)
        await self.switches.after("create")
        return made

    async def get(self, reference: str) -> Instance:
        await self.switches.before("get")
        return await super().get(reference)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        await self.switches.before("list")
        found = await super().list(labels)
        await self.switches.after("list")
        return found

    async def start(self, reference: str) -> None:
        await self.switches.before("start")
        await super().start(reference)

    async def stop(self, reference: str) -> None:
        await self.switches.before("stop")
        await super().stop(reference)

    async def delete(self, reference: str) -> None:
        await self.switches.before("delete")
        await super().delete(reference)

    async def restart_daemon(self, reference: str, daemon: DaemonRequest) -> Address:
        await self.switches.before("restart_daemon")
        address = await super().restart_daemon(reference, daemon)
        await self.switches.after("restart_daemon")
        return address


@dataclasses.dataclass
class Replica:
    """One process of the service, as far as it can be had in this one."""

    parts: Parts
    provider: FaultyProvider
    switches: Switches
    tasks: Tasks

    async def acquire(self, session: str, epoch: int = 1, attempt: int = 1, *, holder: str) -> Acquired:
        """Acquire for the scripted agent."""
        spec = Spec(provider="local", agent="scripted")
        return await self.parts.acquirer.acquire(Want(Key("p1", session), Claim(epoch, attempt), holder, spec))

    async def release(
        self, session: str, epoch: int = 1, attempt: int = 1, *, reason: str = "CLEAN_TURN"
    ) -> Disposition:
        """Release."""
        return (await self.parts.releaser.release(Key("p1", session), Claim(epoch, attempt), reason)).disposition

    async def row(self, sandbox_id: str) -> Row:
        """The row of a sandbox."""
        row = await self.parts.store.get(sandbox_id)
        assert row is not None
        return row

    async def rows(self) -> list[Row]:
        """All that are not gone."""
        return await self.parts.store.not_gone("local")

    async def die(self) -> None:
        """End all its work where it stands, as the end of the process would."""
        await self.tasks.stop()


@contextlib.asynccontextmanager
async def replica(dsn: str, root: Path, *, clock: Clock | None = None, **settings: object) -> AsyncIterator[Replica]:
    """A replica while the block runs; deadlines are short unless `settings` say otherwise. Sandboxes stay."""
    given: dict[str, object] = {
        "create_deadline": 10.0,
        "start_deadline": 10.0,
        "stop_deadline": 5.0,
        "delete_deadline": 5.0,
        "look_again": 0.05,
        **settings,
    }
    read = SandboxSettings(postgres_dsn=Secret(dsn), local_root=root, **given)  # type: ignore[arg-type]
    await migrate(Secret(dsn), "sandbox", "services.sandbox")
    pool = await create_pool(read, "sandbox")
    died: list[str] = []
    tasks = Tasks(died.append)
    switches = Switches()
    provider = FaultyProvider(root, switches)
    async with pool, aiohttp.ClientSession() as session:
        parts = await assemble(
            read,
            pool=pool,
            providers={"local": provider},
            session=session,
            tasks=tasks,
            clock=clock or SystemClock(),
            ids=SystemIds(),
        )
        try:
            yield Replica(parts, provider, switches, tasks)
        finally:
            await tasks.stop()
            await provider.close()
    assert died == []


async def clear(root: Path) -> None:
    """Delete every instance below `root`, whoever made it."""
    provider = LocalProvider(root, SystemClock())
    for instance in await provider.list({}):
        await provider.delete(instance.provider_id)
    await provider.close()


def holder() -> str:
    """A holding process."""
    return new_id()
