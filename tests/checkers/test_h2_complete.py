"""The checker of H2 sees red: silent gaps, answers that end early, refusals that are not true or tell too little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.types.v1 import session_pb2
from services.chassis.errors import FailedPrecondition, HearthError, OutOfRange, Unavailable
from tests.checkers.h2_complete import check
from tests.checkers.pieces import KEY, OTHER, cursor, event, events_from, name, ready, run, shown, stored
from tests.support.recording import Connection, Reader, Recording, Trim

BOUNDS = {"log_id": "x", "oldest": "1", "head": "3"}
ITEMS = stored(event(1), event(2), event(3))


def wrong(*connections: Connection, caught_up: bool = False) -> list[str]:
    recording = run(log=ITEMS)
    recording.readers = [Reader(KEY, list(connections), caught_up)]
    return check(recording).wrong


def refused(error: HearthError, after: session_pb2.Cursor) -> Connection:
    return Connection(after, refusal=error)


def test_a_sound_run_passes() -> None:
    behind = session_pb2.Cursor(log_id=cursor(1).log_id, sequence=9)
    connections = [
        events_from(0, 1),
        replace(events_from(1, 2), promised=2),
        events_from(2, 3),
        refused(OutOfRange("above", reason="CURSOR_AHEAD", metadata=BOUNDS), behind),
        refused(Unavailable("gone", reason="SHUTTING_DOWN"), cursor(3)),
    ]
    assert wrong(*connections, caught_up=True) == []
    assert wrong(Connection(None, [ready(2), shown(event(3), 3)]), caught_up=True) == []
    assert wrong(Connection(None, [ready(3)]), caught_up=True) == []


@pytest.mark.parametrize(("start", "got"), [(0, (2,)), (1, (3,)), (1, (1,)), (2, (2, 3))])
def test_a_connection_that_does_not_go_on_behind_its_cursor_is_seen(start: int, got: tuple[int, ...]) -> None:
    assert check(Recording.of_reader([events_from(start, *got)])).wrong


@pytest.mark.parametrize(("connection", "promised"), [(events_from(0, 1, 2), 3), (events_from(2), 3)])
def test_an_answer_that_ends_before_what_it_said_is_seen(connection: Connection, promised: int) -> None:
    assert wrong(replace(connection, promised=promised))


@pytest.mark.parametrize(
    "refusal",
    [
        OutOfRange("", reason="CURSOR_AHEAD", metadata=BOUNDS),
        OutOfRange("no bounds", reason="CURSOR_EXPIRED"),
        FailedPrecondition("no head", reason="LOG_REPLACED", metadata={"log_id": "x", "oldest": "1"}),
    ],
)
def test_a_refusal_that_tells_too_little_is_seen(refusal: HearthError) -> None:
    assert check(Recording.of_reader([refused(refusal, cursor(7))])).wrong


@pytest.mark.parametrize("reason", ["CURSOR_AHEAD", "CURSOR_EXPIRED", "LOG_REPLACED"])
def test_a_sound_cursor_that_was_refused_is_seen(reason: str) -> None:
    refusal = OutOfRange("no", reason=reason, metadata=BOUNDS)
    assert wrong(refused(refusal, cursor(2, name(2))))
    assert wrong(refused(refusal, session_pb2.Cursor()))
    # Nothing was removed, so no cursor is too old, whatever else may be wrong with it.
    false = reason == "CURSOR_EXPIRED"
    assert bool(wrong(refused(refusal, cursor(2, name(1))))) == false
    assert bool(wrong(refused(refusal, session_pb2.Cursor(log_id=OTHER, sequence=2)))) == false


def trimmed(connection: Connection, *, began: int) -> list[str]:
    """A connection that began at that tick; at tick 5 it was answered that only the third event is left."""
    recording = run(log=ITEMS)
    recording.logs[KEY].kept_from = 3
    recording.trims = [Trim(KEY, 2, answered=5, oldest=3)]
    recording.readers = [Reader(KEY, [replace(connection, began=began)])]
    return check(recording).wrong


def test_an_answer_from_below_what_was_removed_is_seen() -> None:
    expired = OutOfRange("gone", reason="CURSOR_EXPIRED", metadata={**BOUNDS, "oldest": "3"})
    # It may have begun before, or stands right before what is left.
    assert trimmed(events_from(0, 1, 2, 3), began=4) == []
    assert trimmed(events_from(2, 3), began=6) == []
    assert trimmed(refused(expired, cursor(1)), began=6) == []
    assert trimmed(replace(events_from(0, 1), refusal=expired), began=4) == []
    assert trimmed(refused(Unavailable("gone", reason="SHUTTING_DOWN"), cursor(1)), began=6) == []
    assert trimmed(events_from(1, 2, 3), began=6)
    assert trimmed(events_from(1, 3), began=6)
    assert trimmed(replace(events_from(1), promised=1), began=6)
    replaced = FailedPrecondition("no", reason="LOG_REPLACED", metadata=BOUNDS)
    assert trimmed(refused(replaced, cursor(1)), began=6)


@pytest.mark.parametrize(("after", "oldest"), [(2, 3), (0, 1), (0, 4)])
def test_a_refusal_that_is_wrong_about_what_is_kept_is_seen(after: int, oldest: int) -> None:
    refusal = OutOfRange("gone", reason="CURSOR_EXPIRED", metadata={**BOUNDS, "oldest": str(oldest)})
    assert trimmed(refused(refusal, cursor(after)), began=6)


def test_an_event_that_is_not_the_stored_one_is_seen() -> None:
    assert wrong(Connection(cursor(1), [shown(event(2, entity_id="other"), 2)]))
    assert wrong(events_from(3, 4))


def test_who_never_got_everything_is_seen() -> None:
    assert wrong(events_from(0, 1, 2), caught_up=True)
    assert wrong(events_from(0, 1), events_from(2, 3), caught_up=True)
    assert wrong(Connection(None, [ready(1), shown(event(3), 3)]), caught_up=True)
    assert not wrong(events_from(0, 1, 2))
