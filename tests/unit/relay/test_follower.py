"""Waiting until a session is as far as history: it ends with the event that was wanted, whatever follows it."""

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


def cursor(sequence: int) -> session_pb2.Cursor:
    """That of event `sequence`."""
    return session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=f"{sequence:016x}")


def item(sequence: int) -> bytes:
    """Event `sequence`, as history hands it out."""
    event = event_pb2.Event(event_id=f"{sequence:016x}-0000-0000", scope=event_pb2.EVENT_SCOPE_SESSION, type="x")
    return event_pb2.EventItem(event=event, cursor=cursor(sequence)).SerializeToString()


class Writer:
    """A history whose log grows by an event with every question for a page, until it answers none any more."""

    def __init__(self) -> None:
        self.sequence = 1
        self.answers = asyncio.Semaphore(0)
        self.asked = asyncio.Event()

    async def of(self, _key: object) -> history_pb2.Head:
        """The head of now."""
        return history_pb2.Head(head=cursor(self.sequence))

    async def page(self, _key: object, after: Place) -> Any:
        """One event."""
        self.asked.set()
        await self.answers.acquire()
        return SimpleNamespace(events=[item(after.sequence + 1)])


class Nowhere:
    """A bus on which nothing comes."""

    async def listen(self, *_: object) -> None:
        """Hear nothing."""

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


@pytest_asyncio.fixture
async def follower(writer: Writer, came: asyncio.Queue[object]) -> AsyncIterator[Follower]:
    """One that stands at event 1."""
    tasks = Tasks(_dies)
    parts = SimpleNamespace(
        log=writer,
        heads=writer,
        written=SimpleNamespace(of=_no),
        bus=Nowhere(),
        tasks=tasks,
        clock=SystemClock(),
        settings=RelaySettings.model_construct(),
        suspect=lambda _: None,
    )
    found = Follower(_KEY, cast("Parts", parts), came=came.put_nowait, broken=lambda: None, readers=list[Any])
    await found.open()
    yield found
    found.close()
    await tasks.stop()


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
