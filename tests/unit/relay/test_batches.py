"""Batches are checked as a whole, every wrong field is named, and a frame over the bound leaves those before it."""

from __future__ import annotations

import tracemalloc

import pytest

from hearth.relay.v1 import bus_pb2, relay_pb2
from hearth.types.v1 import frame_pb2, session_pb2
from services.relay.batches import FRAME_MAX_BYTES, Prepared, check, check_frames, prepare
from tests.support.relay_turns import text_frame

RUN = "22222222-2222-2222-2222-22222222222A"


def batch(*frames: frame_pb2.Frame, **fields: object) -> relay_pb2.FrameBatch:
    made: dict[str, object] = {
        "session": session_pb2.SessionKey(project="p", session="s"),
        "execution_id": RUN,
        "epoch": 1,
        "frames": frames,
        **fields,
    }
    return relay_pb2.FrameBatch(**made)  # type: ignore[arg-type]


def good(*frames: frame_pb2.Frame, **fields: object) -> Prepared:
    made = batch(*frames, **fields)
    assert check(made, "batches[0]") == check_frames(made, "batches[0]", 0, len(frames)) == []
    return prepare(made, "batches[0]", 0, len(frames))


def wrong_fields(*frames: frame_pb2.Frame, **fields: object) -> list[str]:
    made = batch(*frames, **fields)
    found = check(made, "batches[0]") + check_frames(made, "batches[0]", 0, len(frames))
    return [problem.field.removeprefix("batches[0].") for problem in found]


def test_a_batch_becomes_what_is_published() -> None:
    found = good(text_frame(0, "m", "a"), text_frame(7, "m", "b"), ended=True)
    assert (found.key, found.execution_id, found.epoch, found.ended) == (("p", "s"), RUN.lower(), 1, True)
    live = bus_pb2.LiveFrames.FromString(found.head + b"".join(entry.live for entry in found.entries))
    assert [frame.index for frame in live.frames] == [entry.frame_index for entry in found.entries] == [0, 7]


def test_equal_frames_have_equal_content_and_others_not() -> None:
    first, same, other = (good(text_frame(0, "m", text)).entries[0].content for text in ("a", "a", "b"))
    assert first == same != other


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"session": session_pb2.SessionKey()}, ["session.project", "session.session"]),
        ({"session": session_pb2.SessionKey(project="p", session="s" * 129)}, ["session.session"]),
        ({"session": session_pb2.SessionKey(project="p/q", session="s")}, ["session.project"]),
        ({"execution_id": ""}, ["execution_id"]),
        ({"execution_id": "22222222222222222222222222222222"}, ["execution_id"]),
        ({"epoch": 0}, ["epoch"]),
        ({"epoch": 2**63}, ["epoch"]),
        ({"execution_id": "x", "epoch": 0}, ["execution_id", "epoch"]),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], expected: list[str]) -> None:
    assert wrong_fields(**fields) == expected


def test_nothing_is_kept_of_wrong_heads() -> None:
    size = 100_000
    tracemalloc.start()
    try:
        wrong_fields(execution_id="x" * size)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(50):
            assert wrong_fields(execution_id=str(number) + "x" * size) == ["execution_id"]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < size


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([text_frame(0, "", "a")], ["frames[0].entity_id"]),
        ([text_frame(0, "m" * 256, "a")], ["frames[0].entity_id"]),
        ([text_frame(1, "m", "a"), text_frame(1, "m", "b")], ["frames[1].frame_index"]),
        ([text_frame(2**53, "m", "a")], ["frames[0].frame_index"]),
        ([frame_pb2.Frame(entity_id="m", merged_through=3)], ["frames[0].merged_through"]),
    ],
)
def test_wrong_frames_are_named(frames: list[frame_pb2.Frame], expected: list[str]) -> None:
    assert wrong_fields(*frames) == expected


def test_of_many_wrong_frames_the_first_are_named() -> None:
    assert len(wrong_fields(*(text_frame(index, "", "a") for index in range(1_000)))) == 20


def test_a_frame_over_the_bound_is_left_out_with_all_behind_it() -> None:
    frames = [text_frame(0, "m", "a"), text_frame(1, "m", "x" * FRAME_MAX_BYTES), text_frame(2, "m", "b")]
    found = good(*frames, ended=True)
    assert [entry.frame_index for entry in found.entries] == [0]
    assert found.too_large is not None
    assert found.too_large.field == "batches[0].frames[1]"
    assert found.ended


def test_a_long_batch_is_prepared_in_parts() -> None:
    made = batch(*(text_frame(index, "m", "a") for index in range(5)), ended=True)
    parts = [prepare(made, "batches[0]", start, start + 2) for start in (0, 2, 4)]
    assert [[entry.frame_index for entry in part.entries] for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.ended for part in parts] == [False, False, True]
    made.frames[2].frame_index = 1
    assert check_frames(made, "batches[0]", 0, 2) == []
    assert [problem.field for problem in check_frames(made, "batches[0]", 2, 4)] == ["batches[0].frames[2].frame_index"]


def test_a_frame_at_the_bound_is_taken() -> None:
    overhead = text_frame(1, "m", "x" * FRAME_MAX_BYTES).ByteSize() - FRAME_MAX_BYTES
    found = good(text_frame(1, "m", "x" * (FRAME_MAX_BYTES - overhead)))
    assert found.too_large is None
    assert len(found.entries) == 1


def test_a_frame_of_a_kind_that_nobody_knows_is_taken() -> None:
    assert len(good(frame_pb2.Frame(frame_index=0, entity_id="m")).entries) == 1
