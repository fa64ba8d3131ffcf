"""A benchmark sees it when what came back is wrong: each kind of wrong is fed to its checks."""

from __future__ import annotations

import itertools
import uuid

import pytest

from benchmarks import live, reading, replay, steady, writing
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2

SESSION = "s"
FRAMES = 4


def test_a_padded_event_has_the_size() -> None:
    event = writing.message("m1", writing.padding(300))
    event.event_id = event.execution_id = str(uuid.uuid4())
    event.scope, event.type, event.entity_id, event.epoch = event_pb2.EVENT_SCOPE_RUNNER, "message.completed", "m1", 1
    event.occurred_at.GetCurrentTime()
    assert 296 <= event.ByteSize() <= 304


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (["a", "b", "c"], None),
        (["a", "b"], "2 events stored, 3 acknowledged"),
        (["a", "b", "c", "d"], "4 events stored, 3 acknowledged"),
        (["a", "c", "b"], "the first at 2"),
    ],
)
def test_a_log_is_compared_with_what_was_acknowledged(found: list[str], trouble: str | None) -> None:
    problems = reading.compare(SESSION, found, {1: "a", 2: "b", 3: "c"})
    assert bool(problems) == (trouble is not None)
    assert trouble is None or any(trouble in problem for problem in problems)


def test_contents_in_another_order_or_shape_differ() -> None:
    digests = set()
    for texts in itertools.chain(itertools.permutations(["a", "b", "c"]), [("ab", "c"), ("a", "bc")]):
        digest = reading.ContentDigest()
        for text in texts:
            digest.add(writing.message("m1", text))
        digests.add(digest.text)
    assert len(digests) == 8


def frame(index: int, text: str | None = None, *, through: int | None = None) -> relay_pb2.Item:
    made = frame_pb2.Frame(frame_index=index, entity_id="m1")
    made.text_delta.text = live.piece(SESSION, index) if text is None else text
    made.occurred_at.seconds = 1000
    if through is not None:
        made.merged_through = through
        made.text_delta.text = "".join(live.piece(SESSION, place) for place in range(index, through + 1))
    return relay_pb2.Item(frame=relay_pb2.FrameItem(execution_id="e", epoch=1, frame=made))


def event(sequence: int, **body: object) -> relay_pb2.Item:
    made = event_pb2.Event(**body)  # type: ignore[arg-type]
    return relay_pb2.Item(event=event_pb2.EventItem(event=made, cursor=session_pb2.Cursor(sequence=sequence)))


def gap(first: int, last: int) -> relay_pb2.Item:
    item = relay_pb2.Item(gap=relay_pb2.Gap(execution_id="e", epoch=1, to=last))
    setattr(item.gap, "from", first)
    return item


READY = relay_pb2.Item(ready=relay_pb2.Ready())
STARTED = event(1, execution_started=event_pb2.ExecutionStarted())
WHOLE = "".join(live.piece(SESSION, index) for index in range(FRAMES))
MESSAGE = event(2, message_completed=writing.message("m1", WHOLE).message_completed)
ENDED = event(3, execution_completed=event_pb2.ExecutionCompleted())
PUBLISHED = live.Published({SESSION: live.digest(WHOLE)}, 1000.0, 0.0)


def problems_of(*items: relay_pb2.Item) -> list[str]:
    """What the checks say of a reader that got these items, one in each response."""
    saw = live.Saw()
    reader = live.Reader(SESSION, saw)
    for item in items:
        reader.take(relay_service_pb2.SubscribeResponse(items=[item]), 1000.5)
    return live.check(PUBLISHED, [saw], [SESSION], FRAMES)


def test_all_is_well() -> None:
    frames = [frame(index) for index in range(FRAMES)]
    assert problems_of(READY, STARTED, *frames, MESSAGE, ENDED) == []


def test_joined_frames_count_as_what_they_stand_for() -> None:
    assert problems_of(READY, STARTED, frame(0), frame(1, through=3), MESSAGE, ENDED) == []


def test_a_told_gap_is_no_wrong_result() -> None:
    assert problems_of(READY, STARTED, frame(0), gap(1, 2), frame(3), MESSAGE, ENDED) == []


@pytest.mark.parametrize(
    ("items", "trouble"),
    [
        ([frame(0), frame(2), frame(3)], "frame 2 where 1 is next"),
        ([frame(0), frame(1), frame(1), frame(2), frame(3)], "frame 1 where 2 is next"),
        ([frame(0), frame(1), frame(2, "x"), frame(3)], "do not add up"),
        ([frame(0), frame(1), frame(2)], "do not add up"),
        ([frame(0), gap(2, 2), frame(3)], "a gap of 2 to 2 where 1 is next"),
        ([frame(0), gap(1, 2)], "1 frames came and 2 were told as lost, of 4"),
    ],
)
def test_wrong_frames_are_seen(items: list[relay_pb2.Item], trouble: str) -> None:
    assert any(trouble in problem for problem in problems_of(READY, STARTED, *items, MESSAGE, ENDED))


def test_wrong_events_are_seen() -> None:
    frames = [frame(index) for index in range(FRAMES)]
    other = event(2, message_completed=writing.message("m1", "other").message_completed)
    assert any("do not add up" in found for found in problems_of(STARTED, *frames, other, ENDED))
    assert any("differ" in found for found in problems_of(STARTED, gap(0, FRAMES - 1), other, ENDED))
    assert any("event 3 where 2 is next" in found for found in problems_of(STARTED, *frames, ENDED))
    assert any("0 readers have the message" in found for found in problems_of(STARTED, *frames, ENDED))
    closing = relay_pb2.Item(closing=relay_pb2.Closing())
    assert any("closing came" in found for found in problems_of(STARTED, *frames, closing, MESSAGE, ENDED))


def test_latency_is_from_making_to_taking() -> None:
    saw = live.Saw()
    live.Reader(SESSION, saw).take(relay_service_pb2.SubscribeResponse(items=[frame(0)]), 1000.5)
    assert list(saw.made) == [1000.0]
    assert list(saw.took) == [0.5]


def test_pieces_have_one_size_and_differ() -> None:
    pieces = [live.piece("run1-199", index) for index in (0, 1, 99_999)]
    assert {len(piece) for piece in pieces} == {live.TEXT_BYTES}
    assert len(set(pieces)) == 3


def test_seats_are_shared_out() -> None:
    assert steady.shares(["a", "b", "c"], 2) == [["a", "c"], ["b"]]
    assert steady.shares(["a"], 4) == [["a"]]
    assert steady.names("x", 2) == ("x-0", "x-1")


def test_sizes_of_the_store() -> None:
    assert replay.sizes(quick=False, large=True).stored == 10_000_000
    assert replay.sizes(quick=False, large=False) == replay.Sizes(100_000, 10_000, 1_000_000)
    assert replay.sizes(quick=True, large=False).stored < 1_000_000
