"""Plays during which the services end, die and come back, and the bus is emptied."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import redis.asyncio

from tests.support.plays import Play, Step, Tally
from tests.support.processes import ServiceProcess
from tests.support.targets import Replicas

# How often such a step comes, beside those of `plays.WEIGHTS`.
WEIGHTS = {"kill": 2, "end process": 2, "empty the bus": 2}


class BreakingPlay(Play):
    """Plays one plan to its end."""

    def __init__(self, replicas: Replicas, valkey_url: str, tally: Tally) -> None:
        super().__init__(replicas.target, tally)
        self._processes = replicas.all
        self._valkey_url = valkey_url
        self._restarts: dict[ServiceProcess, asyncio.Task[None]] = {}

    async def act(self, step: Step) -> None:
        """Take one step."""
        breaking = _STEPS.get(step.kind)
        await (super().act(step) if breaking is None else breaking(self, step))

    async def stop_breaking(self) -> None:
        """Everything is to be there again."""
        restarts, self._restarts = list(self._restarts.values()), {}
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
        self.world.tell("FLUSHALL")
        async with redis.asyncio.Redis.from_url(self._valkey_url) as client:
            await client.flushall()

    async def _come_back(self, process: ServiceProcess, begun: float, *, killed: bool) -> None:
        if not killed:
            code = await process.terminate()
            assert code == 0, f"{process.module} ended with {code}:\n{process.log_tail()}"
        await process.start()
        self.world.tell(f"{process.module} at {process.address} is back")
        self.world.recording.outages.append((begun, time.monotonic()))


_STEPS: dict[str, Callable[[BreakingPlay, Step], Coroutine[object, object, None]]] = {
    "kill": lambda play, step: play.restart(step.a, kill=True),
    "end process": lambda play, step: play.restart(step.a, kill=False),
    "empty the bus": lambda play, step: play.empty_the_bus(),
}
