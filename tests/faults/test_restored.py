"""The check of a restored database sees red: readers that were not told, and logs that were mixed."""

from __future__ import annotations

from hearth.relay.v1 import relay_pb2
from services.chassis.errors import FailedPrecondition
from tests.checkers.pieces import KEY, cursor, event, events_from, from_start, name, ready, run, sent, shown, stored
from tests.faults.restored import forget, sort
from tests.support.recording import Connection, Reader, Recording

# Events 3 and 4 were lost; 13 and 14 came in their place.
OLD = [shown(event(number), number) for number in (1, 2, 3, 4)]
NEW = [shown(event(number), sequence) for sequence, number in ((3, 13), (4, 14))]


def now() -> Recording:
    return run(log=stored(event(1), event(2), event(13), event(14)))


def refused(*after: int) -> Connection:
    connection = events_from(*after)
    connection.refusal = FailedPrecondition("load anew", reason="LOG_REPLACED")
    return connection


def ready_behind(number: int) -> relay_pb2.Item:
    made = ready(number)
    made.ready.cursor.CopyFrom(cursor(number, name(number)))
    return made


def wrong(*lives: Reader) -> list[str]:
    recording = now()
    lost, verdict = sort(recording, [lives])
    assert len(recording.readers) + len(lost.readers) == len(lives)
    return verdict.wrong


def test_readers_that_were_told_pass() -> None:
    first = Reader(KEY, [from_start(*OLD), refused(4)])
    again = Reader(KEY, [from_start(*OLD[:2], *NEW)])
    recording = now()
    lost, verdict = sort(recording, [[first, again]])
    assert (lost.readers, recording.readers) == ([first], [again])
    assert (verdict.checked, verdict.wrong) == (2, [])


def test_a_reader_that_left_before_passes() -> None:
    assert wrong(Reader(KEY, [from_start(*OLD)])) == []


def test_a_reader_at_the_tail_of_what_is_lost_is_not_held_against_the_log() -> None:
    at_the_tail = Reader(KEY, [Connection(None, [ready_behind(4)])])
    elsewhere = Reader(KEY, [Connection(None, [ready_behind(2)])])
    recording = now()
    lost, verdict = sort(recording, [[at_the_tail], [elsewhere]])
    assert (lost.readers, recording.readers, verdict.wrong) == ([at_the_tail], [elsewhere], [])


def test_a_reader_that_was_not_told_is_seen() -> None:
    assert wrong(Reader(KEY, [from_start(*OLD), Connection(cursor(4))]), Reader(KEY, [from_start(*OLD[:2], *NEW)]))


def test_mixed_logs_are_seen() -> None:
    assert wrong(Reader(KEY, [from_start(*OLD[:3], NEW[1])]))
    assert wrong(Reader(KEY, [from_start(*OLD[:3]), Connection(cursor(3), [NEW[1]])]))


def test_only_answers_from_between_are_forgotten() -> None:
    appends = [sent(event(number), sequence=number) for number in (1, 2, 3)]
    for append, at in zip(appends, (5.0, 15.0, 25.0), strict=True):
        append.answered_at = at
    forget(Recording(appends), 10.0, 20.0)
    assert [append.result is None for append in appends] == [False, True, False]
