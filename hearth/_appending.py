"""Which events go to the history next, in which order, and what goes again. Pure: values in, decisions out.

Events of one session keep their order through every loss: nothing of a session is sent while something before it waits,
and what was not answered goes again, the same bytes, before anything newer. Sessions do not wait for each other. Of a
line that is too long for the memory, a part is parked elsewhere and comes back in its place.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import grpc

from hearth._pipeline import ProtocolViolation
from hearth._publishing import FrameBuffer, FrameQueue
from hearth._wire import bytes_field, bytes_field_head, number_field
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import session_pb2

REQUESTS_IN_FLIGHT = 2
REQUEST_EVENTS = 1_000
REQUEST_BYTES = 3 * 1024 * 1024
# Up to how many sessions always go in one request: more requests would cost more than they gain.
FEW_SESSIONS = 16
MAX_PENALTY_SECONDS = 5.0

_ATOMIC = number_field(history_pb2.AppendSet.ATOMIC_FIELD_NUMBER, 1)

# Codes that say nothing about the events of the request; the others may be the fault of one of them.
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# Of these, the ones that a defect or a bad connection may give too: worth another try, but not in front of others.
_UNCLEAR = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


def event_field(event: bytes) -> bytes:
    """A serialized event as it stands in an AppendSet."""
    return bytes_field(history_pb2.AppendSet.EVENTS_FIELD_NUMBER, event)


def trace_field(traceparent: str) -> bytes:
    """A traceparent as it stands in an AppendSet; nothing when there is none."""
    return bytes_field(history_pb2.AppendSet.TRACEPARENT_FIELD_NUMBER, traceparent.encode()) if traceparent else b""


class Item(abc.ABC):
    """Events of one session that are sent together.

    `wire` are the events as fields of an AppendSet, `count` how many. `frames_through` names the last frame in `frames`
    that readers should see first; the item waits for those until `hold_until`. With `barrier` nothing of the session
    follows before it is settled. `trace` is the traceparent of the work that made it, as a field of an AppendSet.
    `owner` is whose output it is, None for nobody's.
    """

    __slots__ = (
        "atomic",
        "barrier",
        "count",
        "frames",
        "frames_through",
        "hold_until",
        "lane",
        "owner",
        "sent",
        "trace",
        "tries",
        "wire",
    )

    def __init__(self, wire: bytes, count: int = 1, *, atomic: bool = False, barrier: bool = False) -> None:
        self.wire = wire
        self.count = count
        self.atomic = atomic
        self.barrier = barrier
        self.owner: object = None
        self.frames: FrameBuffer | None = None
        self.frames_through = 0
        self.hold_until = 0.0
        self.lane: Lane | None = None
        self.trace = b""
        self.sent = False
        # Above 0: a request with it failed in a way that may be its fault, so it goes alone.
        self.tries = 0

    @abc.abstractmethod
    def settle(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        """The results came. False: it is not done, and goes again before anything else of its session."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """It will not be sent any more."""


class Parked(abc.ABC):
    """Items of one session and owner that stand in its line without being in memory."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    @abc.abstractmethod
    def close(self) -> None:
        """Something stands behind them now: no item more may be added."""

    @abc.abstractmethod
    def take(self, *, next_up: bool) -> list[Item] | None:
        """The items, which are not parked any more; None when they cannot be had yet.

        They may have to be fetched, which `AppendQueue.arrived` is told of, or there may be no room for them; that does
        not count when they are `next_up`: nothing else of the session waits before them.
        """

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """They will not be sent."""


Entry = Item | Parked


class Lane:
    """The line of one session: `items`, then what is `behind` the first parked ones."""

    __slots__ = ("behind", "blocked", "head", "in_flight", "items", "key", "ready", "size")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        session = session_pb2.SessionKey(project=key[0], session=key[1]).SerializeToString()
        self.head = bytes_field(history_pb2.AppendSet.SESSION_FIELD_NUMBER, session)
        self.items: deque[Item] = deque()
        self.behind: deque[Entry] = deque()
        self.in_flight = 0
        # Bytes in memory.
        self.size = 0
        # Whether it stands in the queue of lanes to send from, and whether a barrier is in flight.
        self.ready = False
        self.blocked = False


@dataclasses.dataclass(slots=True)
class _Request:
    number: int
    sent_at: float
    # Items by the set in which they went.
    sets: list[list[Item]]

    @property
    def items(self) -> list[Item]:
        return [item for group in self.sets for item in group]


class AppendQueue:
    """The events of all sessions on their way through one AppendStream."""

    def __init__(self, frames: FrameQueue) -> None:
        self._frames = frames
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._ready: deque[Lane] = deque()
        self._held: dict[Lane, float] = {}
        self._in_flight: deque[_Request] = deque()
        self._number = 0
        # Unclear failures since the last answer: one may be an accident of the connection.
        self._strikes = 0
        self.requests = 0
        self.resent = 0

    def size_of(self, key: tuple[str, str]) -> int:
        """Bytes of one session that are not settled and in memory."""
        lane = self._lanes.get(key)
        return lane.size if lane is not None else 0

    def add(self, key: tuple[str, str], item: Item) -> bool:
        """Put the item at the end of its session's line. True when that changes what `take` says."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        item.lane = lane
        lane.size += len(item.wire)
        if lane.behind:
            self._put_behind(lane, item)
            return False
        lane.items.append(item)
        return self._make_ready(lane) and len(self._in_flight) < REQUESTS_IN_FLIGHT

    def park(self, key: tuple[str, str], parked: Parked) -> bool:
        """Put what is parked at the end of its session's line. True when that changes what `take` says."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        self._put_behind(lane, parked)
        if lane.items or lane.in_flight:
            return False
        self._refill(lane)
        return lane.ready

    def arrived(self, key: tuple[str, str]) -> None:
        """What is parked first in a session's line can be taken."""
        lane = self._lanes.get(key)
        if lane is not None:
            self._tidy(lane)

    def remove(self, key: tuple[str, str], unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Take entries of a session that are not in flight out of its line."""
        lane = self._lanes.get(key)
        if lane is None:
            return []
        gone = [entry for line in (lane.items, lane.behind) for entry in line if unwanted(entry)]
        lane.items = deque(item for item in lane.items if not unwanted(item))
        lane.behind = deque(entry for entry in lane.behind if not unwanted(entry))
        lane.size -= sum(len(entry.wire) for entry in gone if isinstance(entry, Item))
        self._tidy(lane)
        return gone

    def drain(self) -> list[Entry]:
        """Take everything out, in order, sent or not."""
        found: list[Entry] = [item for request in self._in_flight for item in request.items]
        found += [entry for lane in self._lanes.values() for line in (lane.items, lane.behind) for entry in line]
        self._in_flight.clear()
        self._ready.clear()
        self._held.clear()
        self._lanes.clear()
        return found

    @property
    def holding(self) -> bool:
        """Whether a line waits for frames."""
        return bool(self._held)

    @property
    def pending(self) -> bool:
        return bool(self._lanes)

    @property
    def waiting_since(self) -> float | None:
        return self._in_flight[0].sent_at if self._in_flight else None

    def next_time(self, now: float) -> float | None:
        if not self._held or len(self._in_flight) >= REQUESTS_IN_FLIGHT:
            return None
        return max(now, min(self._held.values()))

    def take(self, now: float) -> bytes | None:
        if len(self._in_flight) >= REQUESTS_IN_FLIGHT:
            return None
        self._release_held(now)
        sets: list[list[Item]] = []
        events, size = 0, 0
        for _ in range(self._share()):
            if events >= REQUEST_EVENTS or size >= REQUEST_BYTES:
                break
            lane = self._ready.popleft()
            lane.ready = False
            while lane.items and not lane.blocked:
                item = lane.items[0]
                if not self._is_free(item, now):
                    break
                alone = item.tries > 0 or (bool(sets) and sets[0][0].tries > 0)
                fits = events + item.count <= REQUEST_EVENTS and size + len(item.wire) <= REQUEST_BYTES
                if sets and (alone or not fits):
                    self._make_ready(lane)
                    break
                if alone and self._in_flight:
                    self._make_ready(lane, first=True)
                    return None
                lane.items.popleft()
                lane.in_flight += 1
                lane.blocked = item.barrier
                self.resent += item.sent
                item.sent = True
                events += item.count
                size += len(item.wire)
                group = sets[-1] if sets else None
                if group is not None and _joins(group[0], item):
                    group.append(item)
                else:
                    sets.append([item])
                    size += len(lane.head) + len(item.trace)
        if not sets:
            return None
        self._number += 1
        self._in_flight.append(_Request(self._number, now, sets))
        self.requests += 1
        return _encode(self._number, sets)

    def _share(self) -> int:
        """From how many lines the next request takes.

        Many are divided among the requests that may be in flight: then one is decided while another is committed, and
        callers that wait for their results do not all come back at the same moment.
        """
        free = REQUESTS_IN_FLIGHT - len(self._in_flight)
        return min(len(self._ready), max(FEW_SESSIONS, -(-len(self._ready) // free)))

    def received(self, response: history_service_pb2.AppendStreamResponse, now: float) -> None:
        for reply in response.replies:
            if not self._in_flight or self._in_flight[0].number != reply.number:
                raise ProtocolViolation(f"a reply to request {reply.number}, which is not the oldest one")
            sets = self._in_flight[0].sets
            counts = [sum(item.count for item in group) for group in sets]
            if counts != [len(result.results) for result in reply.sets]:
                raise ProtocolViolation("results that do not match the events sent")
            self._in_flight.popleft()
            self._strikes = 0
            for group, result in zip(sets, reply.sets, strict=True):
                at = 0
                for item in group:
                    self._settle(item, result.results[at : at + item.count])
                    at += item.count

    def lost(self, error: CallError | None, now: float) -> None:
        doomed = self._suspect(error)
        lanes: list[Lane] = []
        for request in reversed(self._in_flight):
            for item in reversed(request.items):
                lane = item.lane
                assert lane is not None
                lane.in_flight -= 1
                lane.blocked = False
                lane.items.appendleft(item)
                lanes.append(lane)
        self._in_flight.clear()
        self._number = 0
        if doomed is not None and error is not None:
            assert doomed.lane is not None
            doomed.lane.items.popleft()
            doomed.lane.size -= len(doomed.wire)
            doomed.fail(error)
            self._tidy(doomed.lane)
        for lane in lanes:
            if lane.items:
                self._make_ready(lane, first=True)
                if lane.items[0].tries > 1:
                    # It failed alone: its session waits a while, so that the others get through.
                    self._hold(lane, now + min(0.1 * 2 ** lane.items[0].tries, MAX_PENALTY_SECONDS))

    def _suspect(self, error: CallError | None) -> Item | None:
        """Find out which item makes requests fail: mark those of the first failed request to go one by one, and give
        back the one that was refused for good while it went alone."""
        if error is None or error.code in _PASSING or not self._in_flight:
            return None
        self._strikes += 1
        if error.code in _UNCLEAR and self._strikes == 1:
            return None
        items = self._in_flight[0].items
        for item in items:
            item.tries += 1
        return items[0] if len(items) == 1 and error.code not in _UNCLEAR else None

    def _settle(self, item: Item, results: Sequence[history_pb2.AppendResult]) -> None:
        lane = item.lane
        assert lane is not None
        lane.in_flight -= 1
        if item.barrier:
            lane.blocked = False
        before = len(item.wire)
        if item.settle(results):
            lane.size -= before
        else:
            lane.size += len(item.wire) - before
            lane.items.appendleft(item)
        self._tidy(lane)
        if lane.items:
            self._make_ready(lane, first=item.barrier)

    def _is_free(self, item: Item, now: float) -> bool:
        """Whether the item may go, or its line is held for the frames before it."""
        if item.frames is None or not item.frames.holds(item.frames_through):
            return True
        if not self._frames.away:
            if now < item.hold_until:
                assert item.lane is not None
                self._hold(item.lane, item.hold_until)
                return False
            self._frames.away = True
        item.frames.give_up(item.frames_through)
        return True

    def _release_held(self, now: float) -> None:
        for lane, until in list(self._held.items()):
            item = lane.items[0] if lane.items else None
            waits_for_frames = item is not None and item.frames is not None and item.frames.holds(item.frames_through)
            penalized = item is not None and item.tries > 1
            if now >= until or (not penalized and (self._frames.away or not waits_for_frames)):
                del self._held[lane]
                self._make_ready(lane)

    def _hold(self, lane: Lane, until: float) -> None:
        self._held[lane] = until
        if lane.ready:
            self._ready.remove(lane)
            lane.ready = False

    def _make_ready(self, lane: Lane, *, first: bool = False) -> bool:
        if lane.ready or lane.blocked or not lane.items or lane in self._held:
            return False
        lane.ready = True
        if first:
            self._ready.appendleft(lane)
        else:
            self._ready.append(lane)
        return True

    def _put_behind(self, lane: Lane, entry: Entry) -> None:
        last = lane.behind[-1] if lane.behind else None
        if isinstance(last, Parked):
            last.close()
        lane.behind.append(entry)

    def _refill(self, lane: Lane) -> None:
        """Move what can be sent up to the others."""
        while lane.behind:
            first = lane.behind[0]
            if isinstance(first, Parked):
                found = first.take(next_up=not lane.items and not lane.in_flight)
                if found is None:
                    break
                for item in found:
                    item.lane = lane
                    lane.size += len(item.wire)
                lane.items += found
            else:
                lane.items.append(first)
            lane.behind.popleft()
        self._make_ready(lane)

    def _tidy(self, lane: Lane) -> None:
        if lane.behind:
            self._refill(lane)
        if lane.items or lane.in_flight or lane.behind:
            return
        self._held.pop(lane, None)
        if lane.ready:
            self._ready.remove(lane)
            lane.ready = False
        if self._lanes.get(lane.key) is lane:
            del self._lanes[lane.key]


def _joins(first: Item, item: Item) -> bool:
    """Whether an item may stand in the set that `first` began."""
    return first.lane is item.lane and not first.atomic and not item.atomic and first.trace == item.trace


def _encode(number: int, sets: Sequence[Sequence[Item]]) -> bytes:
    parts: list[bytes] = []
    for group in sets:
        lane = group[0].lane
        assert lane is not None
        fields = [lane.head, *(item.wire for item in group), group[0].trace]
        if group[0].atomic:
            fields.append(_ATOMIC)
        size = sum(map(len, fields))
        parts += (bytes_field_head(history_service_pb2.AppendStreamRequest.SETS_FIELD_NUMBER, size), *fields)
    parts.append(number_field(history_service_pb2.AppendStreamRequest.NUMBER_FIELD_NUMBER, number))
    return b"".join(parts)
