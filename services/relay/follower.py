"""Follows the log and the frames of one session, and hands both on in order.

Notices are not trusted: event n+1 is handed on only after n, and what is missing is read from history. Frames come as
they come, but those of an execution wait for its start, and none is handed on that an event covers already: where the
execution began before it was followed here, its first frames wait until that is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.trace import SpanContext
from redis.exceptions import RedisError

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import bus_pb2
from hearth.types.v1 import session_pb2
from services.chassis.clock import Clock
from services.chassis.errors import HearthError, Unavailable, dependency_unavailable
from services.chassis.tasks import Tasks
from services.relay.buffer import Buffer, Kept, Key, channel
from services.relay.bus import Bus
from services.relay.log import Log
from services.relay.metrics import Metrics
from services.relay.order import EventIn, FrameIn, Lost, Order, Role, weave
from services.relay.settings import RelaySettings
from services.relay.shared import Gathered, Shared
from services.relay.spans import processing
from services.relay.tail import Waiting
from services.relay.ticker import Ticker
from services.relay.view import View
from services.relay.wire import FRAMES, NOTICE, Place, RawNotice, event_of, parse_notice, place_of

logger = logging.getLogger(__name__)

# Bus messages kept while a session is being opened.
_EARLY_MESSAGES = 4096
_ACTIVE_SECONDS = 60.0
KEPT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What all sessions of a process share. `suspect` is called when history did not answer for a session."""

    log: Log
    heads: Gathered[Key, history_pb2.Head]
    written: Gathered[Key, bool]
    bus: Bus
    buffer: Buffer
    ticker: Ticker
    tasks: Tasks
    clock: Clock
    settings: RelaySettings
    metrics: Metrics
    suspect: Callable[[Key], None]


class Follower:
    """`open` it; from then on `came` gets every piece in order, until `broken` says that the log is another one.

    After `broken` it follows nothing until it is opened again.
    """

    __slots__ = (
        "_asking",
        "_broken",
        "_came",
        "_channel",
        "_early",
        "_fetching",
        "_further",
        "_key",
        "_loads",
        "_open",
        "_opening",
        "_parts",
        "_readers",
        "_touched",
        "_unsure",
        "_waiting",
        "_wanted",
        "head",
        "last_frame",
        "oldest",
        "order",
        "place",
        "view",
    )

    def __init__(
        self,
        key: Key,
        parts: Parts,
        *,
        came: Callable[[FrameIn | EventIn], None],
        broken: Callable[[], None],
        readers: Callable[[], Sequence[SpanContext]],
    ) -> None:
        self._key = key
        self._parts = parts
        # The calls of some that read here.
        self._readers = readers
        self._came = came
        self._broken = broken
        self._channel = channel(key)
        # The newest event handed on.
        self.place = Place()
        # Execution, epoch and highest frames_through as the events have them; it has seen no frame.
        self.order = Order(strict=False)
        self.view = View("", 0)
        self.last_frame: Lost | None = None
        self.head = 0
        self.oldest = 0
        settings = parts.settings
        self._waiting = Waiting(max_bytes=settings.relay_buffer_bytes, max_frames=settings.relay_buffer_frames)
        # Frames of which it is not known yet whether an event covers them.
        self._unsure: Waiting | None = None
        self._loads = Shared("relay read back", self._load, parts.tasks)
        self._early: deque[bytes] | None = None
        self._wanted = 0
        self._touched = float("-inf")
        self._open = False
        self._opening: asyncio.Task[HearthError | None] | None = None
        # Whether history has been asked for the head that the opening under way begins with.
        self._asking = False
        self._fetching: asyncio.Task[None] | None = None
        # Set when a fetch has handed on a page, or is over.
        self._further = asyncio.Event()

    @property
    def active(self) -> bool:
        """Whether an execution runs, or something happened in the last minute."""
        return not self.order.ended or self._parts.clock.monotonic() - self._touched < _ACTIVE_SECONDS

    async def open(self) -> bool:
        """Return when the session is followed; raises `Unavailable` when history does not answer.

        True: history was asked for its head after this call. False: it was followed already, or that was asked before.
        """
        if self._open:
            return False
        if self._opening is None:
            self._asking = False
            self._opening = self._parts.tasks.start("relay open", self._begin(), critical=False)
        opening, fresh = self._opening, not self._asking
        await asyncio.wait([opening])
        failed = _closed() if opening.cancelled() else opening.result()
        if failed is not None:
            raise failed
        return fresh

    async def current(self) -> None:
        """Return when the session is followed and all is here that history had at the call. Raises `Unavailable`."""
        while not await self.open():
            asked = self.place
            head = await self._parts.heads.of(self._key)
            self.compare(head, asked)
            # Not for the end of the fetch: with a writer that is fast enough it has none.
            while self._fetching is not None and self._behind(head.head):
                self._further.clear()
                await self._further.wait()
            if self._behind(head.head):
                raise dependency_unavailable("history")
            if self._open:
                return

    def _behind(self, head: session_pb2.Cursor) -> bool:
        """Whether this is the log of `head`, and not followed as far yet."""
        same = self.place.log_id in ("", head.log_id)
        return self._open and same and self.place.sequence < head.sequence

    def close(self) -> None:
        """Follow nothing any more."""
        self._open = False
        self._parts.bus.ignore(self._channel, self._hear)
        self._loads.close()
        for task in (self._opening, self._fetching):
            if task is not None:
                task.cancel()
        self._further.set()

    async def read_kept(self) -> Kept | None:
        """The frames kept of the session; None when nothing is kept or the bus does not answer."""
        if not self._parts.bus.connected:
            return None
        try:
            # A bus that hangs must not keep a reader from its events.
            async with asyncio.timeout(KEPT_SECONDS):
                return await self._parts.buffer.read(self._key)
        except (RedisError, TimeoutError) as error:
            logger.warning("kept frames cannot be read", extra={"cause": type(error).__name__})
            return None

    def take_kept(self, kept: Kept) -> None:
        """Hand on what is new in frames that were kept while this process may not have heard them."""
        if self._open:
            self._frames_came(kept.execution, kept.epoch, kept.frames)

    async def _begin(self) -> HearthError | None:
        self._take_early()
        try:
            # First the channel, then the head: an event between them is in one of both.
            await self._parts.bus.listen(self._channel, self._hear)
            self._asking = True
            self._base(await self._parts.heads.of(self._key))
            kept = await self.read_kept() if await self._parts.written.of(self._key) else None
        except HearthError as error:
            self._parts.bus.ignore(self._channel, self._hear)
            return error
        finally:
            self._opening = None
        self._open = True
        if kept is not None and kept.execution != self.order.execution:
            # An execution whose start is on its way. The frames of one that runs are handed out with its snapshot.
            self._frames_came(kept.execution, kept.epoch, kept.frames)
        for message in self._take_early():
            self._hear(message)
        return None

    def _take_early(self) -> Sequence[bytes]:
        early, self._early = self._early, None
        return early or ()

    def _base(self, head: history_pb2.Head) -> None:
        self.place = Place.of(head.head)
        self.head, self.oldest = head.head.sequence, head.oldest
        running = bool(head.execution_id) and not head.ended
        self.order = Order(head.execution_id, head.epoch, ended=not running, strict=False)
        self.view = View(head.execution_id if running else "", self.place.sequence + 1)
        self._unsure = None
        self.last_frame = None
        self._wanted = 0
        self._touched = self._parts.clock.monotonic()

    # --- the bus ---

    def _hear(self, data: bytes) -> None:
        if not self._open:
            if self._early is None:
                self._early = deque(maxlen=_EARLY_MESSAGES)
            self._early.append(data)
            return
        kind = data[:1]
        try:
            if kind == FRAMES:
                self._live_frames(bus_pb2.LiveFrames.FromString(data[1:]))
            elif kind == NOTICE:
                self._notice(parse_notice(data[1:]))
        except DecodeError:
            logger.error("bus message does not parse", extra={"project": self._key[0], "session": self._key[1]})

    def _live_frames(self, live: bus_pb2.LiveFrames) -> None:
        if (live.project, live.session) == self._key:
            execution, epoch = live.execution_id, live.epoch
            frames = [FrameIn(execution, epoch, frame.index, frame.index, frame.reply) for frame in live.frames]
            with self._traced(live.traceparent, what="frames", number=len(frames)):
                self._frames_came(execution, epoch, frames)

    def _frames_came(self, execution: str, epoch: int, frames: Sequence[FrameIn]) -> None:
        if execution == self.order.execution:
            if not self.order.ended and epoch >= self.order.epoch:
                if self.view.complete:
                    self._frames(frames)
                else:
                    self._hold(frames)
        elif epoch > self.order.epoch:
            for frame in frames:
                self._waiting.add(frame)

    def _frames(self, frames: Sequence[FrameIn]) -> None:
        last = self.last_frame
        for frame in frames:
            if last is not None and last.execution == frame.execution and (frame.epoch, frame.first) <= last[1:]:
                continue
            if frame.first < self.order.floor and frame.epoch == self.order.epoch:
                continue
            last = Lost(frame.execution, frame.epoch, frame.last)
            self._came(frame)
        if last is not self.last_frame:
            self.last_frame = last
            self._touched = self._parts.clock.monotonic()

    # --- an execution that began before it was followed here ---

    async def complete_view(self) -> None:
        """Return when `view` has everything that the running execution wrote. Raises `Unavailable`."""
        if not self.view.complete:
            await self._loads.next()

    async def _load(self) -> None:
        """Fold what the execution wrote before it was followed here, newest first."""
        view, token = self.view, ""
        if view.complete:
            return
        while True:
            page = await self._parts.log.back(self._key, token)
            token = page.next_page_token
            if _fold_back(view, page.events):
                break
            if not token:
                view.oldest(place_of(page.events[0]).sequence if page.events else 1)
                break
        if view is self.view:
            self._sure()

    def _hold(self, frames: Sequence[FrameIn]) -> None:
        if self._unsure is None:
            settings = self._parts.settings
            self._unsure = Waiting(max_bytes=settings.relay_buffer_bytes, max_frames=settings.relay_buffer_frames)
            self._parts.tasks.start("relay cover", self._cover(), critical=False)
        for frame in frames:
            self._unsure.add(frame)

    async def _cover(self) -> None:
        try:
            await self.complete_view()
        except HearthError:
            # What was held is lost; the next frame tells so, and asks again.
            self._unsure = None
            self._parts.suspect(self._key)

    def _sure(self) -> None:
        """It is known what the events cover: hand on the frames that were held for that."""
        order = self.order
        marks = self.view.marks(order.epoch, self.place.sequence)
        if not order.ended and self.view.execution == order.execution and marks:
            self.order = order._replace(floor=max(order.floor, marks[-1] + 1))
        held, self._unsure = self._unsure, None
        if held is not None and not order.ended:
            self._frames(held.release(order.execution, order.epoch))

    def _notice(self, notice: RawNotice) -> None:
        if notice.last_sequence <= self.place.sequence:
            return
        with self._traced(notice.traceparent, what="sequence", number=notice.last_sequence):
            if self._fetching is None and self._usable(notice):
                for item in notice.events[self.place.sequence + 1 - notice.first_sequence :]:
                    self._event(item)
            if self.place.sequence < notice.last_sequence:
                self._want(notice.last_sequence)

    def _usable(self, notice: RawNotice) -> bool:
        """Whether the events of a notice follow what is here. The log's id is never taken from a notice."""
        known = self.place.sequence + 1 - notice.first_sequence
        if not self.place.log_id or notice.log_id != self.place.log_id or known < 0:
            return False
        if len(notice.events) != notice.last_sequence - notice.first_sequence + 1:
            return False
        before = notice.previous_tag if known == 0 else place_of(notice.events[known - 1]).tag
        return before == self.place.tag

    def _traced(self, traceparent: str, *, what: str, number: int) -> AbstractContextManager[object]:
        if not traceparent:
            return nullcontext()
        return processing(traceparent, self._key, self._readers(), what=what, number=number)

    # --- events ---

    def _event(self, item: bytes) -> bool:
        """Hand on the event if it is the next one."""
        event, place = event_of(item)
        if place.sequence != self.place.sequence + 1:
            return False
        self.place = place
        self.head = max(self.head, place.sequence)
        self.order = weave(self.order, [event], after=place.sequence).order
        if event.role is Role.STARTED:
            self.view = View(event.execution, place.sequence, started=True)
            self._unsure = None
        else:
            self.view.fold(event)
        self._touched = self._parts.clock.monotonic()
        self._came(event)
        if event.role is Role.STARTED:
            self._frames(self._waiting.release(event.execution, event.epoch))
        return True

    def _want(self, sequence: int) -> None:
        self._wanted = max(self._wanted, sequence)
        if self._fetching is None and self._open:
            self._fetching = self._parts.tasks.start("relay fetch", self._fetch(), critical=False)

    async def _fetch(self) -> None:
        try:
            while self.place.sequence < self._wanted:
                page = await self._parts.log.page(self._key, self.place)
                if not all(map(self._event, page.events)):
                    logger.error("history returned a hole", extra={"session": self._key[1], **self.place.metadata()})
                    self._parts.suspect(self._key)
                    return
                if not page.events:
                    self._wanted = self.place.sequence
                self._further.set()
        except Unavailable:
            self._parts.suspect(self._key)
        except HearthError as refusal:
            self._replaced(refusal.reason)
        finally:
            if self._fetching is asyncio.current_task():
                self._fetching = None
            self._further.set()

    def compare(self, head: history_pb2.Head, asked: Place) -> None:
        """Take history's word of the head, which was asked for when `asked` was the newest event here."""
        if not self._open:
            return
        found = Place.of(head.head)
        same = found.log_id == asked.log_id or not asked.log_id
        if not same or found.sequence < asked.sequence or (found.sequence == asked.sequence and found.tag != asked.tag):
            if asked == self.place:
                self._replaced("LOG_REPLACED")
            return
        self.head, self.oldest = max(self.head, found.sequence), head.oldest
        if found.sequence > self.place.sequence:
            self._want(found.sequence)

    def _replaced(self, reason: str) -> None:
        logger.warning(
            "the log is not the one that was followed",
            extra={"project": self._key[0], "session": self._key[1], "reason": reason},
        )
        self._open = False
        self._parts.bus.ignore(self._channel, self._hear)
        if self._fetching is not None and self._fetching is not asyncio.current_task():
            # What it reads follows an event that is gone.
            self._fetching.cancel()
        self._fetching = None
        self._further.set()
        self._waiting.clear()
        self._unsure = None
        self._broken()


def _fold_back(view: View, events: Sequence[bytes]) -> bool:
    """Fold ascending events, newest first, down to the start of the execution; whether that is among them."""
    for item in reversed(events):
        event, place = event_of(item)
        if place.sequence < view.since:
            view.fold(event)
        if event.role is Role.STARTED and event.execution == view.execution:
            return True
    return False


def _closed() -> HearthError:
    return Unavailable("this session is being closed here; connect again", reason="STREAM_CLOSED")
