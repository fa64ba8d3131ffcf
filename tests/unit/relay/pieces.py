"""Pieces of a session's tail, made as the relay makes them, and what readers would see of them."""

from __future__ import annotations

from collections.abc import Iterable

from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.relay.order import EventIn, FrameIn, Out
from services.relay.wire import FrameWriter, event_of, join
from tests.support.relay_turns import text_frame

RUN = "22222222-2222-2222-2222-222222222222"
LOG = "11111111-1111-1111-1111-111111111111"


def frame(
    index: int,
    text: str = "x",
    *,
    epoch: int = 1,
    entity: str = "m",
    run: str = RUN,
    body: frame_pb2.Frame | None = None,
) -> FrameIn:
    """A frame; `body` instead of a piece of text."""
    made = text_frame(index, entity, text)
    if body is not None:
        made = frame_pb2.Frame(frame_index=index, entity_id=entity)
        made.MergeFrom(body)
    return FrameIn(run, epoch, index, index, FrameWriter(run, epoch).reply(made.SerializeToString()))


def withheld(first: int, last: int, *, epoch: int = 1, run: str = RUN) -> FrameIn:
    """Frames that the reader is not to get and does not miss."""
    return FrameIn(run, epoch, first, last, b"")


def event(
    sequence: int, event_type: str, *, epoch: int = 1, through: int | None = None, run: str = RUN, text: str = "x"
) -> EventIn:
    """An event of a run, or with epoch 0 of the session."""
    made = event_pb2.Event(
        event_id=f"{sequence:08x}-0000-4000-8000-000000000000",
        type=event_type,
        entity_id="e",
        execution_id=run,
        epoch=epoch,
    )
    made.scope = event_pb2.EVENT_SCOPE_RUNNER if epoch else event_pb2.EVENT_SCOPE_SESSION
    if through is not None:
        made.frames_through = through
    if event_type == "message.completed":
        made.entity_id = "m"
        part = content_pb2.ContentPart(text=content_pb2.TextPart(text=text))
        made.message_completed.CopyFrom(event_pb2.MessageCompleted(message_id="m", content=[part]))
    cursor = session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=made.event_id.replace("-", "")[:16])
    return event_of(event_pb2.EventItem(event=made, cursor=cursor).SerializeToString())[0]


def started(sequence: int = 1, *, epoch: int = 1, run: str = RUN) -> EventIn:
    """An execution begins."""
    return event(sequence, "execution.started", epoch=epoch, run=run)


def items_of(out: Iterable[Out]) -> list[relay_pb2.Item]:
    """What a client parses from the joined bytes."""
    return list(relay_service_pb2.SubscribeResponse.FromString(join(out)).items)
