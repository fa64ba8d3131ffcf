"""History, any number of relays and a Valkey of their own, each a process that a test may end and bring back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import redis.asyncio

from hearth.embedded.valkey import EmbeddedValkey
from hearth.types.v1 import session_pb2
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_turns import Turn
from tests.support.servers import Servers


class RelayStack:
    """What `relay_stack` started. Addresses stay the same over restarts."""

    def __init__(self, servers: Servers, postgres_dsn: str, relays: int, env: dict[str, str]) -> None:
        self._valkey_directory = servers.scratch() / "valkey"
        self._valkey = EmbeddedValkey(self._valkey_directory)
        self.valkey_url = self._valkey.start_detached().url
        self._valkey_port = int(self.valkey_url.rsplit(":", 1)[1].split("/")[0])
        scratch = servers.scratch()
        common = {"HEARTH_VALKEY_URL": self.valkey_url}
        if "HEARTH_TRACE_FILE" in env:
            common["HEARTH_TRACE_FILE"] = env["HEARTH_TRACE_FILE"]
        self.history = ServiceProcess("services.history", scratch, {**common, "HEARTH_POSTGRES_DSN": postgres_dsn})
        self._scratch, self._env = scratch, {**common, **env}
        self._count = relays
        self.relays: list[ServiceProcess] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def relay(self) -> ServiceProcess:
        """The first relay."""
        return self.relays[0]

    async def start(self) -> None:
        """Start history, then the relays."""
        await self.history.start()
        for _ in range(self._count):
            env = {**self._env, "HEARTH_HISTORY_ADDRESS": self.history.address}
            self.relays.append(ServiceProcess("services.relay", self._scratch, env))
        await asyncio.gather(*(relay.start() for relay in self.relays))

    async def close(self) -> None:
        """End everything that runs."""
        for channel in self._channels.values():
            await channel.close()
        for process in (*self.relays, self.history):
            if process.running:
                process.thaw()
                await process.terminate()
        await asyncio.to_thread(self._valkey.remove)

    def channel(self, process: ServiceProcess | None = None) -> grpc.aio.Channel:
        """A channel to a service, by default the first relay."""
        address = (process or self.relay).address
        if address not in self._channels:
            # Reconnects soon, so that a test of a restart does not wait for gRPC's back-off.
            options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]
            self._channels[address] = grpc.aio.insecure_channel(
                address, options=[*options, ("grpc.http2.bdp_probe", 0)]
            )
        return self._channels[address]

    def turn(
        self, session: session_pb2.SessionKey | None = None, *, epoch: int = 1, relay: ServiceProcess | None = None
    ) -> Turn:
        """A scripted execution that publishes to one relay."""
        return Turn(self.channel(self.history), self.channel(relay), session or events.key(), epoch=epoch)

    async def stop_valkey(self) -> None:
        """End the Valkey; what it held is gone."""
        await asyncio.to_thread(self._valkey.stop)

    async def start_valkey(self) -> None:
        """Bring it back, empty, on the same port."""
        self._valkey = EmbeddedValkey(self._valkey_directory, port=self._valkey_port)
        await asyncio.to_thread(self._valkey.start_detached)

    def valkey(self) -> redis.asyncio.Redis:
        """A client; close it."""
        return redis.asyncio.Redis.from_url(self.valkey_url)


@asynccontextmanager
async def relay_stack(servers: Servers, postgres_dsn: str, *, relays: int = 1, **env: str) -> AsyncIterator[RelayStack]:
    """A running stack; `env` are settings of the relays, by their full names. A trace file is for all processes."""
    async with AsyncExitStack() as stack:
        made = await asyncio.to_thread(RelayStack, servers, postgres_dsn, relays, env)
        stack.push_async_callback(made.close)
        await made.start()
        yield made
