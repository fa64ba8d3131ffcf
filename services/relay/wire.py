"""The bytes that the relay passes on: taken apart only as far as needed, wrapped and joined without being parsed again.

Serialized messages of one type merge when their bytes are joined, and repeated fields then hold the items of all. So a
`SubscribeResponse` with many items is the joined bytes of responses with one item each, called replies here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, cast

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.relay.v1 import bus_pb2, relay_pb2, relay_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.shadows import shadows
from services.relay.order import EventIn, Gap, Out, Reset, Role

NOTICE = b"E"
FRAMES = b"F"

_SHADOWS = shadows(
    [
        bus_pb2.Notice.DESCRIPTOR,
        history_service_pb2.ReadEventsResponse.DESCRIPTOR,
        history_service_pb2.GetSnapshotResponse.DESCRIPTOR,
        history_pb2.Bounds.DESCRIPTOR,
        event_pb2.Event.DESCRIPTOR,
    ]
)
_Notice = _SHADOWS["Notice"]
_Page = _SHADOWS["ReadEventsResponse"]
_Snapshot = _SHADOWS["GetSnapshotResponse"]
_EventHeader = _SHADOWS["Event"]
# An event item with its cursor opened and the event left as bytes.
_Item = shadows([event_pb2.EventItem.DESCRIPTOR, session_pb2.Cursor.DESCRIPTOR])["EventItem"]

_ENDINGS = frozenset(
    {"execution.completed", "execution.paused", "execution.stopped", "execution.failed", "execution.lost"}
)
_COMPLETES = frozenset({"message.completed", "tool.completed"})


class Place(NamedTuple):
    """A cursor as a value: `log_id` and `tag` are empty where nothing is known."""

    log_id: str = ""
    sequence: int = 0
    tag: str = ""

    @classmethod
    def of(cls, cursor: session_pb2.Cursor) -> Place:
        """The same as a value."""
        return cls(cursor.log_id, cursor.sequence, cursor.tag)

    def cursor(self) -> session_pb2.Cursor:
        """The same as a message."""
        return session_pb2.Cursor(log_id=self.log_id, sequence=self.sequence, tag=self.tag)

    def metadata(self) -> dict[str, str]:
        """The same for the details of an error."""
        return {"log_id": self.log_id, "sequence": str(self.sequence), "tag": self.tag}


class RawNotice(Protocol):
    """A notice of history; its event items are serialized."""

    log_id: str
    first_sequence: int
    last_sequence: int
    previous_tag: str
    events: list[bytes]
    traceparent: str


class RawBounds(Protocol):
    """Bounds of a log."""

    log_id: str
    oldest: int
    head: int


class RawPage(Protocol):
    """A page of a log; its event items are serialized."""

    events: list[bytes]
    bounds: RawBounds
    more: bool


class RawSnapshot(Protocol):
    """A page of a snapshot; its event items are serialized."""

    events: list[bytes]
    next_page_token: str


def parse_notice(data: bytes) -> RawNotice:
    """A notice. Raises `DecodeError`."""
    return cast("RawNotice", _Notice.FromString(data))


def parse_page(data: bytes) -> RawPage:
    """A page of ReadEvents. Raises `DecodeError`."""
    return cast("RawPage", _Page.FromString(data))


def parse_snapshot(data: bytes) -> RawSnapshot:
    """A page of GetSnapshot. Raises `DecodeError`."""
    return cast("RawSnapshot", _Snapshot.FromString(data))


def place_of(item: bytes) -> Place:
    """Where a serialized event item stands in its log."""
    cursor = _Item.FromString(item).cursor
    return Place(cursor.log_id, cursor.sequence, cursor.tag)


def event_of(item: bytes) -> tuple[EventIn, Place]:
    """What the order of frames needs to know of a serialized event item, and where it stands."""
    opened = _Item.FromString(item)
    event, cursor = _EventHeader.FromString(opened.event), opened.cursor
    place = Place(cursor.log_id, cursor.sequence, cursor.tag)
    return (
        EventIn(
            place.sequence,
            place.tag,
            # As frames and heads have it: stored is what its producer wrote.
            event.execution_id.lower(),
            event.epoch,
            event.frames_through if event.HasField("frames_through") else -1,
            _role(event.scope, event.type),
            event.entity_id if event.type in _COMPLETES else "",
            event_reply(item),
        ),
        place,
    )


def _role(scope: int, event_type: str) -> Role:
    if scope != event_pb2.EVENT_SCOPE_RUNNER:
        return Role.SESSION
    if event_type == "execution.started":
        return Role.STARTED
    return Role.ENDING if event_type in _ENDINGS else Role.RUNNER


def _digits(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


# Sizes and indexes of frames are mostly small, and each frame has six of them.
_SMALL = tuple(_digits(value) for value in range(2048))


def varint(value: int) -> bytes:
    """A number >= 0 in protobuf's base 128."""
    return _SMALL[value] if value < 2048 else _digits(value)


def event_reply(item: bytes) -> bytes:
    """The reply that delivers a serialized event item."""
    size = len(item)
    return b"\x0a%b\x0a%b%b" % (varint(size + 1 + _width(size)), varint(size), item)


class FrameWriter:
    """Builds what is sent of the frames of one (execution, epoch), from serialized frames."""

    __slots__ = ("_item",)

    def __init__(self, execution_id: str, epoch: int) -> None:
        # FrameItem: execution_id = 1, epoch = 2; what comes after is frame = 3.
        self._item = relay_pb2.FrameItem(execution_id=execution_id, epoch=epoch).SerializeToString() + b"\x1a"

    def reply(self, frame: bytes) -> bytes:
        """The reply that delivers `frame`."""
        framed = varint(len(frame))
        size = len(self._item) + len(framed) + len(frame)
        return b"\x0a%b\x12%b%b%b%b" % (varint(size + 1 + _width(size)), varint(size), self._item, framed, frame)


def live_frame(index: int, reply: bytes) -> bytes:
    """A frame as an entry of `LiveFrames`, to be joined behind its head."""
    place = b"\x08" + varint(index) if index else b""
    size = len(reply)
    return b"\x2a%b%b\x12%b%b" % (varint(len(place) + 1 + _width(size) + size), place, varint(size), reply)


def live_head(project: str, session: str, execution_id: str, epoch: int) -> bytes:
    """`LiveFrames` without frames."""
    return bus_pb2.LiveFrames(
        project=project, session=session, execution_id=execution_id, epoch=epoch
    ).SerializeToString()


def join(out: Iterable[Out]) -> bytes:
    """One response with all of `out`."""
    return b"".join([_reply(piece) for piece in out])


def _reply(piece: Out) -> bytes:
    if isinstance(piece, Gap):
        gap = relay_pb2.Gap(execution_id=piece.execution, epoch=piece.epoch, to=piece.last)
        setattr(gap, "from", piece.first)
        return item_reply(relay_pb2.Item(gap=gap))
    if isinstance(piece, Reset):
        reset = relay_pb2.Reset(execution_id=piece.execution, epoch=piece.epoch)
        return item_reply(relay_pb2.Item(reset=reset))
    return piece.reply


def item_reply(item: relay_pb2.Item) -> bytes:
    """The reply that delivers one item."""
    return relay_service_pb2.SubscribeResponse(items=[item]).SerializeToString()


def _width(size: int) -> int:
    """How many bytes `varint(size)` has."""
    return 1 if size < 0x80 else 2 if size < 0x4000 else 3 if size < 0x200000 else 4
