"""Providers under test, each with what it needs: `local`, and `daytona` through its real SDK against the stand-in."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret, hidden
from services.chassis.clock import SystemClock, SystemIds
from services.sandbox.compatibility import AgentCommand, Spec
from services.sandbox.daemons import new_token
from services.sandbox.providers.daytona import DaytonaProvider
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import (
    Address,
    CreateRequest,
    DaemonRequest,
    Instance,
    InstanceNotFound,
    InstanceState,
    Provider,
)
from services.sandbox.rows import Key, instance_name
from tests.support.daytona import RunningStandIn, StandIn
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.sandboxes import STUBBORN_AGENT, Daemon, new_id, start_stubborn

_T = TypeVar("_T")

# agentd in a sandbox at Daytona: it is given its agents and its token, both on no disk.
AGENTD = (
    *(sys.executable, "-P", "-m", "services.sandbox.agentd"),
    *("--host", "{host}", "--port", "{port}", "--agents-file", "{agents}", "--log-dir", "{logs}"),
)
AGENTS: Mapping[str, AgentCommand] = {
    "any": AgentCommand(("true",), hidden({"OF_AGENT": "1"})),
    "stubborn": AgentCommand((sys.executable, "-c", STUBBORN_AGENT)),
}


@dataclasses.dataclass
class Place:
    """A provider under test, and what was made there."""

    provider: Provider
    http: aiohttp.ClientSession
    key: Key = dataclasses.field(default_factory=lambda: Key("p", f"s-{new_id()}"))
    labels: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"hearth-deployment": new_id()})

    def request(self, sandbox_id: str = "", *, key: Key | None = None, labels: Mapping[str, str] | None = None,
                **spec: Any) -> CreateRequest:  # fmt: skip
        """A request for an instance of this id."""
        wanted = Spec(provider=self.provider.name, agent="any", **spec)
        name = instance_name(sandbox_id or new_id())
        return CreateRequest(name, {**self.labels, **(labels or {})}, key or self.key, wanted)

    async def create(self, **labels: str) -> Instance:
        """A new instance."""
        return await self.provider.create(self.request(labels=labels))

    def daemon_request(self, token: str = "", **changes: Any) -> DaemonRequest:
        """How to start the daemon."""
        request = DaemonRequest(
            token=Secret(token) if token else new_token(),
            key=self.key,
            agents=AGENTS,
            env=hidden({"PLAIN": "plain value"}),
            secrets=hidden({"HIDDEN": "hidden value"}),
            agent="any",
        )
        return dataclasses.replace(request, **changes)

    async def daemon(self, instance: Instance, token: str = "") -> tuple[Daemon, Address, str]:
        """Start its daemon anew; a caller with the token, the address, the token."""
        request = self.daemon_request(token)
        address = await self.provider.restart_daemon(instance.provider_id, request)
        return self.caller(address, request.token.reveal()), address, request.token.reveal()

    async def stubborn(self, daemon: Daemon) -> list[int]:
        """Start an agent that ignores the end of its input and SIGTERM; process ids of it, of its child in a session
        of its own, and of one that cleared its environment besides."""
        return await start_stubborn(daemon, self.provider.workspace(self.key))

    def caller(self, address: Address, token: str) -> Daemon:
        """Calls of a daemon."""
        return Daemon(self.http, sandbox_pb2.Endpoint(url=address.url, token=token, headers=address.headers))

    async def state(self, instance: Instance) -> InstanceState | None:
        """What it is now; None when it is gone."""
        try:
            return (await self.provider.get(instance.provider_id)).state
        except InstanceNotFound:
            return None

    async def until(self, state: InstanceState | None, instance: Instance) -> None:
        """Return when it is that."""
        async with asyncio.timeout(20):
            while await self.state(instance) is not state:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.02)

    async def names(self) -> list[str]:
        """Names of everything that was made here and is there."""
        return sorted(instance.name for instance in await self.provider.list(self.labels))

    async def until_names(self, *names: str) -> None:
        """Return when exactly these are there."""
        async with asyncio.timeout(20):
            while await self.names() != sorted(names):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)

    async def clear(self) -> None:
        """Delete what is left; nothing may be left then."""
        for instance in await self.provider.list(self.labels):
            await self.provider.delete(instance.provider_id)
        await self.until_names()


def options(stand_in: RunningStandIn, scratch: Path, **changes: Any) -> DaytonaOptions:
    """Options for a stand-in whose mounts lie below `scratch`, with pauses that fit a server on this machine."""
    given: dict[str, Any] = {
        "api_url": stand_in.url,
        "api_key": Secret(stand_in.api_key),
        "daemon": AGENTD,
        "mount": str(scratch / "mounts"),
        "first_pause": 0.02,
        "longest_pause": 0.2,
        **changes,
    }
    return DaytonaOptions(**given)


async def connect(stand_in: RunningStandIn, scratch: Path, **changes: Any) -> DaytonaProvider:
    """The provider at a stand-in."""
    return await DaytonaProvider.connect(options(stand_in, scratch, **changes), SystemClock(), SystemIds())


@asynccontextmanager
async def local(scratch: Path) -> AsyncIterator[Provider]:
    """The local provider."""
    provider = LocalProvider(scratch / "sandboxes", SystemClock(), inherit=[RUN_MARKER])
    yield provider
    await provider.close()


@asynccontextmanager
async def daytona(scratch: Path) -> AsyncIterator[Provider]:
    """The Daytona provider."""
    async with StandIn.running(scratch / "daytona") as stand_in:
        provider = await connect(stand_in, scratch, grace_seconds=0.3)
        yield provider
        await provider.close()
        assert stand_in.running() == 0


PLACES = {"local": local, "daytona": daytona}


async def given_up(work: Coroutine[Any, Any, _T], steps: int) -> asyncio.Task[_T]:
    """The task of `work`, ended: cancelled after so many rounds of the loop, unless it had ended by then."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task


async def results(*works: Awaitable[object]) -> list[str]:
    """How these ended that ran at once: names of the types of results or errors, sorted."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    return sorted(type(result).__name__ for result in ended)
