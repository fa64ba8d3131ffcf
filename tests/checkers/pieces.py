"""Pieces of recordings for the self-tests of the checkers: short to write, and sound unless a test breaks them."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from tests.support.recording import ENDINGS, Append, Connection, Key, Log, Recording, tag_of

KEY: Key = ("p", "s")
LOG = "11111111-1111-1111-1111-111111111111"
RUN = "22222222-2222-2222-2222-222222222222"
OTHER = "33333333-3333-3333-3333-333333333333"
ENDED = "execution.completed"


def name(number: int) -> str:
    """The id of the event with this number."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def event(number: int, event_type: str = "input.queued", **fields: object) -> event_pb2.Event:
    """An event; of RUN at epoch 1 when its type is one of a run. `fields` win."""
    made = event_pb2.Event(event_id=name(number), type=event_type, scope=event_pb2.EVENT_SCOPE_SESSION)
    if event_type.startswith(("execution.", "message.", "tool.")):
        made.scope, made.execution_id, made.epoch = event_pb2.EVENT_SCOPE_RUNNER, RUN, 1
    if event_type in ENDINGS:
        getattr(made, event_type.replace(".", "_")).SetInParent()
    made.MergeFrom(event_pb2.Event(**fields))  # type: ignore[arg-type]
    return made


def message(number: int, text: str = "x", *, through: int | None = None, **fields: object) -> event_pb2.Event:
    """A completed message `m`."""
    body = event_pb2.MessageCompleted(
        message_id="m", content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    )
    return event(number, "message.completed", entity_id="m", frames_through=through, message_completed=body, **fields)


def ending(number: int, *, counts: int = 0, incomplete: bool = False, **fields: object) -> event_pb2.Event:
    """An ending with a manifest."""
    manifest = event_pb2.Manifest(runner_events=counts, incomplete=incomplete)
    body = event_pb2.ExecutionCompleted(summary=event_pb2.EndingSummary(manifest=manifest))
    return event(number, ENDED, execution_completed=body, **fields)


def cursor(sequence: int, event_id: str = "") -> session_pb2.Cursor:
    """A place in LOG."""
    return session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=tag_of(event_id))


def stored(*events: event_pb2.Event, first: int = 1) -> list[event_pb2.EventItem]:
    """A log of these events."""
    return [
        event_pb2.EventItem(event=found, cursor=cursor(sequence, found.event_id))
        for sequence, found in enumerate(events, first)
    ]


def shown(found: event_pb2.Event, sequence: int) -> relay_pb2.Item:
    """An event as a reader gets it."""
    return relay_pb2.Item(event=stored(found, first=sequence)[0])


def frame(index: int, text: str = "x", *, epoch: int = 1, entity: str = "m") -> relay_pb2.Item:
    """A frame of RUN."""
    return relay_pb2.Item(
        frame=relay_pb2.FrameItem(execution_id=RUN, epoch=epoch, frame=text_frame(index, text, entity))
    )


def text_frame(index: int, text: str = "x", entity: str = "m") -> frame_pb2.Frame:
    """A frame as its producer sends it."""
    return frame_pb2.Frame(frame_index=index, entity_id=entity, text_delta=frame_pb2.TextDelta(text=text))


def gap(first: int, last: int, *, epoch: int = 1) -> relay_pb2.Item:
    """Lost frames of RUN."""
    made = relay_pb2.Gap(execution_id=RUN, epoch=epoch, to=last)
    setattr(made, "from", first)
    return relay_pb2.Item(gap=made)


def reset(epoch: int) -> relay_pb2.Item:
    """RUN is driven again."""
    return relay_pb2.Item(reset=relay_pb2.Reset(execution_id=RUN, epoch=epoch))


def ready(through: int, head: int | None = None) -> relay_pb2.Item:
    """The end of a replay."""
    known = through if head is None else head
    return relay_pb2.Item(ready=relay_pb2.Ready(through=through, cursor=cursor(through), head=known))


def from_start(*items: relay_pb2.Item) -> Connection:
    """A connection that began at the first event."""
    return Connection(session_pb2.Cursor(), list(items))


def events_from(start: int, *sequences: int) -> Connection:
    """A connection that asked for what follows `start` and got these, each with the id of its number."""
    return Connection(cursor(start), [shown(event(sequence), sequence) for sequence in sequences])


def sent(
    found: event_pb2.Event,
    began: int = 1,
    answered: int | None = None,
    *,
    outcome: history_pb2.AppendOutcome.ValueType = history_pb2.APPEND_OUTCOME_APPENDED,
    sequence: int = 0,
    **rest: object,
) -> Append:
    """An event that was sent at tick `began` and answered at the next one, or at `answered`.

    `rest` are fields of the answer.
    """
    result = history_pb2.AppendResult(outcome=outcome, sequence=sequence, **rest)  # type: ignore[arg-type]
    return Append(KEY, found, began, request=began, answered=began + 1 if answered is None else answered, result=result)


def run(
    appends: Sequence[Append] = (),
    log: Sequence[event_pb2.EventItem] = (),
    *,
    aside: Sequence[tuple[event_pb2.Event, str]] = (),
    head: history_pb2.Head | None = None,
    settled: bool = False,
) -> Recording:
    """What was sent to one session, and what is stored of it."""
    quarantined = [history_pb2.QuarantinedEvent(event=found, reason=reason) for found, reason in aside]
    return Recording(list(appends), logs={KEY: Log(list(log), quarantined, head)}, settled=settled)
