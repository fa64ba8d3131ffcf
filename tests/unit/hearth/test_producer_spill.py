"""What finds no room in memory: bounded there, kept in a file without a name, back in its place in the line."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth import _spill
from hearth._appending import AppendQueue, Entry, Item, Parked
from hearth._items import Fact, WriterRefused
from hearth._publishing import FrameBuffer, FrameQueue
from hearth._spill import BLOCK_BYTES, UNWRITTEN_BYTES, Extents, NamelessFile, Room
from hearth._writer import Clock, ExecutionWriter, ProducerLimits
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.support.events import input_queued
from tests.support.waiting import eventually

KEY = ("p", "s")


class Desk:
    """A producer without its streams: the test sends, answers and breaks connections itself."""

    def __init__(self, directory: Path, **limits: int) -> None:
        self.clock: Clock = SystemClock()
        self.limits = ProducerLimits(spill_dir=str(directory), **limits)
        self._made = 0
        self.ids: Callable[[], str] = self._next_id
        self.room = Room(str(directory))
        self.queue = AppendQueue(FrameQueue(gather=0.0))
        self.sent: list[str] = []
        self.given_up: list[str] = []
        self._open: list[bytes] = []
        self._sequence = 0

    def _next_id(self) -> str:
        self._made += 1
        return f"id-{self._made}"

    # What writers see.

    def send(self, key: tuple[str, str], item: Item) -> None:
        self.queue.add(key, item)

    def park(self, key: tuple[str, str], parked: Parked) -> None:
        self.queue.park(key, parked)

    def arrived(self, key: tuple[str, str]) -> None:
        self.queue.arrived(key)

    def publish(self, frames: FrameBuffer) -> None:
        return

    def withdraw(self, key: tuple[str, str], unwanted: Callable[[Entry], bool], error: Exception) -> None:
        for entry in self.queue.remove(key, unwanted):
            entry.fail(error)

    def give_up(self, key: tuple[str, str], execution_id: str, reason: str) -> None:
        self.given_up.append(execution_id)

    # What tests do.

    def writer(self, execution_id: str = "e1", epoch: int = 1) -> ExecutionWriter:
        execution = session_pb2.ExecutionRef(execution_id=execution_id, epoch=epoch)
        return ExecutionWriter(self, session_pb2.SessionKey(project=KEY[0], session=KEY[1]), execution)

    def send_request(self) -> bool:
        """Put the next request on its way; false when there is none now."""
        request = self.queue.take(self.clock.monotonic())
        if request is not None:
            self._open.append(request)
        return request is not None

    def answer(self, outcome: history_pb2.AppendOutcome.ValueType = history_pb2.APPEND_OUTCOME_APPENDED) -> bool:
        """Answer the oldest request; false when none is on its way."""
        if not self._open:
            return False
        request = history_service_pb2.AppendStreamRequest.FromString(self._open.pop(0))
        response = history_service_pb2.AppendStreamResponse()
        reply = response.replies.add(number=request.number)
        for found in request.sets:
            result = reply.sets.add()
            for event in found.events:
                self._sequence += 1
                self.sent.append(event.event_id)
                result.results.add(outcome=outcome, sequence=self._sequence)
        self.queue.received(response, self.clock.monotonic())
        return True

    def lose(self) -> None:
        """The stream breaks."""
        self._open.clear()
        self.queue.lost(None, self.clock.monotonic())

    async def drain(self) -> None:
        """Send and answer until nothing is left."""
        async with asyncio.timeout(20):
            while self.queue.pending:
                if not (self.send_request() or self.answer()):
                    await asyncio.sleep(0.001)


def message(text: str = "", event_id: str = "") -> event_pb2.Event:
    body = event_pb2.MessageCompleted(message_id="m", finish_reason=text)
    return event_pb2.Event(event_id=event_id, message_completed=body)


def completed() -> event_pb2.Event:
    return event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted())


def open_files() -> list[str]:
    """What this process has open without a name."""
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return [name for name in names if name.endswith("(deleted)")]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Desk]]:
    """Desks over the directory of the test; it is empty after each, and nothing of it is open."""
    desks: list[Desk] = []

    def make(**limits: int) -> Desk:
        desks.append(Desk(tmp_path, **limits))
        return desks[-1]

    yield make
    for desk in desks:
        for entry in desk.queue.drain():
            entry.fail(CallError(grpc.StatusCode.UNAVAILABLE, "the test is over"))
        desk.room.close()
        if desk.room._thread is not None:
            await asyncio.to_thread(desk.room._thread.shutdown)
    assert os.listdir(tmp_path) == []
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50))))
def test_no_two_parts_of_a_file_overlap(steps: list[tuple[bool, int]]) -> None:
    extents = Extents()
    taken: dict[int, int] = {}
    for give_back, number in steps:
        if give_back and taken:
            offset = sorted(taken)[number % len(taken)]
            extents.free(offset)
            del taken[offset]
        else:
            offset = extents.take(number)
            assert all(offset + number <= at or at + length <= offset for at, length in taken.items())
            taken[offset] = number
    assert bool(extents) == bool(taken)


def test_room_that_was_given_back_is_taken_first() -> None:
    extents = Extents()
    assert [extents.take(10) for _ in range(3)] == [0, 10, 20]
    extents.free(10)
    assert [extents.take(11), extents.take(4), extents.take(6)] == [30, 10, 14]


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_has_no_name_from_the_start(tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    file = NamelessFile(str(tmp_path))
    file.write(5, b"hello")
    assert os.listdir(tmp_path) == []
    assert len([name for name in open_files() if name.startswith(str(tmp_path))]) == 1
    assert file.read(5, 5) == b"hello"
    with pytest.raises(OSError, match="shorter"):
        file.read(5, 6)
    file.close()
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
    file.write(0, b"again")
    assert file.read(0, 5) == b"again"
    file.close()


async def test_what_waits_stays_in_order_and_in_bounds(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=1_000_000)
    output = desk.writer()
    wanted = []
    for number in range(10_000):
        output.event(message("x" * 800, f"event-{number}"))
        wanted.append(f"event-{number}")
        assert output._tally.waiting_bytes <= 1_000_000
        if number % 100 == 0:
            await asyncio.sleep(0)
    assert output.parked_bytes > 7_000_000
    assert output.waiting_bytes > 8_000_000
    ending = output.ending(completed())
    peak = 0
    async with asyncio.timeout(20):
        while desk.queue.pending:
            peak = max(peak, output._tally.waiting_bytes)
            if not (desk.send_request() or desk.answer()):
                await asyncio.sleep(0.001)
    assert desk.sent == [*wanted, "id-1"]
    assert peak <= 1_000_000 + BLOCK_BYTES
    assert (await ending).outcome == history_pb2.APPEND_OUTCOME_APPENDED
    assert (output.waiting_bytes, output.parked_bytes, desk.room.bytes) == (0, 0, 0)


async def test_nothing_is_parked_while_history_keeps_up(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=10_000)
    output = desk.writer()
    for _ in range(1_000):
        output.event(message("x" * 800))
        await desk.drain()
    assert desk.room._thread is None


async def test_what_was_parked_is_written_and_leaves_the_memory(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=100_000)
    output = desk.writer()
    for number in range(10_000):
        output.event(message("x" * 2_000))
        if number % 50 == 0:
            await asyncio.sleep(0.001)
    assert output._spill is not None
    spill = output._spill
    await eventually(lambda: spill.unwritten <= BLOCK_BYTES)
    gc.collect()
    kept = [found for found in gc.get_objects() if isinstance(found, _spill.Promise)]
    assert not kept, "nobody asked for the results"
    blocks = [found for found in gc.get_objects() if isinstance(found, _spill.Block)]
    assert len(blocks) < 100
    assert sum(len(block._records) for block in blocks) < 200, "only the block that is being filled holds records"
    await desk.drain()
    assert len(desk.sent) == 10_000


KINDS = st.sampled_from(["one", "one", "one", "two", "atomic", "fact", "send", "send", "answer", "lose", "wait"])


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(KINDS, st.integers(1, 40_000)), max_size=120), waiting=st.integers(1, 100_000))
async def test_any_order_of_steps_keeps_the_order_of_the_line(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], waiting: int
) -> None:
    """Two executions of one session and its facts, sent, answered and sent again in every way."""
    desk = Desk(tmp_path_factory.mktemp("spill"), waiting_bytes=waiting)
    one, two = desk.writer("e1", 1), desk.writer("e2", 2)
    wanted: list[str] = []
    futures: list[asyncio.Future[Any]] = []

    def new(size: int) -> event_pb2.Event:
        wanted.append(f"event-{len(wanted)}")
        return message("x" * size, wanted[-1])

    for kind, size in steps:
        match kind:
            case "one":
                futures.append(one.event(new(size)))
            case "two":
                futures.append(two.event(new(size)))
            case "atomic":
                futures.append(one.atomic([new(size), new(size // 2)]))
            case "fact":
                event = input_queued()
                event.event_id = f"event-{len(wanted)}"
                wanted.append(event.event_id)
                fact = Fact(event.SerializeToString())
                futures.append(fact.future)
                desk.send(KEY, fact)
            case "send":
                desk.send_request()
            case "answer":
                desk.answer()
            case "lose":
                desk.lose()
            case "wait":
                await asyncio.sleep(0.001)
        for output in (one, two):
            assert output._tally.waiting_bytes <= max(waiting, BLOCK_BYTES + 100_000)
    await desk.drain()
    assert desk.sent == wanted
    results = [future.result() for future in futures]
    flat = [result.sequence for found in results for result in (found if isinstance(found, list) else [found])]
    assert flat == list(range(1, len(wanted) + 1)), "each future has its own result"
    desk.room.close()


async def test_results_reach_who_asked_for_them_however_they_asked(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=1)
    output = desk.writer()
    called: list[int] = []

    async def ask(number: int) -> int:
        return int((await output.event(message(event_id=f"event-{number}"))).sequence)

    output.event(message())
    output.event(message()).add_done_callback(lambda future: called.append(future.result().sequence))
    asking = [asyncio.create_task(ask(number)) for number in range(2)]
    gathered = asyncio.gather(output.event(message()), asyncio.shield(output.event(message())))
    cancelled = output.event(message())
    cancelled.cancel()
    await asyncio.sleep(0)
    gc.collect()
    await desk.drain()
    assert [result.sequence for result in await gathered] == [3, 4]
    assert called == [2]
    assert await asyncio.gather(*asking) == [6, 7]
    assert cancelled.cancelled()
    assert output._spill is not None
    assert not output._spill._pinned


async def test_a_fence_drops_what_is_parked(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=100_000)
    old, new = desk.writer("e1", 1), desk.writer("e2", 2)
    futures = [old.event(message("x" * 20_000)) for _ in range(100)]
    desk.send_request()
    kept = [new.event(message("x" * 20_000, f"kept-{number}")) for number in range(20)]
    desk.answer(history_pb2.APPEND_OUTCOME_QUARANTINED)
    assert old.refused.done()
    assert old.parked_bytes == 0
    assert isinstance(futures[-1].exception(), WriterRefused)
    desk.sent.clear()
    await desk.drain()
    assert desk.sent == [f"kept-{number}" for number in range(20)]
    assert all(future.done() for future in (*futures, *kept))


async def test_the_limit_ends_the_turn_but_not_its_record(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=100_000, spill_bytes=1_000_000)
    output = desk.writer()
    count = 0
    while not output.refused.done():
        future = output.event(message("x" * 10_000, f"event-{count}"))
        count += 1
    assert 105 <= count <= 110
    assert output.refused.result().detail == "too much waits for the history"
    assert isinstance(future.exception(), WriterRefused)
    ending = completed()
    output.ending(ending)
    manifest = ending.execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (count - 1, True)
    await desk.drain()
    assert desk.sent == [*(f"event-{number}" for number in range(count - 1)), ending.event_id]


async def test_a_file_does_not_grow_while_its_content_does_not(make: Callable[..., Desk], tmp_path: Path) -> None:
    desk = make(waiting_bytes=100_000, spill_bytes=4_000_000)
    output = desk.writer()
    largest = 0
    for number in range(400):
        for _ in range(10):
            output.event(message("x" * 10_000))
        await asyncio.sleep(0.0005)
        if number >= 30:
            async with asyncio.timeout(5):
                while output.parked_bytes > 2_000_000:
                    if not (desk.send_request() or desk.answer()):
                        await asyncio.sleep(0.001)
        descriptor = output._spill._file._descriptor if output._spill is not None else -1
        if descriptor >= 0:
            largest = max(largest, os.fstat(descriptor).st_size)
    assert not output.refused.done()
    assert 2_000_000 < largest < 5_000_000, "forty megabytes went through it"


async def test_a_full_disk_loses_nothing_that_was_taken(
    make: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    really = os.pwrite

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    desk = make(waiting_bytes=100_000)
    output = desk.writer()
    taken = 0

    async def write(count: int) -> None:
        nonlocal taken
        for _ in range(count):
            if output.refused.done():
                return
            output.event(message("x" * 10_000, f"event-{taken}"))
            taken += not output.refused.done()
            await asyncio.sleep(0.0002)

    await write(300)
    assert not output.refused.done()
    full.set()
    await write(3_000)
    refusal = output.refused.result()
    assert refusal.reason == "HISTORY_UNAVAILABLE"
    assert "No space left on device" in refusal.detail
    assert output._spill is not None
    assert output._spill.unwritten <= UNWRITTEN_BYTES
    with pytest.raises(WriterRefused):
        output.event(message())
    ending = completed()
    output.ending(ending)
    assert "No space left on device" in ending.execution_completed.summary.manifest.incomplete_reason
    await desk.drain()
    assert desk.sent == [*(f"event-{number}" for number in range(taken)), ending.event_id]


async def test_a_directory_that_is_not_there_is_no_room(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "nowhere", waiting_bytes=1_000)
    output = desk.writer()
    async with asyncio.timeout(5):
        while not output.refused.done():
            output.event(message("x" * 100_000))
            await asyncio.sleep(0.001)
    assert "No such file or directory" in output.refused.result().detail
    await desk.drain()
    desk.room.close()


async def test_a_disk_that_hangs_is_waited_for_only_a_moment(
    make: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    going = threading.Event()
    really = os.pwrite

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        going.wait(20)
        return really(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    desk = make(waiting_bytes=100_000)
    output = desk.writer()
    taken = 0
    slowest = 0.0
    while not output.refused.done():
        began = desk.clock.monotonic()
        output.event(message("x" * 10_000))
        slowest = max(slowest, desk.clock.monotonic() - began)
        taken += 1
    assert output.refused.result().detail == "the disk for what waits for the history does not keep up"
    assert UNWRITTEN_BYTES < taken * 10_200 < UNWRITTEN_BYTES + 300_000
    assert slowest < 0.5
    going.set()
    await desk.drain()
    assert len(desk.sent) == taken - 1


@pytest.mark.parametrize("damage", ["changed", "gone"])
async def test_what_cannot_be_read_back_is_missing_and_said_to_be(make: Callable[..., Desk], damage: str) -> None:
    desk = make(waiting_bytes=100_000)
    output = desk.writer()
    futures = [output.event(message("x" * 10_000, f"event-{number}")) for number in range(200)]
    assert output._spill is not None
    spill = output._spill
    await eventually(lambda: spill.unwritten <= BLOCK_BYTES)
    descriptor = spill._file._descriptor
    if damage == "changed":
        os.pwrite(descriptor, b"?", BLOCK_BYTES + BLOCK_BYTES // 2)
    else:
        os.ftruncate(descriptor, BLOCK_BYTES // 2)
    await desk.drain()
    assert output.refused.result().detail == "what waited on the disk could not be read back"
    lost = [future for future in futures if future.exception() is not None]
    assert 20 <= len(lost) < 200
    assert len(desk.sent) == 200 - len(lost)
    ending = completed()
    output.ending(ending)
    manifest = ending.execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (len(desk.sent), True)
    assert manifest.incomplete_reason == "what waited on the disk could not be read back"
    await desk.drain()


async def test_large_records_pass(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=100_000)
    output = desk.writer()
    sizes = [1_000_000, 10, 900_000, 300_000, 5]
    order = [f"event-{number}" for number in range(len(sizes))]
    for name, size in zip(order, sizes, strict=True):
        output.event(message("x" * size, name))
    result = output.atomic([message("x" * 1_000_000, f"atomic-{number}") for number in range(2)])
    await desk.drain()
    assert desk.sent == [*order, "atomic-0", "atomic-1"]
    assert len(await result) == 2


async def test_traces_and_frames_survive_the_file(make: Callable[..., Desk]) -> None:
    desk = make(waiting_bytes=1)
    output = desk.writer()
    trace = f"00-{random.Random(1).randbytes(16).hex()}-00f067aa0ba902b7-01"
    output.traced(trace)
    output.event(message())
    output.event(message())
    desk.send_request()
    desk.answer()
    [request] = [history_service_pb2.AppendStreamRequest.FromString(found) for found in _take(desk)]
    assert [found.traceparent for found in request.sets] == [trace]
    desk.answer()


def _take(desk: Desk) -> Sequence[bytes]:
    desk.send_request()
    return desk._open
