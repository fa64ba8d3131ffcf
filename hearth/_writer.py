"""The output of one execution: numbers its frames, fences its events, counts them for the manifest of its ending."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Protocol, TypedDict, Unpack

from hearth._appending import REQUEST_BYTES, REQUEST_EVENTS, Entry, Item, Parked, event_field, trace_field
from hearth._items import (
    ENDINGS,
    EndingSet,
    Output,
    Refusal,
    Tally,
    WriterRefused,
    entity_of,
    new_future,
    too_large,
    type_of,
    unpack,
)
from hearth._publishing import FrameBuffer
from hearth._spill import Room, Spill, SpillRefused
from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2

logger = logging.getLogger(__name__)

Key = tuple[str, str]

_STORED = frozenset({history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE})


class Clock(Protocol):
    """A source of time."""

    def now(self) -> datetime:
        """Wall time, aware."""
        ...

    def monotonic(self) -> float:
        """Seconds since some point; only differences mean something."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ProducerLimits:
    """Bounds of a producer. Times are seconds."""

    # Frames of one execution that wait for the relay; beyond it the oldest are lost.
    frames: int = 256
    frame_bytes: int = 64 * 1024
    # Events of one execution that wait for the history in memory, and behind those in a file, made in this directory
    # (empty: that of large temporary files). Over both, the execution has to end.
    waiting_bytes: int = 16 * 1024 * 1024
    spill_bytes: int = 256 * 1024 * 1024
    spill_dir: str = ""
    event_bytes: int = 1024 * 1024
    # How long an event waits for the frames before it.
    hold: float = 0.05
    # How long frames gather while others are on their way.
    gather: float = 0.004
    # How long a request may stay without an answer before its stream is given up.
    history_answer: float = 30.0
    relay_answer: float = 10.0


class FrameBody(TypedDict, total=False):
    """The body of a frame; exactly one is given."""

    text_delta: frame_pb2.TextDelta
    thought_delta: frame_pb2.ThoughtDelta
    tool_started: frame_pb2.ToolStarted
    tool_delta: frame_pb2.ToolDelta
    tool_output: frame_pb2.ToolOutput
    plan: frame_pb2.PlanUpdate
    usage: frame_pb2.UsageUpdate
    stage: frame_pb2.StageUpdate
    custom: frame_pb2.CustomFrame


class Outlet(Protocol):
    """Where a writer gives what it writes."""

    clock: Clock
    limits: ProducerLimits
    ids: Callable[[], str]
    room: Room

    def send(self, key: Key, item: Item) -> None:
        """Append in order; fails the item at once when that cannot be."""
        ...

    def park(self, key: Key, parked: Parked) -> None:
        """Append in order what is parked; fails it at once when that cannot be."""
        ...

    def arrived(self, key: Key) -> None:
        """Something parked can be taken."""
        ...

    def publish(self, frames: FrameBuffer) -> None:
        """The buffer has something new."""
        ...

    def withdraw(self, key: Key, unwanted: Callable[[Entry], bool], error: Exception) -> None:
        """Fail the entries of a session that were not sent yet."""
        ...

    def give_up(self, key: Key, execution_id: str, reason: str) -> None:
        """Output of an execution is missing, and no ending of its writer will say so."""
        ...


class ExecutionWriter:
    """The output of one execution at one epoch.

    `refused` resolves when this writer must stop: what it still had to send fails, and so does each further call, with
    `WriterRefused`. The futures of events may be ignored: what is refused for good makes the ending incomplete.
    """

    def __init__(self, outlet: Outlet, session: session_pb2.SessionKey, execution: session_pb2.ExecutionRef) -> None:
        self.refused: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()
        self.execution = execution
        self._outlet = outlet
        self.key = (session.project, session.session)
        self._frames = FrameBuffer(session, execution, limit=outlet.limits.frames, fenced=self._fenced_by_relay)
        self._tally = Tally(self.key, execution, self._refuse)
        self._spill: Spill | None = None
        self._trace = b""
        self._next_index = 0
        self._finished = False

    @property
    def frames_assigned(self) -> int:
        """How many frames got an index so far."""
        return self._next_index

    @property
    def frames_lost(self) -> int:
        """How many frames were let go of before the relay took them."""
        return self._frames.dropped

    @property
    def waiting_bytes(self) -> int:
        """Bytes of events that history has not answered."""
        return self._tally.waiting_bytes + self.parked_bytes

    @property
    def parked_bytes(self) -> int:
        """How much of that found no room in memory."""
        return self._spill.bytes if self._spill is not None else 0

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written: it was refused, its ending was given, or it was abandoned."""
        return self._finished or self.refused.done()

    def traced(self, traceparent: str) -> None:
        """What is written from now on belongs to this W3C trace context: its commits become part of that trace."""
        self._trace = trace_field(traceparent)
        self._frames.traced(traceparent)

    def frame(self, entity_id: str, **body: Unpack[FrameBody]) -> int:
        """Publish a frame and return its index. Never waits.

        Raises `WriterRefused`, and ValueError for a frame over 64 KiB or without a body.
        """
        self._check_open()
        now = self._outlet.clock.now()
        frame = frame_pb2.Frame(frame_index=self._next_index, entity_id=entity_id, **body)
        stamp = frame.occurred_at
        stamp.seconds = int(now.timestamp())
        stamp.nanos = now.microsecond * 1000
        content = frame.SerializeToString()
        if not body:
            raise ValueError("a frame needs a body")
        if len(content) > self._outlet.limits.frame_bytes:
            raise ValueError(f"a frame of {len(content)} bytes; {self._outlet.limits.frame_bytes} are allowed")
        self._frames.add(self._next_index, content)
        self._next_index += 1
        self._outlet.publish(self._frames)
        return self._next_index - 1

    def event(self, event: event_pb2.Event) -> asyncio.Future[history_pb2.AppendResult]:
        """Append an event of this run; the future tells what became of it.

        Fills in place: scope, execution, epoch, frames_through, and where empty the event id, type, entity id and time.
        Raises `WriterRefused`; the future fails with `CallError` when the event cannot be sent at all.
        """
        return self._append([event], atomic=False)

    def atomic(self, events: Sequence[event_pb2.Event]) -> asyncio.Future[list[history_pb2.AppendResult]]:
        """Append events of this run, all of them or none; together at most 3 MiB. Else like `event`."""
        return self._append(events, atomic=True)

    def ending(
        self, event: event_pb2.Event, *, before: Sequence[event_pb2.Event] = ()
    ) -> asyncio.Future[history_pb2.AppendResult]:
        """Append the ending, in one atomic set with the events of `before`. Nothing may be written after it.

        Its manifest is filled in; what `manifest.incomplete` says already, stays. Events of `before` that history
        refuses are left out, and the ending is incomplete. When they do not fit into one set with the ending they are
        appended one by one before it.
        """
        body = event.WhichOneof("body")
        if body not in ENDINGS:
            raise ValueError(f"{body} is not an ending")
        self._check_open(ending=True)
        sizes = [self._fill(earlier).ByteSize() for earlier in before]
        largest = self._outlet.limits.event_bytes
        fits = len(sizes) < REQUEST_EVENTS and sum(sizes) <= REQUEST_BYTES - largest
        if not fits or max(sizes, default=0) > largest:
            for earlier in before:
                self._append([earlier], atomic=False, ending=True)
            before = ()
        self._finished = True
        item = EndingSet(self._tally, self._fill(event), before, self._ended)
        assert item.future is not None
        self._cover(item, event)
        item.wait()
        self._outlet.send(self.key, item)
        return item.future

    def abandon(self) -> None:
        """Nothing more comes from this writer, and somebody else writes the ending: let go of its frames."""
        self._finished = True
        self._frames.clear()

    def _append(self, events: Sequence[event_pb2.Event], *, atomic: bool, ending: bool = False) -> asyncio.Future[Any]:
        self._check_open(ending=ending)
        for event in events:
            if event.WhichOneof("body") in ENDINGS:
                raise ValueError("an ending is written with ending()")
            self._fill(event)
        limits = self._outlet.limits
        contents = [event.SerializeToString() for event in events]
        counted = [int(event.WhichOneof("body") != "execution_started") for event in events]
        wire = b"".join(map(event_field, contents))
        future = new_future()
        item = Output(self._tally, wire, counted, future=future, atomic=atomic)
        self._tally.count(sum(counted))
        if max(map(len, contents)) > limits.event_bytes:
            item.fail(too_large(max(map(len, contents)), limits.event_bytes))
            return future
        if len(wire) > REQUEST_BYTES:
            item.fail(too_large(len(wire), REQUEST_BYTES))
            return future
        self._cover(item, events[-1])
        if self._tally.waiting_bytes + len(wire) > limits.waiting_bytes or self.parked_bytes:
            return self._park(item, future)
        item.wait()
        self._outlet.send(self.key, item)
        return future

    def _park(self, item: Output, future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        if self._spill is None:
            self._spill = Spill(
                self._outlet.room,
                owner=self._tally,
                limit=self._outlet.limits.spill_bytes,
                unpack=lambda content, futures: unpack(self._tally, self._frames, content, futures),
                room_for=self._has_room_for,
                arrived=lambda: self._outlet.arrived(self.key),
                broken=self._cut_off,
                lost=lambda events: self._tally.miss(events, "an event of the run could not be sent"),
            )
        try:
            promise, begun = self._spill.put(item.pack(), sum(item.counted))
        except SpillRefused as error:
            self._cut_off(str(error))
            item.fail(WriterRefused(self.refused.result()))
            return future
        if begun is not None:
            self._outlet.park(self.key, begun)
        return promise

    def _has_room_for(self, size: int) -> bool:
        return self._tally.waiting_bytes + size <= self._outlet.limits.waiting_bytes

    def _cut_off(self, why: str) -> None:
        """No more is taken, so what the run says from now on is missing."""
        if not self._finished:
            self._tally.miss(0, why)
            self._refuse(Refusal("HISTORY_UNAVAILABLE", "producer", detail=why))

    def _cover(self, item: Output, last: event_pb2.Event) -> None:
        if last.HasField("frames_through"):
            item.frames = self._frames
            item.frames_through = last.frames_through
            item.hold_until = self._outlet.clock.monotonic() + self._outlet.limits.hold
        item.trace = self._trace

    def _fill(self, event: event_pb2.Event) -> event_pb2.Event:
        event.scope = event_pb2.EVENT_SCOPE_RUNNER
        event.execution_id = self.execution.execution_id
        event.epoch = self.execution.epoch
        if self._next_index:
            event.frames_through = self._next_index - 1
        if not event.event_id:
            event.event_id = self._outlet.ids()
        if not event.HasField("occurred_at"):
            event.occurred_at.FromDatetime(self._outlet.clock.now())
        if not event.type:
            event.type = type_of(event)
        if not event.entity_id:
            event.entity_id = entity_of(event)
        return event

    def _check_open(self, *, ending: bool = False) -> None:
        if self._finished:
            raise RuntimeError("the ending of this execution was written already")
        if self.refused.done() and not (ending and not self._fenced):
            raise WriterRefused(self.refused.result())

    def _refuse(self, refusal: Refusal) -> None:
        if self.refused.done():
            return
        self.refused.set_result(refusal)
        self._frames.clear()
        logger.warning(
            "writer refused",
            extra={
                "execution": self.execution.execution_id,
                "epoch": self.execution.epoch,
                "reason": refusal.reason,
                "by": refusal.by,
                "current_epoch": refusal.current_epoch,
                "detail": refusal.detail,
            },
        )
        if refusal.reason != "HISTORY_UNAVAILABLE":
            tally = self._tally
            self._outlet.withdraw(self.key, lambda entry: entry.owner is tally, WriterRefused(refusal))

    def _fenced_by_relay(self, current: session_pb2.ExecutionRef) -> None:
        if self._finished:
            # The last frames may arrive behind the ending, which the relay knows by then; history decides about that.
            return
        mine = self.execution
        if current.execution_id == mine.execution_id and current.epoch == mine.epoch:
            reason = "EXECUTION_ENDED"
        else:
            reason = "EPOCH_TAKEN" if current.epoch == mine.epoch else "STALE_EPOCH"
        self._refuse(Refusal(reason, "relay", current.epoch, current.execution_id))

    def _ended(self, result: history_pb2.AppendResult | None) -> None:
        self._frames.clear()
        if result is None or self._fenced:
            return
        if result.outcome in _STORED:
            self._frames.ended = True
            self._outlet.publish(self._frames)
        else:
            outcome = history_pb2.AppendOutcome.Name(result.outcome).removeprefix("APPEND_OUTCOME_")
            self._outlet.give_up(self.key, self.execution.execution_id, f"history refused the ending: {outcome}")

    @property
    def _fenced(self) -> bool:
        return self.refused.done() and self.refused.result().reason != "HISTORY_UNAVAILABLE"
