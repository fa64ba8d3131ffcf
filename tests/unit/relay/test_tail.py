"""The tail keeps what readers need, within bounds; frames wait for the start of their execution."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.relay.tail import Tail, Waiting
from tests.unit.relay.pieces import RUN, frame


def tail_of(count: int, *, max_bytes: int = 10**9, max_pieces: int = 10**9, text: str = "x") -> Tail:
    tail = Tail(max_bytes=max_bytes, max_pieces=max_pieces)
    for index in range(count):
        tail.append(frame(index, text))
    return tail


def indexes(tail: Tail) -> list[int]:
    return [piece.first for piece in tail.pieces(tail.first, tail.end)]  # type: ignore[union-attr]


def test_what_every_reader_has_goes() -> None:
    tail = tail_of(5)
    tail.trim(3)
    assert (tail.first, tail.end, indexes(tail)) == (3, 5, [3, 4])
    tail.trim(1)
    assert tail.first == 3


def test_the_oldest_go_over_the_bounds() -> None:
    tail = tail_of(10, max_pieces=4)
    tail.trim(0)
    assert indexes(tail) == [6, 7, 8, 9]
    tail = tail_of(10, max_bytes=5_000, text="x" * 1_000)
    tail.trim(0)
    assert indexes(tail) == [6, 7, 8, 9]
    assert tail.size(tail.first, tail.end) <= 5_000


def test_what_no_reader_could_take_yet_stays_over_the_bounds() -> None:
    tail = tail_of(10, max_pieces=4)
    tail.trim(0, fresh=3)
    assert indexes(tail) == [3, 4, 5, 6, 7, 8, 9]
    tail.trim(0, fresh=10)
    assert indexes(tail) == [6, 7, 8, 9]
    tail.trim(8, fresh=6)
    assert indexes(tail) == [8, 9]


def test_a_break_leaves_a_hole_for_who_stood_at_the_end() -> None:
    tail = tail_of(3)
    tail.break_off()
    assert tail.first == tail.end == 4
    tail.append(frame(9))
    assert indexes(tail) == [9]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(0, 2_000))
def test_what_fits_is_as_much_as_fits_and_at_least_one(sizes: list[int], budget: int) -> None:
    tail = Tail(max_bytes=10**9, max_pieces=10**9)
    for index, size in enumerate(sizes):
        tail.append(frame(index, "x" * size))
    stop = tail.fitting(0, tail.end, budget)
    assert stop == 1 or tail.size(0, stop) <= budget
    assert stop == tail.end or tail.size(0, stop + 1) > budget
    assert tail.fitting(tail.end, tail.end, budget) == tail.end


def waiting(**bounds: int) -> Waiting:
    return Waiting(**{"max_bytes": 10**6, "max_frames": 100, **bounds})


def test_frames_wait_for_their_execution() -> None:
    early = waiting()
    frames = [frame(0), frame(1)]
    for found in frames:
        early.add(found)
    assert early.release(RUN, 1) == frames
    assert early.release(RUN, 1) == []


def test_frames_that_are_here_already_are_not_kept_twice() -> None:
    early = waiting()
    for index in (0, 1, 1, 0, 2):
        early.add(frame(index))
    assert [found.first for found in early.release(RUN, 1)] == [0, 1, 2]


def test_only_the_newest_epoch_waits() -> None:
    early = waiting()
    for found in (frame(0, epoch=2), frame(0, epoch=3, run="b"), frame(1, epoch=2)):
        early.add(found)
    assert early.release(RUN, 2) == []
    assert [found.execution for found in early.release("b", 3)] == ["b"]


def test_what_an_execution_leaves_behind_does_not_wait_on() -> None:
    early = waiting()
    early.add(frame(0, epoch=2))
    assert early.release("b", 3) == []
    assert early.release(RUN, 2) == []
    early.add(frame(0, epoch=4))
    assert early.release("b", 4) == []
    assert early.release(RUN, 4) == []


def test_over_the_bounds_the_oldest_go() -> None:
    early = waiting(max_frames=2)
    for index in range(4):
        early.add(frame(index))
    assert [found.first for found in early.release(RUN, 1)] == [2, 3]
    early = waiting(max_bytes=2_500)
    for index in range(4):
        early.add(frame(index, "x" * 1_000))
    assert [found.first for found in early.release(RUN, 1)] == [2, 3]
