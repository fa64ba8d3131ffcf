"""Joining neighbouring text frames: the same text in fewer frames, and nothing joined that must stay apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.types.v1 import frame_pb2
from services.relay.merge import frame_of, merge
from services.relay.order import FrameIn, Gap, Out
from tests.unit.relay.pieces import RUN, event, frame, items_of, withheld


def frames_of(out: list[Out]) -> list[frame_pb2.Frame]:
    return [frame_of(piece) for piece in out if isinstance(piece, FrameIn) and piece.reply]


def indexes(out: list[Out]) -> list[int]:
    return [index for piece in out if isinstance(piece, FrameIn) for index in range(piece.first, piece.last + 1)]


def thought(index: int, text: str) -> FrameIn:
    return frame(index, body=frame_pb2.Frame(thought_delta=frame_pb2.ThoughtDelta(text=text)))


def output(index: int, text: str, *, replace: bool = False) -> FrameIn:
    return frame(index, body=frame_pb2.Frame(tool_output=frame_pb2.ToolOutput(text=text, replace=replace)))


def test_a_run_becomes_one_frame() -> None:
    (joined,) = merge([frame(3, "a"), frame(4, "b"), frame(5, "c")])
    assert isinstance(joined, FrameIn)
    assert (joined.first, joined.last) == (3, 5)
    (item,) = items_of([joined])
    assert (item.frame.execution_id, item.frame.epoch) == (RUN, 1)
    assert item.frame.frame.text_delta.text == "abc"
    assert (item.frame.frame.frame_index, item.frame.frame.merged_through) == (3, 5)


def test_one_frame_alone_stays_as_it_is() -> None:
    alone = frame(3, "a")
    assert merge([alone]) == [alone]
    assert not frame_of(alone).HasField("merged_through")


def test_other_things_end_a_run() -> None:
    done = event(2, "message.completed", through=1)
    gap = Gap(RUN, 1, 4, 5)
    out = merge([frame(0, "a"), frame(1, "b"), done, frame(2, "c"), frame(3, "d"), gap, frame(6, "e")])
    assert [type(piece).__name__ for piece in out] == ["FrameIn", "EventIn", "FrameIn", "Gap", "FrameIn"]
    assert [found.text_delta.text for found in frames_of(out)] == ["ab", "cd", "e"]


def test_nothing_is_joined_over_a_hole_another_entity_epoch_or_kind() -> None:
    apart: list[Out] = [
        frame(0, "a"),
        frame(2, "b"),
        frame(3, "c", entity="n"),
        thought(4, "d"),
        frame(0, "e", epoch=2),
        frame(1, "f", epoch=2, run="other"),
    ]
    assert merge(apart) == apart


def test_thoughts_and_continued_output_are_joined_and_replaced_output_is_not() -> None:
    assert [found.thought_delta.text for found in frames_of(merge([thought(0, "a"), thought(1, "b")]))] == ["ab"]
    assert [found.tool_output.text for found in frames_of(merge([output(0, "a"), output(1, "b")]))] == ["ab"]
    replaced: list[Out] = [output(0, "a"), output(1, "b", replace=True)]
    assert merge(replaced) == replaced


def test_withheld_frames_do_not_end_a_run() -> None:
    out = merge([withheld(0, 1), frame(2, "a"), withheld(3, 4), frame(5, "b"), withheld(6, 6)])
    assert [(piece.first, piece.last) for piece in out if isinstance(piece, FrameIn)] == [(0, 1), (2, 5), (6, 6)]
    assert [found.text_delta.text for found in frames_of(out)] == ["ab"]


def test_a_joined_frame_stays_within_the_bound_of_a_frame() -> None:
    out = merge([frame(index, "x" * 20_000) for index in range(7)])
    assert [(piece.first, piece.last) for piece in out if isinstance(piece, FrameIn)] == [(0, 2), (3, 5), (6, 6)]
    assert all(found.ByteSize() <= 64 * 1024 for found in frames_of(out))


@given(st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from(["text", "tool", "lost", "withheld"])), max_size=30))
def test_every_entity_keeps_its_text_and_every_index_its_place(steps: list[tuple[str, str]]) -> None:
    pieces: list[Out] = []
    for index, (entity, step) in enumerate(steps):
        match step:
            case "text":
                pieces.append(frame(index, f"{index};", entity=entity))
            case "tool":
                pieces.append(output(index, "o", replace=True))
            case "withheld":
                pieces.append(withheld(index, index))
    out = merge(pieces)
    assert len(out) <= len(pieces)
    for entity in "mn":
        text = "".join(found.text_delta.text for found in frames_of(out) if found.entity_id == entity)
        assert text == "".join(found.text_delta.text for found in frames_of(pieces) if found.entity_id == entity)
    kept = [index for piece in pieces if isinstance(piece, FrameIn) for index in range(piece.first, piece.last + 1)]
    assert [
        index for piece in out if isinstance(piece, FrameIn) for index in range(piece.first, piece.last + 1)
    ] == kept
