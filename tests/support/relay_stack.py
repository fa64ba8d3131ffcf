"""History, any number of relays and a Valkey of their own, each a process that a test may end and bring back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc.aio
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
        self._scratch = servers.scratch()
        self._env = {"HEARTH_VALKEY_URL": self.valkey_url, **env}
        self._count = relays
        shared = {"HEARTH_VALKEY_URL", "HEARTH_TRACE_FILE"}
        common = {key: value for key, value in self._env.items() if key in shared}
        self.history = ServiceProcess(
            "services.history", self._scratch, {**common, "HEARTH_POSTGRES_DSN": postgres_dsn}
        )
        self.relays: list[ServiceProcess] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def relay(self) -> ServiceProcess:
        """The first relay."""
        return self.relays[0]

    def start(self) -> None:
        """Start history, then the relays."""
        self.history.start_blocking()
        for _ in range(self._count):
            env = {**self._env, "HEARTH_HISTORY_ADDRESS": self.history.address}
            self.relays.append(ServiceProcess("services.relay", self._scratch, env))
        for relay in self.relays:
            relay.start_blocking()

    def stop(self) -> None:
        """End everything that runs."""
        for process in (*self.relays, self.history):
            process.stop()
        self._valkey.remove()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[RelayStack]:
        """This stack with channels of the running event loop, whole again whatever a test before did to it."""
        await self.start_valkey()
        for process in (self.history, *self.relays):
            if not process.running:
                await process.restart()
        try:
            yield self
        finally:
            for channel in self._channels.values():
                await channel.close()
            self._channels.clear()

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

    async def answers(self) -> None:
        """Return when the first relay answered a call, and so took those sent before it on the same channel."""
        await health_pb2_grpc.HealthStub(self.channel()).Check(health_pb2.HealthCheckRequest())

    def turn(
        self, session: session_pb2.SessionKey | None = None, *, epoch: int = 1, relay: ServiceProcess | None = None
    ) -> Turn:
        """A scripted execution that publishes to one relay."""
        return Turn(self.channel(self.history), self.channel(relay), session or events.key(), epoch=epoch)

    async def stop_valkey(self) -> None:
        """End the Valkey; what it held is gone."""
        await asyncio.to_thread(self._valkey.stop)

    async def start_valkey(self) -> None:
        """Bring it back, empty, on the same port, if it does not run."""
        self._valkey = EmbeddedValkey(self._valkey_directory, port=self._valkey_port)
        await asyncio.to_thread(self._valkey.start_detached)

    def freeze_valkey(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self._valkey_pid(), signal.SIGSTOP)

    def thaw_valkey(self) -> None:
        """SIGCONT."""
        os.kill(self._valkey_pid(), signal.SIGCONT)

    def _valkey_pid(self) -> int:
        return int((self._valkey_directory / "pid").read_text())

    def valkey(self) -> redis.asyncio.Redis:
        """A client; close it."""
        return redis.asyncio.Redis.from_url(self.valkey_url)


@contextmanager
def relay_processes(servers: Servers, postgres_dsn: str, *, relays: int = 1, **env: str) -> Iterator[RelayStack]:
    """A running stack for many tests, each of which uses it `connected`.

    `env` are settings of the relays, by their full names. A trace file is for all processes.
    """
    stack = RelayStack(servers, postgres_dsn, relays, env)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


@asynccontextmanager
async def relay_stack(servers: Servers, postgres_dsn: str, *, relays: int = 1, **env: str) -> AsyncIterator[RelayStack]:
    """A running stack for one test, connected."""
    stack = await asyncio.to_thread(RelayStack, servers, postgres_dsn, relays, env)
    try:
        await asyncio.to_thread(stack.start)
        async with stack.connected():
            yield stack
    finally:
        await asyncio.to_thread(stack.stop)
