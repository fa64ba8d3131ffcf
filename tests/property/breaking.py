"""Plays during which the services end, die and come back, and the bus is emptied."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import redis.asyncio

from hearth.embedded import daemons
from hearth.embedded.valkey import EmbeddedValkey
from tests.support.plays import Play, Step, Tally
from tests.support.processes import ServiceProcess
from tests.support.targets import Replicas

# How often such a step comes, beside those of `plays.WEIGHTS`.
WEIGHTS = {"kill": 2, "end process": 2, "empty the bus": 2, "restart the bus": 1}

_BUS_AWAY_SECONDS = 0.2


class Bus:
    """A Valkey that nobody else uses, always on the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = EmbeddedValkey(directory).start_detached()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._running.url

    def kill9(self) -> None:
        """End it as a crash does."""
        os.kill(self._running.pid, signal.SIGKILL)
        assert daemons.wait_gone(self._running.pid, 20), "a killed Valkey is still there"

    def start(self) -> None:
        """Start it again, empty, or wait until it is gone and start it."""
        self._running = EmbeddedValkey(self._directory, port=self._running.port).start_detached()

    def remove(self) -> None:
        """End it for good."""
        EmbeddedValkey(self._directory).remove()


class BreakingPlay(Play):
    """Plays one plan to its end."""

    def __init__(self, replicas: Replicas, bus: Bus, tally: Tally) -> None:
        super().__init__(replicas.target, tally)
        self._processes = replicas.all
        self._bus = bus
        self._restarts: dict[ServiceProcess, asyncio.Task[None]] = {}
        self._bus_restart: asyncio.Task[None] | None = None

    async def act(self, step: Step) -> None:
        """Take one step."""
        breaking = _STEPS.get(step.kind)
        await (super().act(step) if breaking is None else breaking(self, step))

    async def stop_breaking(self) -> None:
        """Everything is to be there again."""
        restarts, self._restarts = list(self._restarts.values()), {}
        if self._bus_restart is not None:
            restarts.append(self._bus_restart)
            self._bus_restart = None
        await asyncio.gather(*restarts)

    async def restart(self, which: int, *, kill: bool) -> None:
        """End one of the services and bring it back, while the play goes on."""
        process = self._processes[which % len(self._processes)]
        pending = self._restarts.pop(process, None)
        if pending is not None:
            await pending
        self.world.tell(f"{'kill' if kill else 'end'} {process.module} at {process.address}")
        begun = time.monotonic()
        if kill:
            await asyncio.to_thread(process.kill9)
        self._restarts[process] = asyncio.create_task(self._come_back(process, begun, killed=kill))

    async def empty_the_bus(self) -> None:
        """FLUSHALL."""
        if self._bus_restart is not None:
            await self._bus_restart
        self.world.tell("FLUSHALL")
        before = self.world.recorder.tick()
        async with redis.asyncio.Redis.from_url(self._bus.url) as client:
            await client.flushall()
        self.world.recorder.flushed(before)

    async def restart_the_bus(self) -> None:
        """kill -9 of the Valkey; what it held and what is told meanwhile is gone."""
        if self._bus_restart is not None:
            await self._bus_restart
        self.world.tell("kill valkey")
        before, begun = self.world.recorder.tick(), time.monotonic()
        self._bus.kill9()

        async def come_back() -> None:
            await asyncio.sleep(_BUS_AWAY_SECONDS)
            await asyncio.to_thread(self._bus.start)
            self.world.tell("valkey is back")
            self.world.recorder.flushed(before)
            self.world.recording.outages.append((begun, time.monotonic()))

        self._bus_restart = asyncio.create_task(come_back())

    async def _come_back(self, process: ServiceProcess, begun: float, *, killed: bool) -> None:
        if not killed:
            # How long an orderly end may take is not what plays are about; that it is one, is.
            code = await process.terminate(90.0)
            assert code == 0, f"{process.module} ended with {code}:\n{process.log_tail()}"
        await process.start()
        self.world.tell(f"{process.module} at {process.address} is back")
        self.world.recording.outages.append((begun, time.monotonic()))


_STEPS: dict[str, Callable[[BreakingPlay, Step], Coroutine[object, object, None]]] = {
    "kill": lambda play, step: play.restart(step.a, kill=True),
    "end process": lambda play, step: play.restart(step.a, kill=False),
    "empty the bus": lambda play, step: play.empty_the_bus(),
    "restart the bus": lambda play, step: play.restart_the_bus(),
}
