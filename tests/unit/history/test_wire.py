"""What history reads from and writes to the wire without parsing is the wire form of the real messages."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from hearth.history.v1 import history_service_pb2
from hearth.relay.v1 import bus_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.history import wire
from tests.support import events

LOG_ID = "5d0f3a52-9a0a-4f77-8a38-0d3f1c6c2a11"

_UUIDS = st.uuids().map(str)
_UINT64 = st.integers(0, 2**64 - 1)


@st.composite
def _events(draw: st.DrawFn) -> event_pb2.Event:
    event = event_pb2.Event(
        event_id=draw(_UUIDS),
        scope=draw(st.sampled_from(event_pb2.EventScope.values())),
        type=draw(st.text(max_size=40)),
        entity_id=draw(st.text(max_size=300)),
        execution_id=draw(st.one_of(st.just(""), _UUIDS)),
        epoch=draw(_UINT64),
    )
    if draw(st.booleans()):
        event.frames_through = draw(_UINT64)
    if draw(st.booleans()):
        event.occurred_at.seconds = draw(st.integers(-(2**63), 2**63 - 1))
    body = draw(st.sampled_from(["custom", "message_completed", "execution_failed", "tool_completed", None]))
    if body == "custom":
        event.custom.type, event.custom.data = draw(st.text(max_size=20)), draw(st.binary(max_size=3000))
    elif body == "message_completed":
        event.message_completed.content.add().text.text = draw(st.text(max_size=300))
    elif body == "execution_failed":
        event.execution_failed.summary.manifest.runner_events = draw(_UINT64)
    elif body == "tool_completed":
        event.tool_completed.output = draw(st.text(max_size=300))
    return event


@given(_events())
def test_the_header_of_an_event_is_read_and_its_body_left_alone(event: event_pb2.Event) -> None:
    raw = wire.parse_event(event.SerializeToString())
    for field in ("event_id", "scope", "type", "entity_id", "execution_id", "epoch"):
        assert getattr(raw, field) == getattr(event, field)
    case = event.WhichOneof("body")
    assert raw.WhichOneof("body") == case
    if case is not None:
        assert wire.body_bytes(raw, case) == getattr(event, case).SerializeToString()


@given(st.lists(st.tuples(_UUIDS, st.booleans(), st.lists(_events(), max_size=3)), max_size=3), _UINT64)
def test_the_events_of_a_request_come_out_as_they_went_in(
    sets: list[tuple[str, bool, list[event_pb2.Event]]], number: int
) -> None:
    made = [
        events.append_set(session_pb2.SessionKey(project="p", session=session), *found, atomic=atomic)
        for session, atomic, found in sets
    ]
    stream = history_service_pb2.AppendStreamRequest(number=number, sets=made)
    single = history_service_pb2.AppendEventsRequest(sets=made)
    raw = wire.parse_append_stream(stream.SerializeToString())
    assert raw.number == number
    for found in (raw, wire.parse_append(single.SerializeToString())):
        assert [
            (it.session.project, it.session.session, it.atomic, [bytes(event) for event in it.events])
            for it in found.sets
        ] == [("p", it[0], it[1], [event.SerializeToString() for event in it[2]]) for it in sets]


def test_a_request_that_is_no_message_does_not_parse() -> None:
    with pytest.raises(DecodeError):
        wire.parse_append(b"\x0a\xff")


def test_an_event_inside_of_a_request_is_not_looked_at() -> None:
    broken = history_service_pb2.AppendEventsRequest(sets=[events.append_set(events.key("s"))]).SerializeToString()
    inner = b"\x1a\x02\xff\xff"
    data = b"\x0a" + bytes((len(broken) - 2 + len(inner),)) + broken[2:] + inner
    assert wire.parse_append(data).sets[0].events == [b"\xff\xff"]


@given(_events(), st.integers(1, 2**63 - 1))
def test_an_item_is_the_event_and_its_cursor(event: event_pb2.Event, sequence: int) -> None:
    data = wire.ItemWriter(LOG_ID).item(event.SerializeToString(), sequence, event.event_id)
    item = event_pb2.EventItem.FromString(data)
    assert item.event == event
    assert item.cursor == session_pb2.Cursor(log_id=LOG_ID, sequence=sequence, tag=event.event_id.replace("-", "")[:16])


@given(st.lists(_events(), max_size=4))
def test_joined_items_are_a_reply(found: list[event_pb2.Event]) -> None:
    writer = wire.ItemWriter(LOG_ID)
    items = [writer.item(event.SerializeToString(), place, event.event_id) for place, event in enumerate(found, 1)]
    rest = history_service_pb2.ReadEventsResponse(more=True)
    reply = history_service_pb2.ReadEventsResponse.FromString(wire.join_items(items, rest.SerializeToString()))
    assert [item.event for item in reply.events] == found
    assert reply.more
    snapshot = history_service_pb2.GetSnapshotResponse.FromString(wire.join_items(items, field=5))
    assert snapshot.events == reply.events


@given(st.lists(_events(), max_size=3))
def test_a_notice_carries_its_items(found: list[event_pb2.Event]) -> None:
    writer = wire.ItemWriter(LOG_ID)
    items = [writer.item(event.SerializeToString(), place, event.event_id) for place, event in enumerate(found, 8)]
    data = wire.notice(LOG_ID, 8, 10, previous_tag="0" * 16, items=items, traceparent="00-a-b-01")
    notice = bus_pb2.Notice.FromString(data)
    assert [item.event for item in notice.events] == found
    assert (notice.first_sequence, notice.last_sequence, notice.previous_tag) == (8, 10, "0" * 16)


@given(_UINT64)
def test_numbers_are_written_as_protobuf_writes_them(value: int) -> None:
    assert b"\x10" + wire.varint(value) == session_pb2.Cursor(sequence=value).SerializeToString() or value == 0
    assert wire.varint(0) == b"\0"
