"""The checker of L1 sees red: holes that were not told, texts that are not whole, frames that come too late."""

from __future__ import annotations

import pytest

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2
from tests.checkers.l1_signalled import check
from tests.checkers.pieces import (
    KEY,
    RUN,
    ending,
    event,
    frame,
    from_start,
    gap,
    message,
    ready,
    reset,
    run,
    sent,
    shown,
    stored,
    text_frame,
)
from tests.support.recording import Connection, Publish, Reader, Recording

STARTED = shown(event(1, "execution.started"), 1)
ENDED = shown(ending(4), 4)
LIVE = (ready(0), STARTED)


def test_a_sound_reader_passes() -> None:
    first = from_start(
        *LIVE,
        frame(0, "a"),
        frame(1, "b"),
        shown(message(2, "ab", through=1), 2),
        gap(2, 4),
        frame(5, entity="n"),
    )
    after = session_pb2.Cursor(sequence=2)
    second = Connection(after, [shown(event(3), 3), frame(5, entity="n"), ready(3), ENDED])
    verdict = check(Recording.of_reader([first, second]))
    assert (verdict.wrong, verdict.checked) == ([], 11)


@pytest.mark.parametrize(
    "connection",
    [
        from_start(*LIVE, frame(1)),
        from_start(*LIVE, frame(0), frame(0)),
        from_start(*LIVE, frame(0), frame(2)),
        from_start(*LIVE, frame(0, "a"), shown(message(2, "b", through=0), 2)),
        from_start(*LIVE, frame(0, "a"), shown(message(2, "a", through=1), 2)),
        from_start(*LIVE, shown(message(2, "", through=0), 2)),
        from_start(*LIVE, gap(0, 1), shown(message(2, "", through=1), 2), frame(1)),
        from_start(*LIVE, frame(0), shown(message(2, "x", through=0), 2), frame(1)),
        from_start(*LIVE, ENDED, frame(0)),
        from_start(*LIVE, ENDED, gap(0, 1)),
        from_start(*LIVE, gap(1, 0)),
        from_start(*LIVE, frame(0), frame(0, epoch=2)),
        from_start(*LIVE, frame(0), gap(0, 0, epoch=2)),
        from_start(*LIVE, reset(2)),
        from_start(*LIVE, frame(0), reset(1)),
        from_start(frame(0)),
        from_start(gap(0, 0)),
        Connection(session_pb2.Cursor(), [frame(0)], events_only=True),
    ],
)
def test_a_broken_reader_is_seen(connection: Connection) -> None:
    assert check(Recording.of_reader([connection])).wrong


def joined(first: int, last: int, text: str) -> frame_pb2.Frame:
    made = text_frame(first, text)
    made.merged_through = last
    return made


def against_sent(*frames: frame_pb2.Frame, told: tuple[int, int] | None = None) -> list[str]:
    items = [*LIVE]
    for found in frames:
        items.append(frame(0))
        items[-1].frame.frame.CopyFrom(found)
    if told is not None:
        items.append(gap(*told))
    recording = run([sent(message(2, "abc", through=4))])
    recording.logs = {}
    recording.readers = [Reader(KEY, [from_start(*items)])]
    recording.publishes = [Publish(KEY, RUN, 1, [text_frame(index, text) for index, text in enumerate("abc")])]
    return check(recording).wrong


def test_what_was_sent_passes_as_it_was_or_joined() -> None:
    assert against_sent(text_frame(0, "a"), joined(1, 2, "bc"), told=(3, 4)) == []


@pytest.mark.parametrize(
    "frames",
    [
        [text_frame(0, "b")],
        [text_frame(0, "a", "other")],
        [joined(0, 2, "abd")],
        [joined(0, 3, "abc")],
        [text_frame(0, "a"), text_frame(1, "b"), text_frame(2, "c"), text_frame(3, "d")],
    ],
)
def test_what_was_never_sent_is_seen(frames: list[frame_pb2.Frame]) -> None:
    assert against_sent(*frames)


def test_a_gap_of_frames_that_never_were_is_seen() -> None:
    assert against_sent(told=(0, 5))


MESSAGE = message(3, "x", through=4)
# Of the execution that runs: a tool that covers frames of a message that is not complete.
RUNNING = stored(event(1, "execution.started"), event(2, "tool.completed", entity_id="t", frames_through=4))


def in_place(log: list[event_pb2.EventItem], *connections: Connection) -> list[str]:
    recording = run(log=log)
    recording.readers = [Reader(KEY, list(connections))]
    return check(recording).wrong


def resumed(*items: relay_pb2.Item, at: int = 2) -> Connection:
    return Connection(session_pb2.Cursor(sequence=at), list(items))


def test_who_resumes_gets_frames_of_what_is_not_complete() -> None:
    assert in_place(RUNNING, resumed(frame(3), ready(2), frame(5)), Connection(None, [frame(3), ready(2)])) == []
    # What comes later in the log is not there yet.
    assert in_place([*RUNNING, *stored(MESSAGE, first=3)], resumed(frame(3), ready(2), frame(5))) == []


@pytest.mark.parametrize(
    ("log", "items"),
    [
        # Covered by an event before the cursor, and live.
        (RUNNING, [ready(2), frame(4)]),
        (RUNNING, [ready(2), frame(5), frame(4)]),
        # Of what was complete, of a run that ended, of an epoch that is over, all before the cursor.
        ([RUNNING[0], *stored(MESSAGE, first=2)], [frame(3), ready(2)]),
        ([RUNNING[0], *stored(ending(2), first=2)], [frame(3), ready(2)]),
        ([RUNNING[0], *stored(event(2, "tool.completed", epoch=2), first=2)], [frame(3), ready(2)]),
    ],
)
def test_a_frame_that_an_event_before_the_cursor_supersedes_is_seen(
    log: list[event_pb2.EventItem], items: list[relay_pb2.Item]
) -> None:
    assert in_place(log, resumed(*items))
    assert in_place(log, Connection(None, items))
