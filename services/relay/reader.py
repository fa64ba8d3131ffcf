"""One subscriber: read history to the head, follow live, and back to history when it fell behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry import trace

from hearth.relay.v1 import relay_pb2
from services.chassis.clock import Clock
from services.chassis.errors import HearthError, Internal, Unavailable
from services.chassis.spans import stream_opened
from services.relay.buffer import Key
from services.relay.hub import REPLY_BYTES, Overrun, Pin, Standing
from services.relay.hubs import Hubs
from services.relay.log import Log
from services.relay.metrics import HISTORY, Metrics, gaps_of
from services.relay.order import EventIn, FrameIn, Order, Out, Piece, Role, events_of, weave
from services.relay.settings import RelaySettings
from services.relay.surroundings import Dependency, Surroundings
from services.relay.view import Snapshot
from services.relay.wire import Place, event_of, event_reply, item_reply, join, place_of

Write = Callable[[bytes], Awaitable[None]]

_SHUTTING_DOWN = "this process is shutting down; resume with the cursor given"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a subscriber asked for: events after `after`, or only what comes from now on when that is None."""

    key: Key
    after: Place | None
    frames: bool


class Reader:
    """Serves one subscriber from `run` until it leaves, is cut off or the process ends.

    `write` sends one serialized response and returns when it was taken.
    """

    __slots__ = (
        "_begun",
        "_clock",
        "_closing",
        "_cut",
        "_hub",
        "_hubs",
        "_log",
        "_lost",
        "_metrics",
        "_oldest",
        "_order",
        "_place",
        "_position",
        "_send",
        "_settings",
        "_surroundings",
        "_task",
        "_told",
        "_wish",
        "_woken",
        "_writing_since",
        "_writing_to",
        "_wrote_at",
        "call",
    )

    def __init__(
        self,
        wish: Wish,
        write: Write,
        *,
        hubs: Hubs,
        log: Log,
        surroundings: Surroundings,
        metrics: Metrics,
        clock: Clock,
        settings: RelaySettings,
    ) -> None:
        self._wish = wish
        self._send = write
        # The span of the call that it is served by.
        self.call = trace.get_current_span().get_span_context()
        self._hubs = hubs
        self._log = log
        self._surroundings = surroundings
        self._metrics = metrics
        self._clock = clock
        self._settings = settings
        self._hub = hubs.enter(self, wish.key)
        self._place = wish.after or Place()
        # Whether the reader stands anywhere: one that asked for the tail does from `ready` on.
        self._begun = wish.after is not None
        self._oldest = 0
        self._position = 0
        self._order = Order()
        # History did not answer when it was needed; to be tried again.
        self._lost = False
        self._told: frozenset[Dependency] = frozenset()
        self._closing = False
        self._woken: asyncio.Future[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._cut: HearthError | None = None
        self._writing_since: float | None = None
        self._writing_to: Place | None = None
        self._wrote_at = clock.monotonic()

    # --- what the process does to it ---

    @property
    def position(self) -> int:
        """The position in the tail from which on it needs the pieces."""
        return self._position

    @property
    def cut_off(self) -> str:
        """The reason why it was ended though nothing could be written; empty if it was not."""
        return self._cut.reason if self._cut is not None else ""

    def wake(self) -> None:
        """There may be something to do."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def look(self, now: float) -> None:
        """Time passed: heartbeat, or give up on a reader that takes nothing."""
        if self._writing_since is not None:
            if now - self._writing_since >= self._settings.relay_slow_reader:
                self._end_with("this reader took nothing for too long; resume with the cursor given", "SLOW_READER")
        elif self._lost or now - self._wrote_at >= self._settings.relay_heartbeat:
            self.wake()

    def close(self) -> None:
        """End with `closing` as soon as it can be written."""
        self._closing = True
        self.wake()

    def cut(self) -> None:
        """End now, though nothing can be written."""
        self._end_with(_SHUTTING_DOWN, "SHUTTING_DOWN")

    def _end_with(self, message: str, reason: str) -> None:
        if self._cut is None and self._task is not None:
            # What is being written cannot be called back: the status comes behind it.
            self._cut = Unavailable(message, reason=reason, metadata=self._where(self._writing_to or self._place))
            # A blocked write cannot be told anything; cancelling it leaves the stream to the status.
            self._task.cancel()

    # --- its own life ---

    async def run(self) -> None:
        """Serve until the stream ends; every end but that of the subscriber is raised as its error."""
        self._task = asyncio.current_task()
        try:
            await self._join()
            while True:
                await self._follow()
        except _Closed:
            raise Unavailable(
                _SHUTTING_DOWN, reason="SHUTTING_DOWN", metadata=self._where(self._place), retry_after=0.1
            ) from None
        except asyncio.CancelledError:
            if self._cut is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._cut from None
        except Unavailable as error:
            raise error.telling(self._where(self._place)) from error
        finally:
            self._hubs.leave(self)

    async def _join(self) -> None:
        """Everything up to the place where this reader begins to follow, then `ready`."""
        fresh = await self._hub.opened()
        if not fresh and (self._wish.after is None or self._place.sequence > self._hub.place.sequence):
            # What is known here may be a moment old. The tail is to show nothing that was committed before the call,
            # and who was told of an ending elsewhere no frames of what has ended.
            await self._hub.current()
            fresh = True
        pin = self._pin()
        late = Late(await self._hub.snapshot(pin) if self._wish.frames else None)
        self._order = late.order or pin.order
        self._oldest = self._hub.oldest
        if self._wish.after is None and pin.place.log_id:
            self._place = pin.place
        else:
            # Where no log is known there is none, or it was deleted: only a read tells.
            # A cursor on the very event that history has just named as the newest is good, and nothing follows it.
            good = fresh and bool(self._place.log_id) and self._place == pin.place
            await self._replay(pin, late, check=not good)
        await self._weave_and_write(late.rest())
        self._order = self._order._replace(strict=True)
        if self._place.sequence == pin.place.sequence:
            self._place = pin.place
        ready = relay_pb2.Ready(
            through=self._place.sequence,
            cursor=self._place.cursor(),
            head=max(self._hub.head, self._place.sequence),
            oldest=self._oldest,
        )
        # Being written it may have been taken.
        self._begun = True
        await self._write_item(relay_pb2.Item(ready=ready))
        stream_opened()

    async def _follow(self) -> None:
        """Do the one thing that is next."""
        if self._closing:
            await self._say_closing()
        elif self._told != self._surroundings.away:
            await self._tell_degraded()
        elif self._lost:
            await self._catch_up()
        else:
            try:
                taken = self._hub.take(
                    Standing(self._position, self._place.sequence, self._order), frames=self._wish.frames
                )
            except Overrun:
                self._metrics.overflowed(HISTORY)
                await self._catch_up()
                return
            if taken is None:
                await self._idle()
                return
            self._position, self._order = taken.standing.position, taken.standing.order
            if taken.over:
                self._metrics.overflowed(taken.over)
            if taken.gaps:
                self._metrics.gaps(*taken.gaps)
            if taken.reply:
                await self._write(taken.reply, taken.place)
            self._hub.served(self, written=bool(taken.reply))

    async def _catch_up(self) -> None:
        """Fell out of the tail: read what is missing from history and go on from there."""
        try:
            await self._hub.opened()
            pin = self._pin()
            await self._replay(pin, Late(None), check=not _leads_to(self._place, pin.place))
        except Unavailable:
            # The stream stays; it is tried again when time passes.
            self._lost = True
            self._hubs.suspect(self._wish.key)
            await self._idle()
            return
        self._lost = False
        if self._wish.frames and pin.last_frame is not None:
            await self._weave_and_write([pin.last_frame])

    def _pin(self) -> Pin:
        pin = self._hub.pin()
        self._position = pin.position
        return pin

    async def _replay(self, pin: Pin, late: Late, *, check: bool) -> None:
        """Deliver the events after the cursor and up to the pinned one; what follows comes from the tail.

        With `check` history is asked at least once: only history can tell that a cursor is not of its log.
        """
        while check or self._place.sequence < pin.place.sequence:
            check = False
            if self._closing:
                await self._say_closing()
            page = await self._log.page(self._wish.key, self._place)
            self._oldest = page.bounds.oldest
            pieces, place = self._in_order(page.events, pin, late)
            if place.sequence < pin.place.sequence and not page.more and not page.events:
                raise Internal("history ends before its own head", reason="INTERNAL")
            await self._weave_and_write(pieces, place)

    def _in_order(self, items: Iterable[bytes], pin: Pin, late: Late) -> tuple[list[Piece], Place]:
        """The events of a page up to the pinned one, each behind the kept frames that belong before it."""
        pieces: list[Piece] = []
        place = self._place
        for item in items:
            found = place_of(item)
            if found.sequence != place.sequence + 1:
                raise Internal("history returned a hole", reason="INTERNAL")
            if found.sequence > pin.place.sequence:
                break
            place = found
            if self._wish.frames and (self._order.strict or late.concerns(found.sequence)):
                event = event_of(item)[0]
                pieces += late.before(event)
                pieces.append(event)
            else:
                pieces.append(EventIn(found.sequence, found.tag, "", 0, -1, Role.SESSION, "", event_reply(item)))
        return pieces, place

    async def _weave_and_write(self, pieces: Iterable[Piece], place: Place | None = None) -> None:
        if self._wish.frames:
            out, self._order, _ = weave(self._order, pieces, after=self._place.sequence)
            self._metrics.gaps(*gaps_of(out))
        else:
            out = events_of(pieces, after=self._place.sequence).out
        await self._write_all(out, place)

    # --- writing ---

    async def _write_all(self, out: Iterable[Out], place: Place | None) -> None:
        """Write `out` in responses of bounded size; `place` is that of the last event in it."""
        chunk: list[Out] = []
        size = 0
        for piece in out:
            added = len(piece.reply) if isinstance(piece, FrameIn | EventIn) else 0
            if chunk and size + added > REPLY_BYTES:
                await self._write(join(chunk), self._last_place(chunk))
                chunk, size = [], 0
            chunk.append(piece)
            size += added
        if chunk:
            await self._write(join(chunk), place)

    def _last_place(self, chunk: list[Out]) -> Place | None:
        last = next((piece for piece in reversed(chunk) if isinstance(piece, EventIn)), None)
        return None if last is None else Place(self._hub.place.log_id, last.sequence, last.tag)

    async def _write(self, reply: bytes, place: Place | None = None) -> None:
        """Send one response; once it was taken, the reader stands at `place`."""
        self._writing_since, self._writing_to = self._clock.monotonic(), place
        await self._send(reply)
        self._writing_since, self._writing_to = None, None
        self._wrote_at = self._clock.monotonic()
        if place is not None:
            self._place = place

    async def _write_item(self, item: relay_pb2.Item) -> None:
        await self._write(item_reply(item))

    async def _beat(self) -> None:
        through = self._place.sequence
        heartbeat = relay_pb2.Heartbeat(through=through, head=max(self._hub.head, through))
        await self._write_item(relay_pb2.Item(heartbeat=heartbeat))

    async def _tell_degraded(self) -> None:
        away = self._surroundings.away
        told, self._told = self._told, away
        for what in sorted(told ^ away):
            await self._write_item(relay_pb2.Item(degraded=relay_pb2.Degraded(on=what in away, what=what)))

    async def _say_closing(self) -> None:
        cursor = self._place.cursor() if self._begun else None
        await self._write_item(relay_pb2.Item(closing=relay_pb2.Closing(reason="SHUTTING_DOWN", cursor=cursor)))
        raise _Closed

    def _where(self, place: Place) -> dict[str, str]:
        """What an error says of the cursor: nothing while the tail is not found, as 0 would mean the whole log."""
        return place.metadata() if self._begun else {}

    async def _idle(self) -> None:
        """Wait until there may be something to do, or say that the stream is alive when it is time."""
        if self._clock.monotonic() - self._wrote_at >= self._settings.relay_heartbeat:
            await self._beat()
            return
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None


class _Closed(Exception):
    """`closing` was written."""


class Late:
    """The kept frames that a reader who comes late gets, each before the first event that covers it."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot
        self._next = 0
        # The order to begin with; None when there are no frames.
        self.order: Order | None = None
        if snapshot is not None:
            self.order = Order(snapshot.execution, snapshot.epoch, ended=False, strict=False)

    def concerns(self, sequence: int) -> bool:
        """Whether the event at `sequence` may be one of the execution whose frames these are."""
        return self._snapshot is not None and sequence >= self._snapshot.started

    def before(self, event: EventIn) -> Sequence[FrameIn]:
        """The frames that come before `event`."""
        found = self._snapshot
        if found is None or (event.execution, event.epoch) != (found.execution, found.epoch):
            return ()
        start, self._next = self._next, found.up_to(self._next, event.through)
        return found.pieces[start : self._next]

    def rest(self) -> Sequence[FrameIn]:
        """The frames that come after all events."""
        return self._snapshot.pieces[self._next :] if self._snapshot is not None else ()


def _leads_to(place: Place, pinned: Place) -> bool:
    """Whether `pinned` is certainly a later place of the same log, or the same."""
    if place.sequence == pinned.sequence:
        return place == pinned
    return place.sequence < pinned.sequence and place.log_id in ("", pinned.log_id)
