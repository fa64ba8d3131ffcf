"""The seats of live agents: one for each session, closed once, evicted only when idle, timed by identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis.clock import SystemIds
from services.pool.harness.port import HarnessSession
from services.pool.rows import Claim, Key
from services.pool.warm.entries import Entries, Entry, EntryState, Live
from tests.unit.pool.clocks import ManualClock, settle

IDLE_EXPIRED = sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED
CAPACITY = sandbox_pb2.RELEASE_REASON_CAPACITY
KILLED = sandbox_pb2.RELEASE_REASON_KILLED


class Room:
    """Entries whose closings a test holds up and looks at."""

    def __init__(self, seats: int) -> None:
        self.clock = ManualClock()
        self.closed: list[tuple[str, int]] = []
        self.gone: list[str] = []
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.entries = Entries(
            self.clock,
            SystemIds(),
            seats=seats,
            close=self._close,
            gone=lambda key: self.gone.append(key.session),
            spawn=self._spawn,
        )

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        return task

    async def _close(self, entry: Entry, reason: int) -> None:
        await self.may_close.wait()
        self.closed.append((entry.key.session, reason))

    async def seat(self, name: str, window: float | None = 60.0) -> Entry:
        """An idle entry."""
        entry = await self.entries.reserve(Key("p", name), Claim(1, 1))
        entry.live = Live(cast("HarnessSession", _Harness()), "box", "token", "scripted", "local", b"", "fp")
        assert self.entries.keep(entry, window)
        return entry


class _Harness:
    async def close(self) -> None:
        return


@pytest_asyncio.fixture
async def room() -> AsyncIterator[Room]:
    found = Room(seats=3)
    yield found
    for task in found.tasks:
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)


async def test_an_idle_entry_is_checked_out_once_and_its_timer_stops(room: Room) -> None:
    entry = await room.seat("a")
    assert room.entries.checkout(Key("p", "a")) is entry
    assert room.entries.checkout(Key("p", "a")) is None
    await room.clock.advance(100)
    assert entry.state is EntryState.BUSY
    assert not room.closed


async def test_the_window_closes_it_once(room: Room) -> None:
    await room.seat("a")
    await room.clock.advance(59)
    assert not room.closed
    await room.clock.advance(2)
    assert room.closed == [("a", IDLE_EXPIRED)]
    assert len(room.entries) == 0
    assert room.gone == ["a"]


async def test_a_timer_acts_on_its_own_entry_only(room: Room) -> None:
    entry = await room.seat("a")
    room.entries.checkout(Key("p", "a"))
    await room.clock.advance(30)
    assert room.entries.keep(entry, 60.0)
    await room.clock.advance(31)
    assert entry.state is EntryState.IDLE
    await room.clock.advance(30)
    assert room.closed == [("a", IDLE_EXPIRED)]


async def test_closing_twice_closes_once_and_both_wait(room: Room) -> None:
    entry = await room.seat("a")
    room.may_close.clear()
    both = [asyncio.create_task(room.entries.close(entry, reason)) for reason in (KILLED, CAPACITY)]
    await settle()
    assert entry.state is EntryState.DRAINING
    assert room.entries.checkout(Key("p", "a")) is None
    room.may_close.set()
    await asyncio.gather(*both)
    assert room.closed == [("a", KILLED)]


async def test_a_caller_that_gives_up_does_not_stop_the_closing(room: Room) -> None:
    entry = await room.seat("a")
    room.may_close.clear()
    caller = asyncio.create_task(room.entries.close(entry, KILLED))
    await settle()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    room.may_close.set()
    await settle()
    assert room.closed == [("a", KILLED)]
    assert len(room.entries) == 0


async def test_a_new_seat_waits_for_the_old_one_to_be_closed(room: Room) -> None:
    entry = await room.seat("a")
    room.may_close.clear()
    closing = asyncio.create_task(room.entries.close(entry, KILLED))
    reserving = asyncio.create_task(room.entries.reserve(Key("p", "a"), Claim(2, 1)))
    await settle()
    assert not reserving.done()
    room.may_close.set()
    await closing
    fresh = await reserving
    assert fresh is not entry
    assert fresh.state is EntryState.BUSY
    assert room.entries.get(Key("p", "a")) is fresh


async def test_at_the_cap_the_least_recently_used_idle_one_goes(room: Room) -> None:
    await room.seat("a")
    await room.clock.advance(1)
    await room.seat("b")
    await room.clock.advance(1)
    await room.seat("c")
    room.entries.checkout(Key("p", "a"))
    entry = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert entry.seated
    assert room.closed == [("b", CAPACITY)]


async def test_with_nothing_idle_a_turn_runs_without_a_seat_and_is_not_kept(room: Room) -> None:
    busy = [await room.entries.reserve(Key("p", name), Claim(1, 1)) for name in "abc"]
    extra = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert all(entry.seated for entry in busy)
    assert not extra.seated
    assert len(room.entries) == 3
    extra.live = Live(cast("HarnessSession", _Harness()), "box", "token", "scripted", "local", b"", "fp")
    assert not room.entries.keep(extra, 60.0)
    await room.entries.close(extra, CAPACITY)
    assert room.closed == [("d", CAPACITY)]
    assert len(room.entries) == 3


async def test_what_is_lost_is_dropped_and_never_kept(room: Room) -> None:
    idle, busy = await room.seat("a"), await room.seat("b")
    room.entries.checkout(Key("p", "b"))
    room.entries.lost(idle)
    room.entries.lost(busy)
    assert room.entries.get(Key("p", "a")) is None
    assert not room.entries.keep(busy, 60.0)
    assert not room.closed


async def test_projects_do_not_share_seats(room: Room) -> None:
    await room.seat("a")
    assert room.entries.checkout(Key("other", "a")) is None
    other = await room.entries.reserve(Key("other", "a"), Claim(1, 1))
    assert other.seated
    assert not room.closed


async def test_at_the_end_idle_ones_keep_their_disk(room: Room) -> None:
    await room.seat("a")
    await room.entries.reserve(Key("p", "b"), Claim(1, 1))
    await room.entries.close_all()
    assert sorted(room.closed) == [
        ("a", sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE),
        ("b", sandbox_pb2.RELEASE_REASON_SHUTDOWN_IN_FLIGHT),
    ]
