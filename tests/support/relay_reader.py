"""A strict reader of sessions, and the checkers of what relay and history promise to readers.

`Recording` is everything one reader got over all its connections. Each checker takes one and returns what is wrong with
it, in words: H1 ordered, H2 complete or refused, H3 once, L1 signalled, and the cursor rule.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import content_pb2, event_pb2, session_pb2

ENDINGS = frozenset(
    {"execution.completed", "execution.paused", "execution.stopped", "execution.failed", "execution.lost"}
)


_OF_FRAMES = frozenset({"frame", "gap", "reset"})


@dataclasses.dataclass
class Connection:
    """One Subscribe call: what it asked for, what it got, and how it ended (None: not, or by the reader)."""

    after: session_pb2.Cursor | None
    items: list[relay_pb2.Item] = dataclasses.field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None
    events_only: bool = False


Recording = list[Connection]
Checker = Callable[[Recording], list[str]]


def h1_ordered(recording: Recording) -> list[str]:
    """Each connection's sequences ascend by one."""
    wrong = []
    for number, connection in enumerate(recording):
        before = None
        for item in events_in(connection.items):
            sequence = item.cursor.sequence
            if before is not None and sequence != before + 1:
                wrong.append(f"connection {number}: {sequence} follows {before}")
            before = sequence
    return wrong


def h2_complete(recording: Recording) -> list[str]:
    """The first event after a resume is the one after the cursor, or there is a refusal that says why."""
    wrong = []
    for number, connection in enumerate(recording):
        first = next(events_in(connection.items), None)
        if first is not None and connection.after is not None:
            expected = connection.after.sequence + 1
            if first.cursor.sequence != expected:
                wrong.append(f"connection {number}: begins with {first.cursor.sequence}, expected {expected}")
        if connection.error is not None and not connection.error.details():
            wrong.append(f"connection {number}: ended without a word")
    return wrong


def h3_once(recording: Recording) -> list[str]:
    """No event comes twice, on one connection or over all of them."""
    wrong = []
    sequences: set[int] = set()
    ids: set[str] = set()
    for number, connection in enumerate(recording):
        for item in events_in(connection.items):
            if item.cursor.sequence in sequences or item.event.event_id in ids:
                wrong.append(f"connection {number}: {item.cursor.sequence} ({item.event.event_id}) came before")
            sequences.add(item.cursor.sequence)
            ids.add(item.event.event_id)
    return wrong


def cursor_rule(recording: Recording) -> list[str]:
    """Only events move the cursor; what else names a place names the last event delivered, or that of the request."""
    wrong = []
    log_ids: set[str] = set()
    for number, connection in enumerate(recording):
        at = connection.after.sequence if connection.after is not None else None
        for item in connection.items:
            kind = item.WhichOneof("item")
            if kind == "event":
                cursor = item.event.cursor
                at = cursor.sequence
                log_ids.add(cursor.log_id)
                if cursor.tag != item.event.event.event_id.replace("-", "")[:16]:
                    wrong.append(f"connection {number}: the tag at {at} is not that of the event")
                continue
            named = _place_named(item)
            if named is None:
                continue
            if at is None and kind == "ready":
                at = named
            if named != at:
                wrong.append(f"connection {number}: {kind} names {named}, delivered was {at}")
    if len(log_ids) > 1:
        wrong.append(f"events of {len(log_ids)} logs")
    return wrong


def _place_named(item: relay_pb2.Item) -> int | None:
    match item.WhichOneof("item"):
        case "ready":
            return item.ready.through if item.ready.through == item.ready.cursor.sequence else -1
        case "heartbeat":
            return item.heartbeat.through
        case "closing":
            return item.closing.cursor.sequence
    return None


def l1_signalled(recording: Recording) -> list[str]:
    """Lost frames are told, whole texts are whole, and no frame comes after what it belongs to."""
    wrong = []
    for number, connection in enumerate(recording):
        if connection.events_only:
            if any(item.WhichOneof("item") in _OF_FRAMES for item in connection.items):
                wrong.append(f"connection {number}: frames, though only events were asked for")
            continue
        frames = _Frames(from_start=connection.after is not None and connection.after.sequence == 0)
        for item in connection.items:
            wrong += [f"connection {number}: {trouble}" for trouble in frames.apply(item)]
    return wrong


CHECKERS: dict[str, Checker] = {
    "H1": h1_ordered,
    "H2": h2_complete,
    "H3": h3_once,
    "L1": l1_signalled,
    "cursor": cursor_rule,
}


def check(recording: Recording, checkers: Iterable[str] = tuple(CHECKERS)) -> None:
    """Raise AssertionError with everything that is wrong."""
    wrong = [f"{name}: {trouble}" for name in checkers for trouble in CHECKERS[name](recording)]
    assert not wrong, "\n".join(wrong)


@dataclasses.dataclass
class _Track:
    """The frames of one execution as one connection saw them."""

    epoch: int
    # Lowest index that may come; the index that must come next if `strict`.
    next: int = 0
    # An index may be left out once more: what was withheld from a late joiner.
    strict: bool = False
    ended: bool = False
    gaps: int = 0
    held: bool = False
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    completed: set[str] = dataclasses.field(default_factory=set)


class _Frames:
    """Follows the frames of one connection."""

    def __init__(self, *, from_start: bool) -> None:
        self._from_start = from_start
        self._ready = False
        self._tracks: dict[str, _Track] = {}

    def apply(self, item: relay_pb2.Item) -> list[str]:
        match item.WhichOneof("item"):
            case "event":
                return self._event(item.event.event)
            case "frame":
                return self._frame(item.frame)
            case "gap":
                return self._gap(item.gap)
            case "reset":
                return self._reset(item.reset)
            case "ready":
                self._ready = True
        return []

    def _event(self, event: event_pb2.Event) -> list[str]:
        if event.scope != event_pb2.EVENT_SCOPE_RUNNER:
            return []
        if event.type == "execution.started":
            self._tracks[event.execution_id] = _Track(event.epoch, strict=self._ready)
            return []
        track = self._tracks.get(event.execution_id)
        if track is None:
            track = self._tracks[event.execution_id] = _Track(event.epoch)
        wrong: list[str] = []
        if event.epoch > track.epoch:
            if track.held and event.type not in ENDINGS:
                wrong.append(f"epoch {event.epoch} without a reset, frames of {track.epoch} are held")
            track.epoch, track.next = event.epoch, 0
        if event.HasField("frames_through") and event.epoch == track.epoch:
            if track.strict and track.next <= event.frames_through:
                wrong.append(f"{event.type} covers frames to {event.frames_through}, told or got to {track.next - 1}")
            track.next = max(track.next, event.frames_through + 1)
        if event.type == "message.completed":
            wrong += self._message(event.message_completed, track)
        if event.type in ("message.completed", "tool.completed"):
            track.completed.add(event.entity_id)
        track.ended = track.ended or event.type in ENDINGS
        return wrong

    def _message(self, message: event_pb2.MessageCompleted, track: _Track) -> list[str]:
        got = track.texts.get(message.message_id)
        whole = text_of(message)
        if got is not None and not track.gaps and got != whole:
            return [f"message {message.message_id}: frames add up to {got!r}, it is {whole!r}, and no gap was told"]
        return []

    def _frame(self, item: relay_pb2.FrameItem) -> list[str]:
        frame = item.frame
        track = self._tracks.get(item.execution_id)
        if track is None:
            if self._from_start:
                return [f"frame {frame.frame_index} before its execution started"]
            track = self._tracks[item.execution_id] = _Track(item.epoch)
        wrong: list[str] = []
        if track.ended:
            wrong.append(f"frame {frame.frame_index} after the ending")
        if frame.entity_id in track.completed:
            wrong.append(f"frame {frame.frame_index} after {frame.entity_id} was complete")
        if item.epoch != track.epoch:
            if item.epoch < track.epoch or track.held:
                wrong.append(f"frame of epoch {item.epoch} where {track.epoch} is")
            track.epoch, track.next, track.held = item.epoch, 0, False
        if frame.frame_index < track.next:
            wrong.append(f"frame {frame.frame_index} where {track.next} may come")
        if track.strict and frame.frame_index > track.next:
            wrong.append(f"frame {frame.frame_index} where {track.next} is next, and no gap was told")
        through = frame.merged_through if frame.HasField("merged_through") else frame.frame_index
        if through < frame.frame_index:
            wrong.append(f"frame {frame.frame_index} merged through {through}")
        track.next, track.held = through + 1, True
        track.strict = track.strict or self._ready
        delta = frame.text_delta.text if frame.HasField("text_delta") else frame.thought_delta.text
        track.texts[frame.entity_id] = track.texts.get(frame.entity_id, "") + delta
        return wrong

    def _gap(self, gap: relay_pb2.Gap) -> list[str]:
        first, last = gap_range(gap)
        track = self._tracks.get(gap.execution_id)
        if track is None:
            if self._from_start:
                return [f"gap {first}-{last} before its execution started"]
            track = self._tracks[gap.execution_id] = _Track(gap.epoch)
        wrong = []
        if gap.epoch > track.epoch:
            if track.held:
                wrong.append(f"gap of epoch {gap.epoch} without a reset, frames of {track.epoch} are held")
            track.epoch, track.next = gap.epoch, 0
        if first > last or (first < track.next and track.strict):
            wrong.append(f"gap {first}-{last} where {track.next} is next")
        if track.ended:
            wrong.append(f"gap {first}-{last} after the ending")
        track.gaps += 1
        track.next = max(track.next, last + 1)
        return wrong

    def _reset(self, reset: relay_pb2.Reset) -> list[str]:
        track = self._tracks.get(reset.execution_id)
        if track is None or not track.held:
            return ["reset for a reader that holds no frames"]
        if reset.epoch <= track.epoch:
            return [f"reset to epoch {reset.epoch} at {track.epoch}"]
        self._tracks[reset.execution_id] = _Track(reset.epoch, strict=True)
        return []


def events_in(items: Iterable[relay_pb2.Item]) -> Iterator[event_pb2.EventItem]:
    """The events among `items`."""
    return (item.event for item in items if item.HasField("event"))


def gap_range(gap: relay_pb2.Gap) -> tuple[int, int]:
    """First and last lost index; `from` is a word of Python."""
    return getattr(gap, "from"), gap.to


def text_of(message: event_pb2.MessageCompleted) -> str:
    """The text of a message."""
    return "".join(part.text.text for part in message.content if isinstance(part, content_pb2.ContentPart))


class StrictReader:
    """Reads a session, records everything, and resumes by the cursor rule when told to or when the stream breaks.

    Use it by `reading`, which checks the recording at its end.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        session: session_pb2.SessionKey,
        *,
        after: session_pb2.Cursor | None = None,
        tail: bool = False,
        events_only: bool = False,
    ) -> None:
        self._stub = relay_service_pb2_grpc.RelayServiceStub(channel)
        self._session = session
        self._events_only = events_only
        self.cursor: session_pb2.Cursor | None = None if tail else after or session_pb2.Cursor()
        self.recording: Recording = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taking = asyncio.Event()
        self._taking.set()

    # --- what it got, over all connections ---

    @property
    def items(self) -> list[relay_pb2.Item]:
        """Every item, in order."""
        return [item for connection in self.recording for item in connection.items]

    @property
    def events(self) -> list[event_pb2.EventItem]:
        """Every event."""
        return list(events_in(self.items))

    @property
    def sequences(self) -> list[int]:
        """Their sequences."""
        return [item.cursor.sequence for item in self.events]

    @property
    def types(self) -> list[str]:
        """Their types."""
        return [item.event.type for item in self.events]

    @property
    def frames(self) -> list[relay_pb2.FrameItem]:
        """Every frame."""
        return [item.frame for item in self.items if item.HasField("frame")]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Every gap, first and last index."""
        return [gap_range(item.gap) for item in self.items if item.HasField("gap")]

    def kinds(self) -> list[str]:
        """What the items are, in order."""
        return [item.WhichOneof("item") or "" for item in self.items]

    def of_kind(self, kind: str) -> list[relay_pb2.Item]:
        """The items of one kind."""
        return [item for item in self.items if item.WhichOneof("item") == kind]

    def text(self, entity_id: str) -> str:
        """What the frames of an entity add up to."""
        return "".join(item.frame.text_delta.text for item in self.frames if item.frame.entity_id == entity_id)

    @property
    def error(self) -> grpc.aio.AioRpcError | None:
        """How the newest connection ended."""
        return self.recording[-1].error if self.recording else None

    @property
    def ready(self) -> bool:
        """Whether the newest connection said `ready`."""
        return bool(self.recording) and any(item.HasField("ready") for item in self.recording[-1].items)

    @property
    def ended(self) -> bool:
        """Whether the newest connection is over."""
        return self._task is None or self._task.done()

    # --- what it does ---

    def connect(self) -> None:
        """Open a connection at the cursor."""
        assert self.ended, "still connected"
        request = relay_service_pb2.SubscribeRequest(session=self._session, events_only=self._events_only)
        if self.cursor is None:
            request.tail = True
        else:
            request.after.CopyFrom(self.cursor)
        connection = Connection(request.after if self.cursor is not None else None, events_only=self._events_only)
        self.recording.append(connection)
        self._task = asyncio.create_task(self._read(connection, request))

    async def disconnect(self) -> None:
        """Leave in the middle."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def reconnect(self) -> None:
        """Leave and come back at the cursor."""
        await self.disconnect()
        self.connect()

    def pause(self) -> None:
        """Take nothing more, but stay connected."""
        self._taking.clear()

    def go_on(self) -> None:
        """Take again."""
        self._taking.set()

    async def until(self, condition: Callable[[], object], timeout: float = 15.0) -> None:
        """Return when `condition` holds; AssertionError when it does not in time or the connection ends before."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    assert not self.ended, f"the stream ended: {self.error!r}\n{self._story()}"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout} s:\n{self._story()}") from None

    async def until_ready(self) -> None:
        """Return when `ready` came."""
        await self.until(lambda: self.ready)

    async def until_sequence(self, sequence: int, timeout: float = 15.0) -> None:
        """Return when the event at `sequence` came."""
        await self.until(lambda: any(found >= sequence for found in self.sequences[-1:]), timeout)

    async def until_text(self, entity_id: str, text: str) -> None:
        """Return when the frames of an entity add up to `text`."""
        await self.until(lambda: self.text(entity_id) == text)

    async def until_type(self, event_type: str) -> None:
        """Return when an event of this type came."""
        await self.until(lambda: event_type in self.types)

    async def until_ended_or(self, event_type: str, timeout: float = 30.0) -> None:
        """Return when the connection is over or an event of this type came."""
        async with asyncio.timeout(timeout):
            while not self.ended and event_type not in self.types:
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, timeout: float = 15.0) -> None:
        """Return when the connection is over."""
        assert self._task is not None
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        assert done, f"the stream did not end within {timeout} s:\n{self._story()}"

    def verify(self) -> None:
        """Check everything it got."""
        check(self.recording)

    async def _read(self, connection: Connection, request: relay_service_pb2.SubscribeRequest) -> None:
        call = self._stub.Subscribe(request)
        try:
            async for response in call:
                for item in response.items:
                    connection.items.append(item)
                    if item.HasField("event"):
                        self.cursor = item.event.cursor
                    elif item.HasField("ready") and self.cursor is None:
                        self.cursor = item.ready.cursor
                self._changed.set()
                await self._taking.wait()
        except grpc.aio.AioRpcError as error:
            connection.error = error
        finally:
            call.cancel()
            # Seen only once this task is done.
            asyncio.get_running_loop().call_soon(self._changed.set)

    def _story(self) -> str:
        lines = [str(item).replace("\n", " ")[:160] for item in self.items]
        return "\n".join(lines[-40:])


@asynccontextmanager
async def reading(
    channel: grpc.aio.Channel,
    session: session_pb2.SessionKey,
    *,
    after: session_pb2.Cursor | None = None,
    tail: bool = False,
    events_only: bool = False,
) -> AsyncIterator[StrictReader]:
    """A connected strict reader; what it got is checked when the block ends well."""
    reader = StrictReader(channel, session, after=after, tail=tail, events_only=events_only)
    reader.connect()
    try:
        yield reader
    finally:
        await reader.disconnect()
    reader.verify()
