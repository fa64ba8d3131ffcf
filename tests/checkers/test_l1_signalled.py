"""The checker of L1 sees red: holes that were not told, texts that are not whole, frames that come too late."""

from __future__ import annotations

import pytest

from hearth.types.v1 import frame_pb2, session_pb2
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
