"""Live load: publishers that write frames at a fixed rate through the producer, readers that check what they get.

A frame carries when it was made, so a reader in another process of this machine can tell how long it took. The text
that a reader puts together from frames must be the text of the completed message, unless a gap was told: then the
relay was too slow, but kept its word.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from benchmarks.clients import Link
from benchmarks.figures import percentile
from benchmarks.writing import begin, check_stored, key, message, producer, text_of
from hearth.channel import open_channel
from hearth.producer import ExecutionWriter, ProducerLimits
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2

TEXT_BYTES = 40
_ENTITY = "m1"
_STREAMS_ON_A_CONNECTION = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What is published: `frames` of each session, `rate` a second; rate 0: all at once, and then nothing is written
    before the readers have them: an event waits for the frames before it, but not longer than 50 ms."""

    sessions: tuple[str, ...]
    frames: int
    rate: float = 0.0


@dataclass(slots=True)
class Published:
    """What a publisher did. `digests` are of each session's whole text; `late` is how late frames were made, p99."""

    digests: dict[str, str]
    began: float
    late_p99_ms: float


@dataclass(slots=True)
class Saw:
    """What the readers of one process saw. Times are seconds of the wall clock.

    `made` and `took` have a place for each frame that arrived in an item of its own; `covered` counts the others too,
    that came joined, and `missed` those that a gap stood for. `last` is when the last frame arrived.
    """

    made: array[float] = field(default_factory=lambda: array("d"))
    took: array[float] = field(default_factory=lambda: array("d"))
    digests: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    responses: int = 0
    covered: int = 0
    gaps: int = 0
    missed: int = 0
    last: float = 0.0


def piece(session: str, index: int) -> str:
    """The text of a frame; each differs from its neighbours. Pure."""
    return f"{session}/{index} ".ljust(TEXT_BYTES, ".")


def digest(text: str) -> str:
    """Stands for a text."""
    return hashlib.sha256(text.encode()).hexdigest()


async def publish(link: Link, history: str, relay: str, plan: Plan) -> None:
    """Client process: begin all executions; when told the wall time to begin at, write frames, messages, endings."""
    # A burst is more than a producer usually keeps for a relay that is slow.
    async with producer(history, relay, ProducerLimits(frames=max(256, plan.frames))) as made:
        writers = [(await begin(made, session))[0] for session in plan.sessions]
        await link.send()
        start: float = await link.receive()
        began, late = await _write_frames(writers, plan, start)
        if not plan.rate:
            await link.receive()
        digests = {}
        for session, writer in zip(plan.sessions, writers, strict=True):
            whole = "".join(piece(session, index) for index in range(plan.frames))
            digests[session] = digest(whole)
            check_stored(await writer.event(message(_ENTITY, whole)))
            done = event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))
            check_stored(await writer.ending(done))
        await link.send(Published(digests, began, percentile(late, 99) * 1000))


async def _write_frames(writers: Sequence[ExecutionWriter], plan: Plan, start: float) -> tuple[float, array[float]]:
    """Write all frames, sessions taking turns; when the first was written, and how late each was."""
    late: array[float] = array("d")
    began = 0.0
    gap = 1 / (plan.rate * len(writers)) if plan.rate else 0.0
    await asyncio.sleep(max(0.0, start - time.time()))
    due = start
    for index in range(plan.frames):
        for session, writer in zip(plan.sessions, writers, strict=True):
            now = time.time()
            if gap and due > now:
                await asyncio.sleep(due - now)
                now = time.time()
            began = began or now
            writer.frame(_ENTITY, text_delta=frame_pb2.TextDelta(text=piece(session, index)))
            late.append(now - due if gap else 0.0)
            due += gap
    return began, late


async def subscribe(link: Link, relay: str, seats: Sequence[str], frames: int) -> None:
    """Client process: one reader for each entry of `seats`, from the start of its session to the ending of its run.

    Says when all are connected, when all `frames` of all are accounted for, and what they saw.
    """
    saw = Saw()
    count = -(-len(seats) // _STREAMS_ON_A_CONNECTION)
    channels = [open_channel(relay) for _ in range(count)]
    watch = _Watch(saw, connected=len(seats), accounted=len(seats) * frames)
    try:
        reading = asyncio.create_task(_read_all(channels, seats, watch))
        for milestone in (watch.connected, watch.accounted):
            # When all readers have ended, there is nothing to wait for.
            await asyncio.wait([milestone, reading], return_when=asyncio.FIRST_COMPLETED)
            await link.send()
        await reading
        await link.send(saw)
    finally:
        for channel in channels:
            await channel.close()


async def _read_all(channels: Sequence[grpc.aio.Channel], seats: Sequence[str], watch: _Watch) -> None:
    async with asyncio.TaskGroup() as group:
        for place, session in enumerate(seats):
            group.create_task(_read(channels[place % len(channels)], session, watch))


class _Watch:
    """Tells how far the readers of a process are."""

    def __init__(self, saw: Saw, *, connected: int, accounted: int) -> None:
        self.saw = saw
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.accounted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._not_connected = connected
        self._frames = accounted

    def looked(self, reader: Reader, *, was_ready: bool) -> None:
        """A reader took a response."""
        self._not_connected -= reader.ready and not was_ready
        if not self._not_connected and not self.connected.done():
            self.connected.set_result(None)
        if self.saw.covered + self.saw.missed >= self._frames and not self.accounted.done():
            self.accounted.set_result(None)


async def _read(channel: grpc.aio.Channel, session: str, watch: _Watch) -> None:
    stub = relay_service_pb2_grpc.RelayServiceStub(channel)
    request = relay_service_pb2.SubscribeRequest(session=key(session), after=session_pb2.Cursor())
    reader = Reader(session, watch.saw)
    call = stub.Subscribe(request)
    while not reader.ended:
        response = await call.read()
        if not isinstance(response, relay_service_pb2.SubscribeResponse):
            watch.saw.problems.append(f"{session}: the stream ended early: {await call.code()} {await call.details()}")
            break
        was_ready = reader.ready
        reader.take(response, time.time())
        watch.looked(reader, was_ready=was_ready)
    call.cancel()


class Reader:
    """One reader's session, checked item by item. Pure, but for what it adds to `saw`."""

    def __init__(self, session: str, saw: Saw) -> None:
        self.ready = False
        self.ended = False
        self._session = session
        self._saw = saw
        self._next_frame = 0
        self._sequence = 0
        self._texts: list[str] = []
        self._whole = True

    def take(self, response: relay_service_pb2.SubscribeResponse, now: float) -> None:
        """Look at one response that arrived at `now`."""
        saw = self._saw
        made, took = saw.made, saw.took
        saw.responses += 1
        for item in response.items:
            if item.HasField("frame"):
                frame = item.frame.frame
                index = frame.frame_index
                if index != self._next_frame:
                    self._wrong(f"frame {index} where {self._next_frame} is next")
                self._next_frame = index + 1
                self._texts.append(frame.text_delta.text)
                if frame.HasField("merged_through"):
                    self._next_frame = frame.merged_through + 1
                    saw.covered += frame.merged_through + 1 - index
                else:
                    saw.covered += 1
                    at = frame.occurred_at
                    sent = at.seconds + at.nanos / 1e9
                    made.append(sent)
                    took.append(now - sent)
                saw.last = now
            else:
                self._other(item)

    def _other(self, item: relay_pb2.Item) -> None:
        match item.WhichOneof("item"):
            case "event":
                self._event(item.event)
            case "ready":
                self.ready = True
            case "gap":
                self._gap(getattr(item.gap, "from"), item.gap.to)
            case "heartbeat" | "degraded":
                pass
            case kind:
                self._wrong(f"{kind} came, after frame {self._next_frame - 1}")

    def _gap(self, first: int, last: int) -> None:
        if first != self._next_frame or last < first:
            self._wrong(f"a gap of {first} to {last} where {self._next_frame} is next")
        self._next_frame = last + 1
        self._whole = False
        self._saw.gaps += 1
        self._saw.missed += last + 1 - first

    def _event(self, item: event_pb2.EventItem) -> None:
        self._sequence += 1
        if item.cursor.sequence != self._sequence:
            self._wrong(f"event {item.cursor.sequence} where {self._sequence} is next")
            self._sequence = item.cursor.sequence
        if item.event.HasField("message_completed"):
            text = text_of(item.event)
            if self._whole and text != "".join(self._texts):
                self._wrong("the frames do not add up to the message, and no gap was told")
            self._saw.digests.append((self._session, digest(text)))
        self.ended = item.event.HasField("execution_completed")

    def _wrong(self, trouble: str) -> None:
        self._saw.problems.append(f"{self._session}: {trouble}")


def check(published: Published, seen: Sequence[Saw], seats: Sequence[str], frames: int) -> list[str]:
    """What is wrong with what the readers at `seats` got of `frames` frames a session. Pure."""
    problems = [problem for saw in seen for problem in saw.problems]
    got = sorted(found for saw in seen for found in saw.digests)
    wanted = sorted((session, published.digests[session]) for session in seats)
    if len(got) != len(wanted):
        problems.append(f"{len(got)} readers have the message, {len(wanted)} must")
    elif got != wanted:
        problems.append("messages differ from what was written")
    covered, missed = sum(saw.covered for saw in seen), sum(saw.missed for saw in seen)
    if covered + missed != len(seats) * frames:
        problems.append(f"{covered} frames came and {missed} were told as lost, of {len(seats) * frames}")
    return problems
