"""One session as this process serves it: its newest pieces, and the readers that take them.

What a reader gets of the pieces is decided by `order`, from where it stands. Readers that stand at the same place share
one piece of work and the same bytes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

from opentelemetry.trace import SpanContext

from hearth.history.v1 import history_pb2
from services.relay.buffer import Key
from services.relay.follower import Follower, Parts
from services.relay.latecomers import Latecomers
from services.relay.merge import merge
from services.relay.metrics import DROPPED, MERGED, gaps_of
from services.relay.order import EventIn, FrameIn, Lost, Order, Out, Piece, events_of, weave
from services.relay.tail import Tail
from services.relay.view import Snapshot
from services.relay.wire import Place, join

# One message to a reader; gRPC's limit of 4 MiB lies far above it even with the largest event on top.
REPLY_BYTES = 1024 * 1024
# What the tail may hold beyond one reader's bound, so that a reader over its bound is still in it.
_TAIL_FACTOR = 4
# How many of its readers the trace of an event names.
_LINKED_CALLS = 16


class Standing(NamedTuple):
    """Where a reader stands: next position in the tail, last event it has, and its order of frames."""

    position: int
    sequence: int
    order: Order


class Taken(NamedTuple):
    """What a reader gets: the bytes of one response (maybe none), where it stands then, and the last event's place.

    `over`: what was done because too much waited for it; `gaps`: how many it is told, and of how many frames.
    """

    reply: bytes
    standing: Standing
    place: Place | None
    over: str = ""
    gaps: tuple[int, int] | None = None


class _Probe(NamedTuple):
    """A reader that is watched to know how late it is: since when there is something for it, up to which position."""

    member: Member
    since: float
    position: int


class Pin(NamedTuple):
    """A place in the tail: everything up to event `place` lies before `position`. `order` has seen no frame yet."""

    position: int
    place: Place
    order: Order
    last_frame: Lost | None


class Overrun(Exception):
    """What the reader needs next is not in the tail any more: it reads history and pins itself again."""


class Member(Protocol):
    """A reader, as its hub knows it."""

    @property
    def position(self) -> int:
        """The position in the tail from which on it needs the pieces."""
        ...

    @property
    def call(self) -> SpanContext:
        """The span of the call that it is served by."""
        ...

    def wake(self) -> None:
        """There may be something to do."""
        ...


class Hub:
    """The live side of one session. `close` it when the last reader left."""

    __slots__ = (
        "_came_at",
        "_flushed",
        "_follower",
        "_latecomers",
        "_max_bytes",
        "_max_items",
        "_members",
        "_memo",
        "_parts",
        "_probe",
        "_tail",
        "check_at",
        "key",
    )

    def __init__(self, key: Key, parts: Parts) -> None:
        self.key = key
        # When its head is to be compared next, by the monotonic clock.
        self.check_at = float("-inf")
        self._parts = parts
        self._members: dict[Member, None] = {}
        settings = parts.settings
        self._max_items, self._max_bytes = settings.relay_reader_items, settings.relay_reader_bytes
        self._tail = Tail(max_bytes=_TAIL_FACTOR * self._max_bytes, max_pieces=_TAIL_FACTOR * self._max_items)
        self._flushed = 0
        # When the oldest came of what is not flushed yet.
        self._came_at: float | None = None
        self._probe: _Probe | None = None
        self._memo: dict[tuple[Standing, bool], Taken] = {}
        self._follower = Follower(key, parts, came=self._came, broken=self._broken, readers=self._calls)
        self._latecomers = Latecomers(key, parts, self._follower)

    async def opened(self) -> bool:
        """Return when the session is followed; raises `Unavailable` when history does not answer.

        True: history was asked for its head after this call. False: it was followed already, or that was asked before.
        """
        return await self._follower.open()

    async def current(self) -> None:
        """Return when the session is followed and all is here that history had at the call. Raises `Unavailable`."""
        await self._follower.current()

    def close(self) -> None:
        """Follow nothing any more and stop all work."""
        self._follower.close()
        self._latecomers.close()
        self._parts.ticker.forget(self)

    def enter(self, member: Member) -> None:
        """`member` reads here; what it needs is kept until it has taken it, within bounds."""
        self._members[member] = None

    def leave(self, member: Member) -> None:
        """`member` reads here no more."""
        self._members.pop(member, None)
        if self._probe is not None and self._probe.member is member:
            self._probe = None

    def served(self, member: Member, *, written: bool) -> None:
        """`member` has what it took; not `written`: it gets nothing of that."""
        probe = self._probe
        if probe is None or probe.member is not member or member.position < probe.position:
            return
        self._probe = None
        if written:
            self._parts.metrics.late(self._parts.clock.monotonic() - probe.since)

    @property
    def members(self) -> int:
        """How many readers there are."""
        return len(self._members)

    @property
    def waiting(self) -> int:
        """How many readers a flush would write to."""
        return len(self._members)

    @property
    def active(self) -> bool:
        """Whether an execution runs, or something happened in the last minute."""
        return self._follower.active

    @property
    def place(self) -> Place:
        """The newest event here."""
        return self._follower.place

    @property
    def head(self) -> int:
        """The highest sequence known."""
        return self._follower.head

    @property
    def oldest(self) -> int:
        """The lowest sequence that history keeps, as far as known."""
        return self._follower.oldest

    def compare(self, head: history_pb2.Head, asked: Place) -> None:
        """Take history's word of the head, which was asked for when `asked` was the newest event here."""
        self._follower.compare(head, asked)

    async def heal(self) -> None:
        """The bus was away: take what was kept meanwhile."""
        await self._latecomers.heal()

    def pin(self) -> Pin:
        """The end of the tail as it is now."""
        # Whoever asks goes on from there; if that is the reader that is watched, what it was watched for is void.
        self._probe = None
        follower = self._follower
        return Pin(self._tail.end, follower.place, follower.order, follower.last_frame)

    async def snapshot(self, pin: Pin) -> Snapshot | None:
        """The frames kept for a reader that pinned itself before it asked; see `Latecomers.snapshot`."""
        return await self._latecomers.snapshot(pin.order, pin.place.sequence)

    def take(self, standing: Standing, *, frames: bool) -> Taken | None:
        """What a reader that stands there gets next, None when it has everything. Raises `Overrun`."""
        if standing.position < self._tail.first:
            raise Overrun
        if standing.position >= self._flushed:
            return None
        found = self._memo.get((standing, frames))
        if found is None:
            make = self._woven if frames else self._events
            found = self._memo[standing, frames] = make(standing)
        return found

    def flush(self) -> None:
        """Let the readers have what came until now."""
        self.trim()
        self._flushed = self._tail.end
        self._memo.clear()
        self._watch()
        self._wake_all()

    def _watch(self) -> None:
        """Watch the reader that is woken last, if it is time to watch one."""
        since, self._came_at = self._came_at, None
        if since is not None and self._probe is None and self._members and self._parts.metrics.lag_wanted(since):
            self._probe = _Probe(next(reversed(self._members)), since, self._flushed)

    def trim(self) -> None:
        """Let go of what every reader has, and of what is too much."""
        needed = min((member.position for member in self._members), default=self._tail.end)
        self._tail.trim(needed, fresh=self._flushed)

    def _calls(self) -> list[SpanContext]:
        return [member.call for member in itertools.islice(self._members, _LINKED_CALLS)]

    def _came(self, piece: FrameIn | EventIn) -> None:
        self._tail.append(piece)
        if self._came_at is None:
            self._came_at = self._parts.clock.monotonic()
        self._parts.ticker.dirty(self)

    def _broken(self) -> None:
        # Each reader asks history with its own cursor, and is refused or goes on.
        self._tail.break_off()
        self._came_at = self._probe = None
        self._flushed = self._tail.end
        self._memo.clear()
        self._wake_all()

    def _wake_all(self) -> None:
        for member in self._members:
            member.wake()

    def _events(self, standing: Standing) -> Taken:
        stop = self._tail.fitting(standing.position, self._flushed, REPLY_BYTES)
        out, _, sequence = events_of(self._tail.pieces(standing.position, stop), after=standing.sequence)
        return self._taken(out, Standing(stop, sequence, standing.order))

    def _woven(self, standing: Standing) -> Taken:
        start, stop = standing.position, self._flushed
        if stop - start <= self._max_items and self._tail.size(start, stop) <= self._max_bytes:
            stop = self._tail.fitting(start, stop, REPLY_BYTES)
            out, order, sequence = weave(standing.order, self._tail.pieces(start, stop), after=standing.sequence)
            return self._taken(out, Standing(stop, sequence, order))
        # Too much waits for this reader: the same in fewer frames, or else only the events.
        out, order, sequence = weave(standing.order, self._tail.pieces(start, stop), after=standing.sequence)
        out = merge(out)
        over = MERGED
        if len(out) > self._max_items or _size(out) > self._max_bytes:
            stop = self._tail.fitting(start, stop, REPLY_BYTES)
            left = [_dropped(piece) for piece in self._tail.pieces(start, stop)]
            out, order, sequence = weave(standing.order, left, after=standing.sequence)
            over = DROPPED
        return self._taken(out, Standing(stop, sequence, order), over)

    def _taken(self, out: list[Out], standing: Standing, over: str = "") -> Taken:
        last = next((piece for piece in reversed(out) if isinstance(piece, EventIn)), None)
        place = None if last is None else Place(self.place.log_id, last.sequence, last.tag)
        gaps = gaps_of(out)
        return Taken(join(out), standing, place, over, gaps if gaps[0] else None)


def _dropped(piece: FrameIn | EventIn) -> Piece:
    return Lost(piece.execution, piece.epoch, piece.last) if isinstance(piece, FrameIn) else piece


def _size(out: list[Out]) -> int:
    return sum(len(piece.reply) for piece in out if isinstance(piece, FrameIn | EventIn))
