"""The contract's wire form, read and written without touching what is inside an event.

An event is stored and delivered byte for byte as its producer sent it: requests are split by shadows of the contract's
messages, and replies to reads are joined from bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.relay.v1 import bus_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.shadows import shadows


class RawEvent(Protocol):
    """An event with its body, and the time it happened, still serialized."""

    event_id: str
    scope: int
    type: str
    entity_id: str
    execution_id: str
    epoch: int

    def WhichOneof(self, oneof_group: str) -> str | None:
        """Name of the body that is set."""
        ...


class RawKey(Protocol):
    """A session key."""

    project: str
    session: str


class RawSet(Protocol):
    """An append set whose events are still serialized."""

    session: RawKey
    atomic: bool
    events: list[bytes]
    traceparent: str


class RawAppend(Protocol):
    """A request to append, of either RPC; `number` is there on a stream only."""

    number: int
    sets: list[RawSet]


class RawNotice(Protocol):
    """A notice whose event items are serialized already."""

    log_id: str
    first_sequence: int
    last_sequence: int
    previous_tag: str
    events: list[bytes]
    traceparent: str

    def SerializeToString(self) -> bytes:
        """The wire form."""
        ...


# Alone, so that an event is bytes wherever it is a field of something else.
_EVENT = shadows([event_pb2.Event.DESCRIPTOR])
_SHADOWS = shadows(
    [
        session_pb2.SessionKey.DESCRIPTOR,
        history_pb2.AppendSet.DESCRIPTOR,
        history_service_pb2.AppendEventsRequest.DESCRIPTOR,
        history_service_pb2.AppendStreamRequest.DESCRIPTOR,
        bus_pb2.Notice.DESCRIPTOR,
    ]
)
_event = _EVENT["Event"].FromString
_append = _SHADOWS["AppendEventsRequest"].FromString
_append_stream = _SHADOWS["AppendStreamRequest"].FromString
_notice = _SHADOWS["Notice"]


def parse_event(data: bytes) -> RawEvent:
    """The header of an event, its body left as bytes. Raises `DecodeError`."""
    return cast("RawEvent", _event(data))


def body_bytes(event: RawEvent, case: str) -> bytes:
    """The body that is set, as it was received."""
    return cast("bytes", getattr(event, case))


def parse_append(data: bytes) -> RawAppend:
    """A request of AppendEvents, its events left as bytes. Raises `DecodeError`."""
    return cast("RawAppend", _append(data))


def parse_append_stream(data: bytes) -> RawAppend:
    """A request of AppendStream, its events left as bytes. Raises `DecodeError`."""
    return cast("RawAppend", _append_stream(data))


def notice(log_id: str, first: int, last: int, *, previous_tag: str, items: Iterable[bytes], traceparent: str) -> bytes:
    """A serialized `hearth.relay.v1.Notice`; `items` are serialized `EventItem`s."""
    made: RawNotice = _notice(
        log_id=log_id,
        first_sequence=first,
        last_sequence=last,
        previous_tag=previous_tag,
        events=items,
        traceparent=traceparent,
    )
    return made.SerializeToString()


def varint(value: int) -> bytes:
    """A number >= 0 in base 128, lowest digits first."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def tag(event_id: str) -> str:
    """First 8 bytes of a uuid (36 characters) as 16 hexadecimal digits: what a cursor carries."""
    return event_id[:8] + event_id[9:13] + event_id[14:18]


class ItemWriter:
    """Builds `EventItem`s of one log by joining bytes."""

    def __init__(self, log_id: str) -> None:
        encoded = log_id.encode()
        # EventItem.cursor holds log_id = 1, sequence = 2, tag = 3.
        self._log_id = b"\x0a" + varint(len(encoded)) + encoded + b"\x10"

    def item(self, event: bytes, sequence: int, event_id: str) -> bytes:
        """One serialized `EventItem`: `event` as it was received, and its place."""
        place = b"%b%b\x1a\x10%b" % (self._log_id, varint(sequence), tag(event_id).encode())
        return b"\x0a%b%b\x12%b%b" % (varint(len(event)), event, varint(len(place)), place)


def join_items(items: Iterable[bytes], rest: bytes = b"", *, field: int = 1) -> bytes:
    """A reply whose `field` (below 16) repeats serialized `items`, followed by its other fields, serialized."""
    head = bytes((field << 3 | 2,))
    parts: list[bytes] = []
    for item in items:
        parts += (head, varint(len(item)), item)
    parts.append(rest)
    return b"".join(parts)
