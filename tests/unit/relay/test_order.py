"""Frames against events for one reader: what is delivered, what is told as lost, what is left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hearth.relay.v1 import bus_pb2, relay_pb2
from hearth.types.v1 import session_pb2
from services.relay.batches import prepare
from services.relay.order import EventIn, FrameIn, Gap, Lost, Order, Out, Piece, Reset, events_of, weave
from tests.checkers import check_reader
from tests.support.recording import Connection
from tests.support.relay_turns import text_frame
from tests.unit.relay.pieces import RUN, event, frame, items_of, started, withheld

AT_RUN = Order(RUN, 1, ended=False)


def woven(order: Order, *pieces: Piece, after: int = 0) -> list[Out]:
    return weave(order, pieces, after=after).out


def test_frames_before_their_event_then_the_event() -> None:
    first, second, done = frame(0), frame(1), event(2, "message.completed", through=1)
    assert woven(AT_RUN, first, second, done) == [first, second, done]


def test_what_is_missing_before_an_event_is_one_gap() -> None:
    first, third, done = frame(0), frame(2), event(2, "message.completed", through=5)
    assert woven(AT_RUN, first, third, done) == [first, Gap(RUN, 1, 1, 1), third, Gap(RUN, 1, 3, 5), done]


def test_after_an_event_no_frame_that_it_covers() -> None:
    done = event(2, "message.completed", through=3)
    assert woven(AT_RUN, done, frame(2), frame(3)) == [Gap(RUN, 1, 0, 3), done]
    later = frame(4)
    assert woven(AT_RUN, done, frame(3), later)[-1] == later


def test_after_an_ending_no_frame() -> None:
    ending = event(2, "execution.completed")
    assert woven(AT_RUN, ending, frame(0), Lost(RUN, 1, 5)) == [ending]


def test_an_execution_is_the_same_in_capital_letters() -> None:
    run = "abcdef12-2222-4222-8222-222222222222"
    begin, ending = (event(at, f"execution.{what}", run=run.upper()) for at, what in ((1, "started"), (2, "completed")))
    batch = relay_pb2.FrameBatch(
        session=session_pb2.SessionKey(project="p", session="s"), execution_id=run.upper(), epoch=1
    )
    batch.frames.append(text_frame(0, "m", "x"))
    prepared = prepare(batch, "b", 0, 1)
    live = bus_pb2.LiveFrames.FromString(prepared.head + b"".join(entry.live for entry in prepared.entries))
    first = FrameIn(live.execution_id, live.epoch, 0, 0, live.frames[0].reply)
    assert woven(Order(), begin, first, ending) == [begin, first, ending]
    # Where it ran before it was followed, its id comes from the ledger.
    assert weave(Order(run, 1, ended=False, strict=False), [ending], after=1).order.ended


def test_frames_wait_for_their_execution() -> None:
    begin = started()
    assert woven(Order(), frame(0), begin, frame(1)) == [begin, Gap(RUN, 1, 0, 0), frame(1)]


def test_a_frame_twice_is_delivered_once() -> None:
    assert woven(AT_RUN, frame(0), frame(0)) == [frame(0)]


def test_frames_of_lower_epochs_are_left_out() -> None:
    assert woven(Order(RUN, 2, ended=False), frame(0, epoch=1), frame(0, epoch=2)) == [frame(0, epoch=2)]


def test_an_event_of_a_lower_epoch_tells_no_gap_of_the_higher() -> None:
    late = event(2, "tool.completed", epoch=1, through=4)
    assert woven(Order(RUN, 2, ended=False), late) == [late]


def test_reset_only_for_a_reader_that_holds_frames() -> None:
    again = frame(0, epoch=2)
    assert woven(AT_RUN, again) == [again]
    assert woven(AT_RUN, frame(0), again) == [frame(0), Reset(RUN, 2), again]


def test_an_event_of_a_higher_epoch_resets_too() -> None:
    raised = event(2, "tool.completed", epoch=2, through=0)
    assert woven(AT_RUN, frame(0), raised) == [frame(0), Reset(RUN, 2), Gap(RUN, 2, 0, 0), raised]


def test_the_ending_of_a_takeover_leaves_what_was_shown() -> None:
    lost = event(2, "execution.lost", epoch=2)
    assert woven(AT_RUN, frame(0), lost, frame(1)) == [frame(0), lost]


def test_what_was_there_before_a_reader_came_is_no_gap() -> None:
    replaying = AT_RUN._replace(strict=False)
    done = event(2, "message.completed", through=9)
    out, order, _ = weave(replaying, [done], after=1)
    assert out == [done]
    # But from then on every frame that it does not get is told.
    live = order._replace(strict=True)
    assert woven(live, frame(10)) == [Gap(RUN, 1, 0, 9), frame(10)]
    assert woven(live, frame(5)) == []


def test_withheld_frames_are_no_gap() -> None:
    assert woven(AT_RUN, withheld(0, 4), frame(5)) == [frame(5)]
    assert woven(AT_RUN, withheld(2, 4), frame(5)) == [Gap(RUN, 1, 0, 1), frame(5)]


def test_dropped_frames_are_told_at_once_and_as_one_gap() -> None:
    assert woven(AT_RUN, Lost(RUN, 1, 0), Lost(RUN, 1, 1), Lost(RUN, 1, 2)) == [Gap(RUN, 1, 0, 2)]
    assert woven(AT_RUN, Lost("other", 1, 0), Lost(RUN, 2, 0)) == []


def test_events_that_the_reader_has_are_not_repeated_but_count() -> None:
    begin, done = started(1), event(2, "message.completed", through=1)
    assert woven(Order(), begin, frame(0), done, frame(1), frame(2), after=2) == [frame(0), Gap(RUN, 1, 1, 1), frame(2)]


def test_events_only() -> None:
    begin, done = started(1), event(2, "message.completed", through=1)
    assert events_of([begin, frame(0), done], after=1).out == [done]
    assert events_of([begin, frame(0), done], after=1).sequence == 2
    assert events_of([frame(0)], after=7).sequence == 7


@dataclass
class Script:
    """A session as it happens: events in order, and frames with their places among them."""

    pieces: list[Piece] = field(default_factory=list)
    sequence: int = 0

    def add_event(self, event_type: str, **fields: object) -> None:
        self.sequence += 1
        self.pieces.append(event(self.sequence, event_type, **fields))  # type: ignore[arg-type]


@st.composite
def sessions(draw: st.DrawFn) -> list[Piece]:
    """Executions with frames, messages, takeovers; frames lost, doubled and late as a bus may make them."""
    script = Script()
    epoch = 0
    for number in range(draw(st.integers(1, 3))):
        run = f"run-{number}"
        epoch += 1
        index = 0
        script.add_event("execution.started", epoch=epoch, run=run)
        for _ in range(draw(st.integers(0, 12))):
            match draw(st.sampled_from(["frame"] * 5 + ["tool", "session", "takeover", "stale"])):
                case "frame":
                    script.pieces.append(frame(index, epoch=epoch, run=run, entity="open"))
                    index += 1
                case "tool":
                    script.add_event("tool.completed", epoch=epoch, run=run, through=index - 1 if index else None)
                case "session":
                    script.add_event("input.queued", epoch=0)
                case "takeover":
                    epoch, index = epoch + 1, 0
                case "stale":
                    script.pieces.append(frame(draw(st.integers(0, 5)), epoch=max(1, epoch - 1), run=run))
        if draw(st.booleans()) or number == 0:
            script.add_event("execution.completed", epoch=epoch, run=run, through=index - 1 if index else None)
        else:
            epoch += 1
            script.add_event("execution.lost", epoch=epoch, run=run)
    return draw(disturbed(script.pieces))


@st.composite
def disturbed(draw: st.DrawFn, pieces: list[Piece]) -> list[Piece]:
    """`pieces` with frames lost, doubled, and moved behind what followed them; events stay in order."""
    result: list[tuple[int, int, Piece]] = []
    for position, piece in enumerate(pieces):
        copies = 1 if isinstance(piece, EventIn) else draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
        for copy in range(copies):
            late = 0 if isinstance(piece, EventIn) else draw(st.sampled_from([0, 0, 0, 0, 2, 5]))
            result.append((position + late, copy, piece))
    return [piece for _, _, piece in sorted(result, key=lambda entry: entry[:2])]


READY = relay_pb2.Item(ready=relay_pb2.Ready())


@given(sessions(), st.data())
def test_whatever_the_bus_does_a_reader_is_served_in_order(pieces: list[Piece], data: st.DataObject) -> None:
    items: list[relay_pb2.Item] = [READY]
    order, sequence, position = Order(), 0, 0
    while position < len(pieces):
        count = data.draw(st.integers(1, 6))
        drop = data.draw(st.sampled_from([False, False, False, True]))
        chunk = [dropped(piece) if drop else piece for piece in pieces[position : position + count]]
        out, order, sequence = weave(order, chunk, after=sequence)
        items += items_of(out)
        position += count
    check_reader([Connection(session_pb2.Cursor(), items)])
    assert sum(item.HasField("event") for item in items) == sum(isinstance(piece, EventIn) for piece in pieces)


@given(sessions(), st.integers(0, 30))
def test_where_a_reader_is_written_to_changes_nothing(pieces: list[Piece], cut: int) -> None:
    whole = weave(Order(), pieces, after=0)
    first = weave(Order(), pieces[:cut], after=0)
    second = weave(first.order, pieces[cut:], after=first.sequence)
    assert (second.order, second.sequence) == whole[1:]
    assert joined_gaps([*first.out, *second.out]) == joined_gaps(whole.out)


@given(sessions())
def test_a_reader_that_comes_back_gets_nothing_twice(pieces: list[Piece]) -> None:
    first = weave(Order(), pieces, after=0)
    again = weave(first.order, pieces, after=first.sequence)
    assert not [piece for piece in again.out if isinstance(piece, EventIn)]


def dropped(piece: Piece) -> Piece:
    return Lost(piece.execution, piece.epoch, piece.last) if isinstance(piece, FrameIn) else piece


def joined_gaps(out: list[Out]) -> list[Out]:
    joined: list[Out] = []
    for piece in out:
        before = joined[-1] if joined else None
        if isinstance(piece, Gap) and isinstance(before, Gap) and before.last + 1 == piece.first:
            joined[-1] = before._replace(last=piece.last)
        else:
            joined.append(piece)
    return joined
