"""Waiting until a session is as far as history: it ends with the event that was wanted, whatever follows it.

And until one is followed: who comes while it is being opened is told whether history was asked after it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.clock import SystemClock
from services.chassis.tasks import Tasks
from services.relay.follower import Follower, Parts
from services.relay.settings import RelaySettings
from services.relay.wire import Place
from tests.unit.relay.pieces import LOG

_KEY = ("project", "session")
OTHER_LOG = "33333333-3333-3333-3333-333333333333"


def cursor(sequence: int, log: str = LOG) -> session_pb2.Cursor:
    """That of event `sequence`."""
    return session_pb2.Cursor(log_id=log, sequence=sequence, tag=f"{sequence:016x}")


def item(sequence: int, log: str = LOG) -> bytes:
    """Event `sequence`, as history hands it out."""
    event = event_pb2.Event(event_id=f"{sequence:016x}-0000-0000", scope=event_pb2.EVENT_SCOPE_SESSION, type="x")
    return event_pb2.EventItem(event=event, cursor=cursor(sequence, log)).SerializeToString()


class Writer:
    """A history whose log grows by an event with every question for a page, until it answers none any more."""

    def __init__(self) -> None:
        self.log, self.sequence = LOG, 1
        self.answers = asyncio.Semaphore(0)
        self.asked = asyncio.Event()
        # Cleared: the heads read from then on are on their way until it is set. How many were asked for.
        self.arrives = asyncio.Event()
        self.arrives.set()
        self.heads = 0

    async def of(self, _key: object) -> history_pb2.Head:
        """The head of now."""
        self.heads += 1
        head = history_pb2.Head(head=cursor(self.sequence, self.log))
        await self.arrives.wait()
        return head

    async def page(self, _key: object, after: Place) -> Any:
        """One event."""
        self.asked.set()
        await self.answers.acquire()
        return SimpleNamespace(events=[item(after.sequence + 1, self.log)])


class Nowhere:
    """A bus on which nothing comes."""

    def __init__(self) -> None:
        # Cleared: the bus has not confirmed yet.
        self.confirms = asyncio.Event()
        self.confirms.set()

    async def listen(self, *_: object) -> None:
        """Hear nothing."""
        await self.confirms.wait()

    def ignore(self, *_: object) -> None:
        """Nothing was heard."""


async def _no(_key: object) -> bool:
    return False


def _dies(name: str) -> None:
    raise AssertionError(f"{name} died")


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def came() -> asyncio.Queue[object]:
    """What the follower handed on."""
    return asyncio.Queue()


@pytest.fixture
def bus() -> Nowhere:
    return Nowhere()


@pytest_asyncio.fixture
async def closed(writer: Writer, bus: Nowhere, came: asyncio.Queue[object]) -> AsyncIterator[Follower]:
    """One that is not opened yet."""
    tasks = Tasks(_dies)
    parts = SimpleNamespace(
        log=writer,
        heads=writer,
        written=SimpleNamespace(of=_no),
        bus=bus,
        tasks=tasks,
        clock=SystemClock(),
        settings=RelaySettings.model_construct(),
        suspect=lambda _: None,
    )
    found = Follower(_KEY, cast("Parts", parts), came=came.put_nowait, broken=lambda: None, readers=list[Any])
    yield found
    found.close()
    await tasks.stop()


@pytest_asyncio.fixture
async def follower(closed: Follower) -> Follower:
    """One that stands at event 1."""
    await closed.open()
    return closed


async def test_it_is_current_with_what_was_there_though_more_is_written_all_the_time(
    writer: Writer, follower: Follower, came: asyncio.Queue[object]
) -> None:
    writer.sequence = 3
    waiting = asyncio.create_task(follower.current())
    writer.answers.release()
    await came.get()
    assert not waiting.done()
    # From here on the fetch has no end.
    follower.compare(history_pb2.Head(head=cursor(1000)), follower.place)
    writer.answers.release()
    await asyncio.wait_for(waiting, 5)
    assert follower.place.sequence == 3


@pytest.mark.parametrize("begun", [True, False])
async def test_nobody_waits_for_a_session_that_is_closed(writer: Writer, follower: Follower, begun: bool) -> None:
    writer.sequence = 3
    waiting = asyncio.create_task(follower.current())
    # One step, with which the fetch is about to begin.
    await asyncio.sleep(0)
    assert not writer.asked.is_set()
    if begun:
        await writer.asked.wait()
    follower.close()
    assert (await asyncio.wait([waiting], timeout=5))[0]


async def until_asked(writer: Writer, heads: int) -> None:
    """Return when history was asked so often for a head."""
    async with asyncio.timeout(5):
        while writer.heads < heads:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


async def test_who_comes_before_history_is_asked_shares_the_question(
    writer: Writer, bus: Nowhere, closed: Follower
) -> None:
    bus.confirms.clear()
    first = asyncio.create_task(closed.open())
    await asyncio.sleep(0)
    second = asyncio.create_task(closed.open())
    await asyncio.sleep(0)
    bus.confirms.set()
    assert list(await asyncio.gather(first, second)) == [True, True]
    assert await closed.open() is False
    assert writer.heads == 1


async def test_who_comes_after_history_was_asked_is_told_so(writer: Writer, closed: Follower) -> None:
    writer.arrives.clear()
    first = asyncio.create_task(closed.open())
    await until_asked(writer, 1)
    second = asyncio.create_task(closed.open())
    await asyncio.sleep(0)
    writer.arrives.set()
    assert list(await asyncio.gather(first, second)) == [True, False]


async def test_a_session_that_broke_off_is_current_once_it_is_followed_again_from_a_later_question(
    writer: Writer, follower: Follower
) -> None:
    # Another log stands there, and somebody else begins to follow that.
    writer.log = OTHER_LOG
    follower.compare(await writer.of(None), follower.place)
    writer.arrives.clear()
    opening = asyncio.create_task(follower.open())
    await until_asked(writer, 3)
    writer.sequence = 2
    waiting = asyncio.create_task(follower.current())
    await asyncio.sleep(0)
    writer.arrives.set()
    writer.answers.release()
    await asyncio.wait_for(waiting, 5)
    assert await opening
    assert (follower.place.log_id, follower.place.sequence) == (OTHER_LOG, 2)
