"""Bytes joined by hand are what protobuf would have written, and what passes through keeps its bytes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.relay.v1 import bus_pb2, relay_pb2, relay_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.relay import wire
from services.relay.order import Gap, Out, Reset, Role
from tests.support import events
from tests.support.relay_turns import text_frame

LOG = "11111111-1111-1111-1111-111111111111"
RUN = "22222222-2222-2222-2222-222222222222"
# An event whose fields are not in the order of their numbers, with one that nobody knows.
ODD_EVENT = b"\x1a\x04t.tx\x0a\x02id\x10\x02\xfa\x7f\x01?"


def item(event: event_pb2.Event, sequence: int = 1) -> event_pb2.EventItem:
    return event_pb2.EventItem(
        event=event, cursor=session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=events.tag(event))
    )


@given(st.integers(0, 2**53), st.text(max_size=70_000), st.integers(1, 2**53))
def test_a_frame_is_wrapped_as_protobuf_does(index: int, text: str, epoch: int) -> None:
    frame = text_frame(index, "m", text)
    expected = relay_service_pb2.SubscribeResponse(
        items=[relay_pb2.Item(frame=relay_pb2.FrameItem(execution_id=RUN, epoch=epoch, frame=frame))]
    )
    reply = wire.FrameWriter(RUN, epoch).reply(frame.SerializeToString())
    assert reply == expected.SerializeToString()
    live = bus_pb2.LiveFrames(
        project="p",
        session="s",
        execution_id=RUN,
        epoch=epoch,
        frames=[bus_pb2.LiveFrame(index=index, reply=reply), bus_pb2.LiveFrame(index=index + 1, reply=b"")],
    )
    parsed = bus_pb2.LiveFrames.FromString(
        wire.live_head("p", "s", RUN, epoch) + wire.live_frame(index, reply) + wire.live_frame(index + 1, b"")
    )
    assert parsed == live


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1_000_000, 3_000_000])
def test_an_event_of_any_size_is_wrapped_as_protobuf_does(size: int) -> None:
    found = item(events.custom(size))
    expected = relay_service_pb2.SubscribeResponse(items=[relay_pb2.Item(event=found)])
    assert wire.event_reply(found.SerializeToString()) == expected.SerializeToString()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**63])
def test_numbers_are_written_as_protobuf_does(value: int) -> None:
    assert b"\x08" + wire.varint(value) == (bus_pb2.LiveFrame(index=value).SerializeToString() or b"\x08\x00")


def test_joined_replies_are_one_response() -> None:
    run = events.Run()
    out: list[Out] = [
        wire.event_of(item(run.started()).SerializeToString())[0],
        Gap(run.execution_id, 1, 2, 5),
        Reset(run.execution_id, 2),
    ]
    found = relay_service_pb2.SubscribeResponse.FromString(wire.join(out)).items
    assert [one.WhichOneof("item") for one in found] == ["event", "gap", "reset"]
    assert (getattr(found[1].gap, "from"), found[1].gap.to, found[2].reset.epoch) == (2, 5, 2)


def test_an_event_passes_through_byte_for_byte() -> None:
    cursor = session_pb2.Cursor(log_id=LOG, sequence=3, tag="0" * 16).SerializeToString()
    odd = b"\x0a%c%b\x12%c%b" % (len(ODD_EVENT), ODD_EVENT, len(cursor), cursor)
    notice = bus_pb2.Notice(log_id=LOG, first_sequence=3, last_sequence=3).SerializeToString()
    for raw in (
        wire.parse_notice(notice + b"\x2a" + wire.varint(len(odd)) + odd).events[0],
        wire.parse_page(b"\x0a" + wire.varint(len(odd)) + odd).events[0],
        wire.parse_snapshot(b"\x2a" + wire.varint(len(odd)) + odd).events[0],
    ):
        assert raw == odd
        event, place = wire.event_of(raw)
        assert place == (LOG, 3, "0" * 16)
        assert event.reply.endswith(odd)


def test_a_page_keeps_its_bounds() -> None:
    page = history_service_pb2.ReadEventsResponse(
        events=[item(events.custom(), 7)], bounds=history_pb2.Bounds(log_id=LOG, oldest=2, head=9), more=True
    )
    raw = wire.parse_page(page.SerializeToString())
    assert (raw.bounds.log_id, raw.bounds.oldest, raw.bounds.head, raw.more) == (LOG, 2, 9, True)
    assert wire.place_of(raw.events[0]) == wire.Place.of(page.events[0].cursor)


def test_what_an_event_means_to_frames() -> None:
    run = events.Run(epoch=3)
    message = run.message(frames_through=0)
    cases = [
        (run.started(), Role.STARTED, "", -1),
        (message, Role.RUNNER, message.entity_id, 0),
        (run.completed(), Role.ENDING, "", -1),
        (run.lost(), Role.ENDING, "", -1),
        (events.user_message(), Role.SESSION, None, -1),
        (events.input_queued(), Role.SESSION, "", -1),
    ]
    for event, role, completes, through in cases:
        found = wire.event_of(item(event).SerializeToString())[0]
        assert (found.role, found.through) == (role, through)
        assert found.completes == (event.entity_id if completes is None else completes)


def test_garbage_is_refused() -> None:
    with pytest.raises(DecodeError):
        wire.parse_notice(b"\xff\xff\xff")
