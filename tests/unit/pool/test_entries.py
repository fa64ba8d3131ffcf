"""The seats of live agents: one for each session, closed once, evicted only when idle, timed by identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret
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
        entry.live = live()
        assert self.entries.keep(entry, window)
        return entry


class _Harness:
    async def close(self) -> None:
        return


def live() -> Live:
    """An agent session."""
    return Live(cast("HarnessSession", _Harness()), "box", Secret("token"), "scripted", "local", b"spec", "fp")


@pytest_asyncio.fixture
async def room() -> AsyncIterator[Room]:
    found = Room(seats=3)
    yield found
    for task in found.tasks:
        task.cancel()
    await asyncio.gather(*found.tasks, return_exceptions=True)


async def test_w_p01_an_idle_entry_is_checked_out_once_and_its_timer_stops(room: Room) -> None:
    entry = await room.seat("a")
    assert room.entries.checkout(Key("p", "a")) is entry
    assert room.entries.checkout(Key("p", "a")) is None
    await room.clock.advance(100)
    assert entry.state is EntryState.BUSY
    assert not room.closed


async def test_w_p02_the_window_closes_it_once(room: Room) -> None:
    await room.seat("a")
    await room.clock.advance(59)
    assert not room.closed
    await room.clock.advance(2)
    assert room.closed == [("a", IDLE_EXPIRED)]
    assert len(room.entries) == 0
    assert room.gone == ["a"]


async def test_w_p02_a_timer_acts_on_its_own_entry_only(room: Room) -> None:
    entry = await room.seat("a")
    room.entries.checkout(Key("p", "a"))
    await room.clock.advance(30)
    assert room.entries.keep(entry, 60.0)
    await room.clock.advance(31)
    assert entry.state is EntryState.IDLE
    await room.clock.advance(30)
    assert room.closed == [("a", IDLE_EXPIRED)]


async def test_w_p16_closing_twice_closes_once_and_both_wait(room: Room) -> None:
    entry = await room.seat("a")
    room.may_close.clear()
    both = [asyncio.create_task(room.entries.close(entry, reason)) for reason in (KILLED, CAPACITY)]
    await settle()
    assert entry.state is EntryState.DRAINING
    assert room.entries.checkout(Key("p", "a")) is None
    room.may_close.set()
    await asyncio.gather(*both)
    assert room.closed == [("a", KILLED)]


async def test_w_p16_a_caller_that_gives_up_does_not_stop_the_closing(room: Room) -> None:
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


async def test_w_p19_a_new_entry_waits_for_the_old_one_to_be_closed(room: Room) -> None:
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


async def test_w_p04_at_capacity_the_oldest_idle_entry_goes(room: Room) -> None:
    await room.seat("a")
    await room.clock.advance(1)
    await room.seat("b")
    await room.clock.advance(1)
    await room.seat("c")
    room.entries.checkout(Key("p", "a"))
    entry = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert entry.seated
    assert room.closed == [("b", CAPACITY)]


async def test_w_p06_w_p25_with_nothing_idle_a_turn_runs_without_a_seat(room: Room) -> None:
    busy = [await room.entries.reserve(Key("p", name), Claim(1, 1)) for name in "abc"]
    extra = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert all(entry.seated for entry in busy)
    assert not extra.seated
    assert room.entries.get(Key("p", "d")) is extra
    extra.live = live()
    assert not room.entries.keep(extra, 60.0)
    assert not await room.entries.seat(extra)
    assert not room.closed
    await room.entries.close(extra, CAPACITY)
    assert room.closed == [("d", CAPACITY)]
    assert len(room.entries) == 3


async def test_w_p06_a_seat_that_is_free_by_then_is_taken_at_the_end_of_the_turn(room: Room) -> None:
    busy = [await room.entries.reserve(Key("p", name), Claim(1, 1)) for name in "abc"]
    extra = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    extra.live = live()
    await room.entries.close(busy[0], KILLED)
    assert await room.entries.seat(extra)
    assert room.entries.keep(extra, 60.0)


async def test_w_p05_w_p08_who_waits_for_people_is_never_evicted(room: Room) -> None:
    asking = await room.seat("a")
    room.entries.checkout(Key("p", "a"))
    assert room.entries.ask(asking)
    assert asking.state is EntryState.AWAITING
    for name in "bc":
        await room.entries.reserve(Key("p", name), Claim(1, 1))
    extra = await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert not extra.seated
    await room.clock.advance(10_000)
    assert not room.closed
    assert room.entries.checkout(Key("p", "a")) is None
    assert not room.entries.keep(asking, 60.0)


async def test_so_many_wait_on_each_provider_and_nobody_makes_room(room: Room) -> None:
    first, second = await room.seat("a"), await room.seat("b")
    for name in "ab":
        room.entries.checkout(Key("p", name))
    assert room.entries.may_wait(first, 1)
    assert not room.entries.may_wait(first, 0)
    assert room.entries.ask(first)
    # It waits already, and it is the other one that asks now.
    assert room.entries.may_wait(first, 1)
    assert not room.entries.may_wait(second, 1)
    assert room.entries.may_wait(second, 2)
    assert second.live is not None
    second.live.provider = "daytona"
    assert room.entries.may_wait(second, 1)
    assert first.state is EntryState.AWAITING


async def test_what_drains_is_used_by_nobody_and_closed_once(room: Room) -> None:
    asking = await room.seat("a")
    assert not room.entries.drain(asking)
    room.entries.checkout(Key("p", "a"))
    assert room.entries.ask(asking)
    assert room.entries.drain(asking)
    assert asking.state is EntryState.DRAINING
    assert not room.entries.drain(asking)
    assert not room.entries.go_on(asking)
    assert not room.entries.keep(asking, 60.0)
    assert room.entries.checkout(Key("p", "a")) is None
    # It is not closed by that: the ending of its turn comes first.
    assert not room.closed
    assert room.entries.get(Key("p", "a")) is asking
    await asyncio.gather(room.entries.close(asking, IDLE_EXPIRED), room.entries.close(asking, KILLED))
    assert room.closed == [("a", IDLE_EXPIRED)]


async def test_who_is_being_closed_is_not_drained(room: Room) -> None:
    asking = await room.seat("a")
    room.entries.checkout(Key("p", "a"))
    room.may_close.clear()
    closing = asyncio.create_task(room.entries.close(asking, KILLED))
    await settle()
    assert not room.entries.drain(asking)
    room.may_close.set()
    await closing


async def test_w_p09_a_turn_that_waits_goes_on_once(room: Room) -> None:
    asking = await room.seat("a")
    assert not room.entries.ask(asking)
    room.entries.checkout(Key("p", "a"))
    assert room.entries.ask(asking)
    assert room.entries.go_on(asking)
    assert not room.entries.go_on(asking)
    assert room.entries.keep(asking, 60.0)
    room.entries.checkout(Key("p", "a"))
    assert room.entries.ask(asking)
    room.entries.lost(asking)
    assert not room.entries.go_on(asking)


async def test_w_p07_a_seat_is_free_when_its_entry_is_closed_and_not_before(room: Room) -> None:
    for name in "abc":
        await room.seat(name)
        await room.clock.advance(1)
    room.may_close.clear()
    first, second = (asyncio.create_task(room.entries.reserve(Key("p", name), Claim(1, 1))) for name in ("d", "e"))
    await settle()
    assert not first.done()
    assert not second.done()
    states = {entry.key.session: entry.state for entry in room.entries.all()}
    assert states == {
        "a": EntryState.DRAINING,
        "b": EntryState.DRAINING,
        "c": EntryState.IDLE,
        "d": EntryState.BUSY,
        "e": EntryState.BUSY,
    }
    room.may_close.set()
    assert [(await task).seated for task in (first, second)] == [True, True]
    assert room.closed == [("a", CAPACITY), ("b", CAPACITY)]


async def test_w_p10_what_is_being_closed_is_neither_used_nor_kept(room: Room) -> None:
    entry = await room.seat("a")
    room.may_close.clear()
    closing = asyncio.create_task(room.entries.close(entry, CAPACITY))
    await settle()
    assert room.entries.checkout(Key("p", "a")) is None
    assert not room.entries.keep(entry, 60.0)
    assert not room.entries.ask(entry)
    room.may_close.set()
    await closing
    assert not room.entries.keep(entry, 60.0)


async def test_w_p14_w_p15_w_p18_an_old_entry_never_touches_a_newer_one(room: Room) -> None:
    old = await room.seat("a")
    await room.entries.close(old, KILLED)
    new = await room.seat("a")
    assert not room.entries.keep(old, 60.0)
    await room.entries.close(old, CAPACITY)
    room.entries.drop(old)
    assert room.entries.get(Key("p", "a")) is new
    assert new.state is EntryState.IDLE
    assert room.closed == [("a", KILLED)]


async def test_w_p23_a_turn_is_kept_in_the_very_seat_that_it_reserved(room: Room) -> None:
    entry = await room.entries.reserve(Key("p", "a"), Claim(1, 1))
    assert entry.seated
    entry.live = live()
    assert room.entries.keep(entry, 60.0)
    assert room.entries.all() == [entry]
    assert room.entries.checkout(Key("p", "a")) is entry


async def test_w_p24_a_reservation_that_is_given_up_leaves_no_entry(room: Room) -> None:
    for name in "abc":
        await room.seat(name)
    room.may_close.clear()
    reserving = asyncio.create_task(room.entries.reserve(Key("p", "d"), Claim(1, 1)))
    await settle()
    assert room.entries.get(Key("p", "d")) is not None
    reserving.cancel()
    await asyncio.gather(reserving, return_exceptions=True)
    assert room.entries.get(Key("p", "d")) is None
    assert "d" in room.gone
    room.may_close.set()
    await settle()
    assert len(room.entries) == 2


async def test_w_p17_the_reason_decides_and_not_what_the_log_says(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    evicted = await room.seat("a")
    await room.clock.advance(1)
    for name in "bc":
        await room.seat(name)
    await room.entries.reserve(Key("p", "d"), Claim(1, 1))
    assert "entry makes room" in caplog.messages
    caplog.clear()
    asked_for = room.entries.get(Key("p", "b"))
    assert asked_for is not None
    await room.entries.close(asked_for, CAPACITY)
    assert not caplog.messages
    assert room.closed == [(evicted.key.session, CAPACITY), ("b", CAPACITY)]


async def test_w_p22_two_sessions_with_one_name_are_listed_apart(room: Room) -> None:
    await room.seat("a")
    other = await room.entries.reserve(Key("other", "a"), Claim(1, 1))
    other.live = live()
    assert room.entries.ask(other)
    waiting = [entry.key for entry in room.entries.all() if entry.state is EntryState.AWAITING]
    assert waiting == [Key("other", "a")]


async def test_what_is_lost_is_dropped_and_never_kept(room: Room) -> None:
    idle, busy = await room.seat("a"), await room.seat("b")
    room.entries.checkout(Key("p", "b"))
    room.entries.lost(idle)
    room.entries.lost(busy)
    assert room.entries.get(Key("p", "a")) is None
    assert not room.entries.keep(busy, 60.0)
    assert not room.closed


async def test_w_p21_w_d03_w_k01_projects_do_not_share_entries(room: Room) -> None:
    await room.seat("a")
    assert room.entries.checkout(Key("other", "a")) is None
    other = await room.entries.reserve(Key("other", "a"), Claim(1, 1))
    assert other.seated
    assert not room.closed


async def test_w_p20_at_the_end_idle_ones_keep_their_disk_and_others_do_not(room: Room) -> None:
    await room.seat("a")
    await room.entries.reserve(Key("p", "b"), Claim(1, 1))
    asking = await room.seat("c")
    room.entries.checkout(Key("p", "c"))
    assert room.entries.ask(asking)
    await room.entries.close_all()
    in_flight = sandbox_pb2.RELEASE_REASON_SHUTDOWN_IN_FLIGHT
    assert sorted(room.closed) == [
        ("a", sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE),
        ("b", in_flight),
        ("c", in_flight),
    ]
    assert len(room.entries) == 0
