"""One execution's output: what the writer fills in, what its manifest counts, and when it must stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import grpc
import pytest

from hearth._appending import Entry, Item, Parked
from hearth._items import EndingSet, Refusal, WriterRefused
from hearth._publishing import FrameBuffer
from hearth._spill import Room
from hearth._writer import Clock, ExecutionWriter, ProducerLimits
from hearth.errors import CallError
from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2

EXECUTION = "5f0c7cf6-3f0a-4c39-9a53-6c1b5d3a5a10"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
RETRY = history_pb2.APPEND_OUTCOME_RETRY
SET_ABORTED = history_pb2.APPEND_OUTCOME_SET_ABORTED
INVALID = history_pb2.APPEND_OUTCOME_INVALID


class StoppedClock:
    def now(self) -> datetime:
        return NOW

    def monotonic(self) -> float:
        return 100.0


class Shelf:
    """Takes what a writer gives, and lets the test say what history answers."""

    def __init__(self, limits: ProducerLimits | None = None) -> None:
        self.clock: Clock = StoppedClock()
        self.limits = limits or ProducerLimits()
        self._made = 0
        self.ids: Callable[[], str] = self._next_id
        self.room = Room()
        self.items: list[Item] = []
        self.published: list[FrameBuffer] = []
        self.given_up: list[tuple[str, str]] = []

    def _next_id(self) -> str:
        self._made += 1
        return f"id-{self._made}"

    def send(self, key: tuple[str, str], item: Item) -> None:
        assert key == ("p", "s")
        self.items.append(item)

    def publish(self, frames: FrameBuffer) -> None:
        self.published.append(frames)

    def park(self, key: tuple[str, str], parked: Parked) -> None:
        raise AssertionError("nothing is parked here")

    def arrived(self, key: tuple[str, str]) -> None:
        raise AssertionError("nothing is parked here")

    def give_up(self, key: tuple[str, str], execution_id: str, reason: str) -> None:
        self.given_up.append((execution_id, reason))

    def withdraw(self, key: tuple[str, str], unwanted: Callable[[Entry], bool], error: Exception) -> None:
        gone = [item for item in self.items if unwanted(item)]
        self.items = [item for item in self.items if not unwanted(item)]
        for item in gone:
            item.fail(error)

    def answer(self, *outcomes: history_pb2.AppendOutcome.ValueType, **fields: object) -> bool:
        """The answer to the oldest item; true when it is done."""
        item = self.items.pop(0)
        results = [history_pb2.AppendResult(outcome=outcome, sequence=int(outcome == APPENDED)) for outcome in outcomes]
        for result in results:
            result.MergeFrom(history_pb2.AppendResult(**fields))  # type: ignore[arg-type]
        done = item.settle(results)
        if not done:
            self.items.insert(0, item)
        return done

    def events(self, index: int = -1) -> list[event_pb2.Event]:
        return list(history_pb2.AppendSet.FromString(self.items[index].wire).events)


def writer(shelf: Shelf) -> ExecutionWriter:
    execution = session_pb2.ExecutionRef(execution_id=EXECUTION, epoch=7)
    return ExecutionWriter(shelf, session_pb2.SessionKey(project="p", session="s"), execution)


def message(text: str = "hello", message_id: str = "m1") -> event_pb2.Event:
    body = event_pb2.MessageCompleted(message_id=message_id, finish_reason=text)
    return event_pb2.Event(message_completed=body)


def completed() -> event_pb2.Event:
    return event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))


def delta(text: str) -> frame_pb2.TextDelta:
    return frame_pb2.TextDelta(text=text)


async def test_events_are_filled_in() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.event(message())
    output.frame("m2", text_delta=delta("a"))
    output.frame("m2", text_delta=delta("b"))
    output.event(event_pb2.Event(custom=event_pb2.CustomEvent(type="acme.example/x"), entity_id="e"))
    [first], [second] = shelf.events(0), shelf.events(1)
    assert (first.event_id, first.type, first.entity_id) == ("id-1", "message.completed", "m1")
    assert (first.scope, first.execution_id, first.epoch) == (event_pb2.EVENT_SCOPE_RUNNER, EXECUTION, 7)
    assert first.occurred_at.ToDatetime(UTC) == NOW
    assert not first.HasField("frames_through")
    assert (second.type, second.entity_id, second.frames_through) == ("acme.example/x", "e", 1)


async def test_frames_are_numbered_and_stamped() -> None:
    shelf = Shelf()
    output = writer(shelf)
    assert [output.frame("m1", text_delta=delta(text)) for text in "abc"] == [0, 1, 2]
    parts, _ = shelf.published[0].take(1000)
    frame = frame_pb2.Frame.FromString(parts[3][2:])
    assert (frame.frame_index, frame.entity_id, frame.text_delta.text) == (2, "m1", "c")
    assert frame.occurred_at.ToDatetime(UTC) == NOW


async def test_frames_that_cannot_be_sent_get_no_index() -> None:
    output = writer(Shelf())
    with pytest.raises(ValueError, match="65536 are allowed"):
        output.frame("m1", text_delta=delta("x" * 65_536))
    with pytest.raises(ValueError, match="body"):
        output.frame("m1")
    assert output.frame("m1", text_delta=delta("x")) == 0


async def test_the_manifest_counts_runner_events_but_not_the_start() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.event(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="a")))
    output.event(message())
    output.atomic([message(), message()])
    ending = output.ending(completed(), before=[message()])
    *before, last = shelf.events()
    assert [event.type for event in before] == ["message.completed"]
    assert last.execution_completed.summary.manifest == event_pb2.Manifest(runner_events=4)
    assert (last.entity_id, shelf.items[-1].atomic, shelf.items[-1].barrier) == (EXECUTION, True, True)
    for outcomes in ([APPENDED], [APPENDED], [APPENDED, APPENDED], [APPENDED, APPENDED]):
        assert shelf.answer(*outcomes)
    assert (await ending).outcome == APPENDED
    assert shelf.published[-1].ended, "the relay is told that no frames follow"
    assert output.waiting_bytes == 0


async def test_an_event_refused_for_good_is_not_counted_and_makes_the_ending_incomplete() -> None:
    shelf = Shelf()
    output = writer(shelf)
    bad, good = output.event(message()), output.event(message())
    shelf.answer(INVALID)
    shelf.answer(APPENDED)
    output.ending(completed())
    [ending] = shelf.events()
    manifest = ending.execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (1, True)
    assert manifest.incomplete_reason
    assert ((await bad).outcome, (await good).outcome) == (INVALID, APPENDED)
    assert not output.refused.done()


async def test_a_manifest_that_does_not_match_is_corrected_once_and_accepted() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.event(message())
    shelf.answer(APPENDED)
    result = output.ending(completed())
    first = shelf.items[0].wire
    assert not shelf.answer(RETRY, missing=1)
    [again] = shelf.events()
    assert again.execution_completed.summary.manifest.incomplete
    assert again.event_id == history_pb2.AppendSet.FromString(first).events[0].event_id
    assert shelf.answer(APPENDED)
    assert (await result).outcome == APPENDED


async def test_an_ending_that_is_never_accepted_comes_back_to_its_owner_and_leaves_a_mark() -> None:
    shelf = Shelf()
    result = writer(shelf).ending(completed())
    for _ in range(10):
        if shelf.answer(RETRY, missing=1):
            break
    assert (await result).outcome == RETRY
    assert shelf.given_up == [(EXECUTION, "history refused the ending: RETRY")]


async def test_an_ending_that_another_one_beat_leaves_no_mark() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.ending(completed())
    shelf.answer(history_pb2.APPEND_OUTCOME_ALREADY_ENDED, winner=history_pb2.Ending(epoch=8))
    assert output.refused.done()
    assert shelf.given_up == []


async def test_a_bad_event_beside_the_ending_is_left_out() -> None:
    shelf = Shelf()
    output = writer(shelf)
    result = output.ending(completed(), before=[message(message_id="good"), message(message_id="bad")])
    assert not shelf.answer(SET_ABORTED, INVALID, SET_ABORTED)
    good, ending = shelf.events()
    assert good.message_completed.message_id == "good"
    manifest = ending.execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (1, True)
    assert shelf.answer(APPENDED, APPENDED)
    assert (await result).outcome == APPENDED


async def test_what_does_not_fit_beside_the_ending_goes_before_it() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.ending(completed(), before=[message("x" * 900_000, str(number)) for number in range(3)])
    assert [len(shelf.events(index)) for index in range(4)] == [1, 1, 1, 1]
    assert shelf.events()[0].execution_completed.summary.manifest.runner_events == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"outcome": history_pb2.APPEND_OUTCOME_QUARANTINED, "reason": "STALE_EPOCH", "current_epoch": 9},
            "STALE_EPOCH",
        ),
        ({"outcome": history_pb2.APPEND_OUTCOME_QUARANTINED, "reason": "EPOCH_TAKEN"}, "EPOCH_TAKEN"),
        ({"outcome": history_pb2.APPEND_OUTCOME_DUPLICATE, "sequence": 0}, "FENCED"),
        (
            {"outcome": history_pb2.APPEND_OUTCOME_ALREADY_ENDED, "winner": history_pb2.Ending(epoch=8)},
            "EXECUTION_ENDED",
        ),
    ],
)
async def test_a_fenced_writer_stops_at_once(fields: dict[str, object], reason: str) -> None:
    shelf = Shelf()
    output = writer(shelf)
    first, second = output.event(message()), output.event(message())
    shelf.items.pop(0).settle([history_pb2.AppendResult(**fields)])  # type: ignore[arg-type]
    refusal = await output.refused
    assert (refusal.reason, refusal.by) == (reason, "history")
    assert refusal.current_epoch == fields.get("current_epoch", 0)
    assert (refusal.winner is not None) == ("winner" in fields)
    assert first.done()
    assert isinstance(second.exception(), WriterRefused), "what was not sent yet is not sent any more"
    assert shelf.items == []
    with pytest.raises(WriterRefused):
        output.frame("m1", text_delta=delta("x"))
    with pytest.raises(WriterRefused):
        output.event(message())
    with pytest.raises(WriterRefused) as refused:
        output.ending(completed())
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("current", "reason"),
    [
        (session_pb2.ExecutionRef(execution_id="other", epoch=8), "STALE_EPOCH"),
        (session_pb2.ExecutionRef(execution_id="other", epoch=7), "EPOCH_TAKEN"),
        (session_pb2.ExecutionRef(execution_id=EXECUTION, epoch=7), "EXECUTION_ENDED"),
    ],
)
async def test_the_relay_fences_too(current: session_pb2.ExecutionRef, reason: str) -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.frame("m1", text_delta=delta("x"))
    pending = output.event(message())
    shelf.published[0].fenced(current)
    assert await output.refused == Refusal(reason, "relay", current.epoch, current.execution_id)
    assert isinstance(pending.exception(), WriterRefused)


async def test_a_fence_behind_the_own_ending_says_nothing() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.frame("m1", text_delta=delta("x"))
    output.ending(completed())
    shelf.published[0].fenced(session_pb2.ExecutionRef(execution_id=EXECUTION, epoch=7))
    assert not output.refused.done()


async def test_a_history_that_is_away_for_too_long_leaves_room_for_the_ending_only() -> None:
    shelf = Shelf(ProducerLimits(waiting_bytes=10_000, spill_bytes=0))
    output = writer(shelf)
    output.event(message("x" * 8_000))
    lost = output.event(message("y" * 8_000))
    refusal = await output.refused
    assert (refusal.reason, refusal.detail) == ("HISTORY_UNAVAILABLE", "too much waits for the history")
    error = lost.exception()
    assert isinstance(error, WriterRefused)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(WriterRefused):
        output.event(message())
    assert len(shelf.items) == 1, "what waited already is still sent"
    output.ending(completed())
    manifest = shelf.events()[0].execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (1, True)
    assert manifest.incomplete_reason == "too much waits for the history"


async def test_too_large_events_fail_by_themselves() -> None:
    shelf = Shelf()
    output = writer(shelf)
    error = output.event(message("x" * 2**20)).exception()
    assert isinstance(error, CallError)
    assert error.reason == "TOO_LARGE"
    together = output.atomic([message("x" * 900_000) for _ in range(4)]).exception()
    assert isinstance(together, CallError)
    assert shelf.items == []
    output.ending(completed())
    manifest = shelf.events()[0].execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (0, True)


async def test_nothing_follows_the_ending() -> None:
    output = writer(Shelf())
    with pytest.raises(ValueError, match="ending"):
        output.event(completed())
    with pytest.raises(ValueError, match="not an ending"):
        output.ending(message())
    output.ending(completed())
    with pytest.raises(RuntimeError):
        output.frame("m1", text_delta=delta("x"))
    with pytest.raises(RuntimeError):
        output.ending(completed())


async def test_an_ending_says_itself_what_it_knows_to_be_missing() -> None:
    shelf = Shelf()
    ending = completed()
    ending.execution_completed.summary.manifest.incomplete = True
    ending.execution_completed.summary.manifest.incomplete_reason = "the stream of the agent was lost"
    writer(shelf).ending(ending)
    manifest = shelf.events()[0].execution_completed.summary.manifest
    assert manifest.incomplete_reason == "the stream of the agent was lost"


async def test_futures_may_be_ignored_and_cancelled() -> None:
    shelf = Shelf()
    output = writer(shelf)
    output.event(message()).cancel()
    assert shelf.answer(APPENDED)
    output.event(message())
    item = shelf.items.pop()
    item.fail(CallError(grpc.StatusCode.UNAVAILABLE, "closed"))
    assert not isinstance(item, EndingSet)
    await asyncio.sleep(0)
