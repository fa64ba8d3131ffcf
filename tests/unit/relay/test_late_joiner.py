"""Wherever a reader joins or resumes while an execution runs, its frames and events fit together without a gap.

The whole way of a late joiner, without IO: it pins itself in the tail, kept frames are read at any later moment,
history is replayed from any cursor up to the pin, and then it follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from services.relay.order import EventIn, FrameIn, Order, Piece, weave
from services.relay.reader import Late
from services.relay.view import Snapshot, View, condense
from services.relay.wire import event_of
from tests.checkers import check_reader
from tests.support.recording import Connection
from tests.unit.relay.pieces import LOG, RUN, frame, items_of, started


@dataclass
class Answer:
    """One execution as it happens: frames of several messages at once, each completed with what they add up to."""

    pieces: list[FrameIn | EventIn] = field(default_factory=lambda: [started(1)])
    texts: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    next: int = 0
    sequence: int = 1

    def say(self, entity: str) -> None:
        if entity not in self.texts:
            self.open.append(entity)
        text = f"{self.next};"
        self.texts[entity] = self.texts.get(entity, "") + text
        self.pieces.append(frame(self.next, text, entity=entity))
        self.next += 1

    def complete(self, entity: str) -> None:
        self.open.remove(entity)
        self.sequence += 1
        part = content_pb2.ContentPart(text=content_pb2.TextPart(text=self.texts[entity]))
        event = event_pb2.Event(
            event_id=f"{self.sequence:08x}-0000-4000-8000-000000000000",
            scope=event_pb2.EVENT_SCOPE_RUNNER,
            type="message.completed",
            entity_id=entity,
            execution_id=RUN,
            epoch=1,
            frames_through=self.next - 1,
            message_completed=event_pb2.MessageCompleted(message_id=entity, content=[part]),
        )
        cursor = session_pb2.Cursor(log_id=LOG, sequence=self.sequence, tag=event.event_id.replace("-", "")[:16])
        self.pieces.append(event_of(event_pb2.EventItem(event=event, cursor=cursor).SerializeToString())[0])


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    answer = Answer()
    names = 0
    for _ in range(draw(st.integers(1, 25))):
        choice = draw(st.sampled_from(["new", "more", "more", "more", "complete"]))
        if choice == "new" or not answer.open:
            names += 1
            answer.say(f"m{names}")
        elif choice == "more":
            answer.say(draw(st.sampled_from(answer.open)))
        else:
            answer.complete(draw(st.sampled_from(answer.open)))
    for entity in list(answer.open):
        answer.complete(entity)
    return answer


def joined(answer: Answer, *, pinned: int, read: int, cursor: int) -> list[relay_pb2.Item]:
    """What a reader gets that pins itself before piece `pinned`, while frames before piece `read` are kept."""
    before = answer.pieces[:pinned]
    at = max((piece.sequence for piece in before if isinstance(piece, EventIn)), default=0)
    view = View(RUN, 1)
    for piece in before:
        if isinstance(piece, EventIn):
            view.fold(piece)
    kept = [piece for piece in answer.pieces[:read] if isinstance(piece, FrameIn)]
    late = Late(Snapshot(RUN, 1, view.started, condense(kept, view, at)))
    assert late.order is not None
    order: Order = late.order
    replay: list[Piece] = []
    for piece in before:
        if isinstance(piece, EventIn) and piece.sequence > cursor:
            replay += [*late.before(piece), piece]
    out, order, sequence = weave(order, [*replay, *late.rest()], after=cursor)
    ready = relay_pb2.Ready(through=sequence, cursor=session_pb2.Cursor(sequence=sequence), head=sequence)
    items = [*items_of(out), relay_pb2.Item(ready=ready)]
    out, _, _ = weave(order._replace(strict=True), answer.pieces[pinned:], after=max(sequence, at))
    return items + items_of(out)


@given(answers(), st.data())
def test_a_late_joiner_misses_nothing(answer: Answer, data: st.DataObject) -> None:
    pinned = data.draw(st.integers(1, len(answer.pieces)))
    read = data.draw(st.integers(pinned, len(answer.pieces)))
    known = sum(isinstance(piece, EventIn) for piece in answer.pieces[:pinned])
    cursor = data.draw(st.integers(0, known))
    items = joined(answer, pinned=pinned, read=read, cursor=cursor)
    check_reader([Connection(session_pb2.Cursor(log_id=LOG, sequence=cursor), items)])
    assert not [item for item in items if item.HasField("gap")]
    got: dict[str, str] = {}
    for item in items:
        if item.HasField("frame"):
            entity = item.frame.frame.entity_id
            got[entity] = got.get(entity, "") + item.frame.frame.text_delta.text
    completed_before = {
        piece.completes for piece in answer.pieces[:pinned] if isinstance(piece, EventIn) and piece.completes
    }
    assert got == {entity: text for entity, text in answer.texts.items() if entity not in completed_before}
