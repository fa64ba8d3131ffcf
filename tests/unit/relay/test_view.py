"""What a late reader gets of kept frames: of unfinished entities only, and before the events that cover them."""

from __future__ import annotations

import pytest

from services.relay.merge import frame_of
from services.relay.order import EventIn, FrameIn, Piece, weave
from services.relay.reader import Late
from services.relay.view import Snapshot, View, condense
from tests.unit.relay.pieces import RUN, event, frame, items_of, started


def tool_done(sequence: int, entity: str, *, through: int, epoch: int = 1) -> EventIn:
    return event(sequence, "tool.completed", through=through, epoch=epoch)._replace(completes=entity)


def view_of(*events: EventIn) -> View:
    view = View(RUN, 1)
    for found in events:
        view.fold(found)
    return view


def texts(pieces: list[FrameIn]) -> list[tuple[int, int, str]]:
    return [(piece.first, piece.last, frame_of(piece).text_delta.text if piece.reply else "-") for piece in pieces]


def test_only_unfinished_entities_are_needed() -> None:
    view = view_of(started(1), tool_done(2, "a", through=1))
    frames = [
        frame(0, "x", entity="a"),
        frame(1, "y", entity="a"),
        frame(2, "1", entity="b"),
        frame(3, "2", entity="b"),
    ]
    assert texts(condense(frames, view, 2)) == [(0, 1, "-"), (2, 3, "12")]


def test_what_completes_after_the_reader_s_events_is_needed() -> None:
    view = view_of(started(1), tool_done(5, "a", through=1))
    assert texts(condense([frame(0, "x", entity="a"), frame(1, "y", entity="a")], view, 4)) == [(0, 1, "xy")]


def test_text_is_not_joined_over_an_event() -> None:
    view = view_of(started(1), tool_done(2, "a", through=1), tool_done(3, "b", through=2), tool_done(9, "c", through=3))
    frames = [frame(index, str(index)) for index in range(6)]
    assert texts(condense(frames, view, 3)) == [(0, 1, "01"), (2, 2, "2"), (3, 5, "345")]


def test_marks_of_another_epoch_do_not_part_text() -> None:
    view = view_of(started(1), tool_done(2, "a", through=1, epoch=1))
    frames = [frame(index, str(index), epoch=2) for index in range(4)]
    assert texts(condense(frames, view, 2)) == [(0, 3, "0123")]


def test_nothing_kept_is_nothing() -> None:
    assert condense([], view_of(started(1)), 5) == []


def test_a_view_is_complete_with_the_start_or_the_oldest_event_kept() -> None:
    view = view_of(tool_done(7, "a", through=1))
    assert not view.complete
    view.oldest(5)
    assert (view.complete, view.started) == (True, 5)
    view = view_of(started(3))
    view.oldest(5)
    assert view.started == 3


def test_events_of_other_executions_change_nothing() -> None:
    view = view_of(event(2, "tool.completed", run="other", through=4)._replace(completes="a"))
    assert not view.completed("a", 9)
    assert view.marks(1, 9) == []


@pytest.fixture
def parallel_tools() -> tuple[list[EventIn], Late]:
    """Two tools began, one ended; then a message is being written."""
    events = [started(4), tool_done(5, "t1", through=2)]
    frames = [
        frame(0, "t1", entity="t1"),
        frame(1, "t2", entity="t2"),
        frame(2, "t1", entity="t1"),
        frame(3, "a"),
        frame(4, "b"),
    ]
    snapshot = Snapshot(RUN, 1, 4, condense(frames, view_of(*events), 5))
    return events, Late(snapshot)


def test_frames_come_before_the_events_that_cover_them(parallel_tools: tuple[list[EventIn], Late]) -> None:
    events, late = parallel_tools
    assert late.order is not None
    pieces: list[Piece] = []
    for found in events:
        pieces += [*late.before(found), found]
    out = weave(late.order, [*pieces, *late.rest()], after=3).out
    seen = [
        item.event.event.type
        if item.HasField("event")
        else f"{item.frame.frame.entity_id}{item.frame.frame.frame_index}"
        for item in items_of(out)
    ]
    assert seen == ["execution.started", "t21", "tool.completed", "m3"]


def test_a_reader_that_has_the_events_gets_the_frames_alone(parallel_tools: tuple[list[EventIn], Late]) -> None:
    _, late = parallel_tools
    assert late.order is not None
    out = weave(late.order, late.rest(), after=5).out
    assert [item.frame.frame.entity_id for item in items_of(out)] == ["t2", "m"]


def test_only_events_of_the_execution_concern_late_frames(parallel_tools: tuple[list[EventIn], Late]) -> None:
    _, late = parallel_tools
    assert not late.concerns(3)
    assert late.concerns(4)
    assert late.before(event(6, "tool.completed", run="other", through=9)) == ()
    assert late.before(event(6, "tool.completed", epoch=2, through=9)) == ()
    nothing = Late(None)
    assert (nothing.concerns(9), list(nothing.before(started())), list(nothing.rest())) == (False, [], [])
