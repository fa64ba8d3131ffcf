"""Sessions beside one that cannot be read: history is not asked more often for it, nor about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest
import pytest_asyncio
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from hearth.history.v1 import history_pb2
from hearth.types.v1 import session_pb2
from services.chassis.clock import SystemClock
from services.chassis.errors import dependency_unavailable
from services.chassis.tasks import Tasks
from services.relay.buffer import Buffer, Key
from services.relay.bus import Bus
from services.relay.hubs import Hubs
from services.relay.log import Log
from services.relay.metrics import Metrics
from services.relay.settings import RelaySettings
from services.relay.surroundings import Surroundings
from services.relay.wire import Place
from tests.unit.relay.pieces import LOG

BROKEN, OTHERS = ("p", "broken"), [("p", f"s{number}") for number in range(5)]
# Time enough for whatever would happen at once.
STEPS = 1_000


class Torn:
    """A history in which event 2 of one session cannot be read."""

    def __init__(self) -> None:
        self.written = 1
        self.asked: list[list[Key]] = []
        self.read = asyncio.Semaphore(0)

    async def heads(self, keys: Sequence[Key]) -> list[history_pb2.Head]:
        """Where the logs stand."""
        self.asked.append(list(keys))
        await asyncio.sleep(0)
        return [self._head(self.written if key == BROKEN else 1) for key in keys]

    async def page(self, _key: Key, _after: Place) -> Any:
        """Nothing."""
        self.read.release()
        raise dependency_unavailable("history", "failed")

    def _head(self, sequence: int) -> history_pb2.Head:
        cursor = session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=f"{sequence:016x}")
        return history_pb2.Head(head=cursor, oldest=1)


class Quiet:
    """A bus on which nothing comes, and on which nothing is kept."""

    connected = True
    on_change: Callable[[], None]

    async def listen(self, *_: object) -> None:
        """Hear nothing."""

    def ignore(self, *_: object) -> None:
        """Nothing was heard."""

    async def written(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """None."""
        return dict.fromkeys(keys, False)


class Moved(SystemClock):
    """Stands, until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1_000.0

    def monotonic(self) -> float:
        """Where it stands."""
        return self.seconds


class Somebody:
    """A reader that takes nothing."""

    position = 0
    call = INVALID_SPAN_CONTEXT

    def wake(self) -> None:
        """Go on sleeping."""

    def look(self, _now: float) -> None:
        """Time passes."""

    def close(self) -> None:
        """Stay."""

    def cut(self) -> None:
        """Stay."""


class House:
    """Sessions that are all followed, each for a reader."""

    def __init__(self, settings: RelaySettings) -> None:
        self.log, self.clock, self.tasks = Torn(), Moved(), Tasks(pytest.fail)
        self.bus = Quiet()
        self.hubs = Hubs(
            log=cast("Log", self.log),
            bus=cast("Bus", self.bus),
            buffer=cast("Buffer", self.bus),
            surroundings=Surroundings(),
            metrics=Metrics(),
            tasks=self.tasks,
            clock=self.clock,
            settings=settings,
        )

    async def open(self) -> None:
        """Follow all of them, and let them be idle."""
        for key in (BROKEN, *OTHERS):
            await self.hubs.enter(Somebody(), key).opened()
        self.clock.seconds += 100.0


@pytest_asyncio.fixture
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """With a time between two comparisons that a test parametrizes it by."""
    found = House(RelaySettings.model_construct(relay_heads_every=request.param, relay_heads_idle_within=1e6))
    await found.open()
    yield found
    await found.tasks.stop()


@pytest.mark.parametrize("house", [60.0], indirect=True)
async def test_what_cannot_be_read_is_looked_into_once_and_then_in_its_turn(house: House) -> None:
    house.hubs.start()
    house.log.written = 2
    house.log.asked.clear()
    house.hubs.suspect(BROKEN)
    async with asyncio.timeout(5):
        await house.log.read.acquire()
    for _ in range(STEPS):
        await asyncio.sleep(0)
    assert len(house.log.asked) == 1
    house.clock.seconds += 60.0
    house.hubs.suspect(BROKEN)
    async with asyncio.timeout(5):
        await house.log.read.acquire()
    assert house.log.asked == [[BROKEN, *OTHERS], [BROKEN]]


@pytest.mark.parametrize("house", [0.001], indirect=True)
async def test_its_turn_comes_with_the_next_comparison_and_is_not_that_of_the_others(house: House) -> None:
    house.hubs.start()
    async with asyncio.timeout(5):
        while [BROKEN, *OTHERS] not in house.log.asked:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        house.log.written = 2
        house.log.asked.clear()
        house.hubs.suspect(BROKEN)
        for _ in range(3):
            await house.log.read.acquire()
    assert house.log.asked[:2] == [[BROKEN]] * 2
