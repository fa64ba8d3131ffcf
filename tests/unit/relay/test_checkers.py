"""The checkers of recordings see what is broken: each is fed recordings that break its promise, and a good one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from tests.support.relay_reader import CHECKERS, Connection, check
from tests.support.relay_turns import text_frame

LOG = "11111111-1111-1111-1111-111111111111"
RUN = "22222222-2222-2222-2222-222222222222"


def event(sequence: int, event_type: str = "input.queued", **fields: object) -> relay_pb2.Item:
    event_id = f"{sequence:08x}-0000-4000-8000-000000000000"
    made = event_pb2.Event(event_id=event_id, type=event_type, scope=event_pb2.EVENT_SCOPE_SESSION)
    if event_type.startswith(("execution.", "message.")):
        made.scope, made.execution_id, made.epoch = event_pb2.EVENT_SCOPE_RUNNER, RUN, 1
    made.MergeFrom(event_pb2.Event(**fields))  # type: ignore[arg-type]
    cursor = session_pb2.Cursor(log_id=LOG, sequence=sequence, tag=event_id.replace("-", "")[:16])
    return relay_pb2.Item(event=event_pb2.EventItem(event=made, cursor=cursor))


def message(sequence: int, text: str, *, through: int) -> relay_pb2.Item:
    body = event_pb2.MessageCompleted(
        message_id="m", content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    )
    return event(sequence, "message.completed", entity_id="m", frames_through=through, message_completed=body)


def frame(index: int, text: str = "x", *, epoch: int = 1, entity: str = "m") -> relay_pb2.Item:
    return relay_pb2.Item(
        frame=relay_pb2.FrameItem(execution_id=RUN, epoch=epoch, frame=text_frame(index, entity, text))
    )


def gap(first: int, last: int, *, epoch: int = 1) -> relay_pb2.Item:
    made = relay_pb2.Gap(execution_id=RUN, epoch=epoch, to=last)
    setattr(made, "from", first)
    return relay_pb2.Item(gap=made)


def reset(epoch: int) -> relay_pb2.Item:
    return relay_pb2.Item(reset=relay_pb2.Reset(execution_id=RUN, epoch=epoch))


def ready(through: int) -> relay_pb2.Item:
    return relay_pb2.Item(
        ready=relay_pb2.Ready(through=through, cursor=session_pb2.Cursor(sequence=through), head=through)
    )


def from_start(*items: relay_pb2.Item) -> Connection:
    return Connection(session_pb2.Cursor(), list(items))


STARTED = event(1, "execution.started")
ENDED = event(4, "execution.completed")
LIVE = (ready(0), STARTED)


def test_a_good_recording_passes() -> None:
    check(
        [
            from_start(
                *LIVE, frame(0, "a"), frame(1, "b"), message(2, "ab", through=1), gap(2, 4), frame(5, entity="n")
            ),
            Connection(session_pb2.Cursor(log_id=LOG, sequence=2), [event(3), frame(5, entity="n"), ready(3), ENDED]),
        ]
    )


@pytest.mark.parametrize(
    ("name", "recording"),
    [
        ("H1", [from_start(event(1), event(3))]),
        ("H1", [from_start(event(2), event(1))]),
        ("H1", [from_start(event(1), event(1))]),
        ("H2", [from_start(event(2))]),
        ("H2", [from_start(event(1)), Connection(session_pb2.Cursor(sequence=1), [event(3)])]),
        ("H3", [from_start(event(1)), Connection(session_pb2.Cursor(sequence=0), [event(1)])]),
        ("cursor", [from_start(event(1), ready(2))]),
        ("cursor", [from_start(relay_pb2.Item(heartbeat=relay_pb2.Heartbeat(through=1, head=1)))]),
        ("cursor", [from_start(event(1), relay_pb2.Item(closing=relay_pb2.Closing(cursor=session_pb2.Cursor())))]),
        ("L1", [from_start(*LIVE, frame(1))]),
        ("L1", [from_start(*LIVE, frame(0), frame(0))]),
        ("L1", [from_start(*LIVE, frame(0), frame(2))]),
        ("L1", [from_start(*LIVE, frame(0, "a"), message(2, "b", through=0))]),
        ("L1", [from_start(*LIVE, frame(0, "a"), message(2, "a", through=1))]),
        ("L1", [from_start(*LIVE, message(2, "", through=0))]),
        ("L1", [from_start(*LIVE, gap(0, 1), message(2, "", through=1), frame(1))]),
        ("L1", [from_start(*LIVE, frame(0), message(2, "x", through=0), frame(1))]),
        ("L1", [from_start(*LIVE, ENDED, frame(0))]),
        ("L1", [from_start(*LIVE, ENDED, gap(0, 1))]),
        ("L1", [from_start(*LIVE, gap(1, 0))]),
        ("L1", [from_start(*LIVE, frame(0), frame(0, epoch=2))]),
        ("L1", [from_start(*LIVE, frame(0), gap(0, 0, epoch=2))]),
        ("L1", [from_start(*LIVE, reset(2))]),
        ("L1", [from_start(*LIVE, frame(0), reset(1))]),
        ("L1", [from_start(frame(0))]),
        ("L1", [from_start(gap(0, 0))]),
        ("L1", [Connection(session_pb2.Cursor(), [frame(0)], events_only=True)]),
    ],
)
def test_a_broken_recording_is_seen(name: str, recording: list[Connection]) -> None:
    assert CHECKERS[name](recording) != []


@pytest.mark.parametrize("change", [lambda c: setattr(c, "tag", "0" * 16), lambda c: setattr(c, "log_id", "other")])
def test_a_wrong_cursor_in_an_event_is_seen(change: Callable[[session_pb2.Cursor], None]) -> None:
    wrong = event(2)
    change(wrong.event.cursor)
    assert CHECKERS["cursor"]([from_start(event(1), wrong)]) != []
