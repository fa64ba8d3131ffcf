"""Notices: what is joined, what is carried, what is dropped."""

from __future__ import annotations

from hearth.relay.v1 import bus_pb2
from services.history.ledger import Record
from services.history.notices import MAX_INLINE_BYTES, NoticeQueue, channel
from services.history.validate import check_event
from tests.support import events

KEY = ("p", "s")
LOG = events.new_id()
OTHER_LOG = events.new_id()


def record(size: int = 10) -> Record:
    found = check_event(events.custom(size).SerializeToString())
    assert isinstance(found, Record)
    return found


def taken(queue: NoticeQueue) -> list[tuple[bytes, bus_pb2.Notice]]:
    batch = queue.take()
    assert all(payload[:1] == b"E" for _, payload, _ in batch)
    return [(where, bus_pb2.Notice.FromString(payload[1:])) for where, payload, _ in batch]


def test_the_channel_names_the_session() -> None:
    assert channel(("p", "s")) == b"hearth:live:p/s"


def test_neighbours_of_one_log_become_one_notice() -> None:
    queue = NoticeQueue()
    first, second, third = record(), record(), record()
    queue.add(KEY, LOG, "", [(1, first), (2, second)], "00-t-1")
    queue.add(KEY, LOG, second.event_id, [(3, third)], "00-t-2")
    ((where, notice),) = taken(queue)
    assert where == b"hearth:live:p/s"
    assert (notice.log_id, notice.first_sequence, notice.last_sequence) == (LOG, 1, 3)
    assert (notice.previous_tag, notice.traceparent) == ("", "00-t-1")
    assert [item.cursor.sequence for item in notice.events] == [1, 2, 3]
    assert notice.events[2].event.event_id == third.event_id
    assert taken(queue) == []


def test_the_tag_is_that_of_the_event_before() -> None:
    queue = NoticeQueue()
    before = events.new_id()
    queue.add(KEY, LOG, before, [(8, record())], "")
    ((_, notice),) = taken(queue)
    assert notice.previous_tag == before.replace("-", "")[:16]


def test_holes_and_other_logs_are_not_joined() -> None:
    queue = NoticeQueue()
    queue.add(KEY, LOG, "", [(1, record())], "")
    queue.add(KEY, LOG, events.new_id(), [(3, record())], "")
    queue.add(KEY, OTHER_LOG, events.new_id(), [(4, record())], "")
    assert [notice.first_sequence for _, notice in taken(queue)] == [1, 3, 4]


def test_large_events_are_told_by_their_number_only() -> None:
    queue = NoticeQueue()
    queue.add(KEY, LOG, "", [(1, record()), (2, record(MAX_INLINE_BYTES)), (3, record(MAX_INLINE_BYTES))], "")
    small, large = (notice for _, notice in taken(queue))
    assert len(small.events) == 1
    assert (large.first_sequence, large.last_sequence, len(large.events)) == (2, 3, 0)


def test_a_notice_carries_at_most_its_bound() -> None:
    queue = NoticeQueue()
    queue.add(KEY, LOG, "", [(place, record(MAX_INLINE_BYTES // 3)) for place in range(1, 8)], "")
    found = [notice for _, notice in taken(queue)]
    assert [len(notice.events) for notice in found] == [2, 2, 2, 1]
    assert all(sum(item.ByteSize() for item in notice.events) <= MAX_INLINE_BYTES for notice in found)


def test_the_oldest_go_when_too_many_wait() -> None:
    queue = NoticeQueue(max_notices=3)
    for number in range(5):
        queue.add(("p", f"s{number}"), LOG, "", [(1, record())], "")
    assert len(queue) == 3
    assert [where for where, _ in taken(queue)] == [b"hearth:live:p/s2", b"hearth:live:p/s3", b"hearth:live:p/s4"]
    assert queue.dropped == 2


def test_the_bytes_that_wait_are_bounded() -> None:
    queue = NoticeQueue(max_bytes=100_000)
    for number in range(50):
        queue.add(("p", f"s{number}"), LOG, "", [(1, record(10_000))], "")
    assert len(queue) < 10
    queue.clear()
    assert len(queue) == 0
    assert taken(queue) == []
