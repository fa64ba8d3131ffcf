"""The checker of the cursor rule sees red: a place named that was not delivered, above all the head."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import session_pb2
from services.chassis.errors import Unavailable
from tests.checkers.cursor_rule import check
from tests.checkers.pieces import LOG, OTHER, cursor, event, events_from, from_start, ready, shown
from tests.support.recording import Append, Connection, Recording


def beat(through: int, head: int) -> relay_pb2.Item:
    return relay_pb2.Item(heartbeat=relay_pb2.Heartbeat(through=through, head=head))


def closing(sequence: int) -> relay_pb2.Item:
    return relay_pb2.Item(closing=relay_pb2.Closing(reason="SHUTTING_DOWN", cursor=cursor(sequence)))


def cut(sequence: int) -> Connection:
    error = Unavailable("too slow", reason="SLOW_READER", metadata={"sequence": str(sequence)})
    return Connection(cursor(0), [shown(event(1), 1)], refusal=error)


def wrong(*connections: Connection) -> list[str]:
    return check(Recording.of_reader(connections)).wrong


def test_a_sound_reader_passes() -> None:
    assert wrong(from_start(ready(0, head=5), shown(event(1), 1), beat(1, 5), closing(1)), events_from(1, 2)) == []
    assert wrong(Connection(None, [ready(4), beat(4, 4)]), events_from(4, 5)) == []
    assert wrong(cut(1)) == []
    assert wrong(Connection(None, [relay_pb2.Item(closing=relay_pb2.Closing(reason="SHUTTING_DOWN"))])) == []
    # Its `ready` was on its way when it was cut off.
    for place in (0, 3):
        late = Unavailable("shutting down", reason="SHUTTING_DOWN", metadata={"sequence": str(place)})
        assert wrong(Connection(None, [], refusal=late), events_from(place, place + 1)) == []
    assert check(Recording.of_reader([from_start(ready(0), shown(event(1), 1))])).checked > 3


@pytest.mark.parametrize(
    "item",
    [
        ready(2, head=2),
        beat(2, 2),
        beat(0, 2),
        closing(2),
        closing(0),
        relay_pb2.Item(ready=relay_pb2.Ready(through=1, cursor=cursor(2), head=2)),
        # Known to be wrong about the log.
        ready(1, head=0),
    ],
)
def test_a_place_that_was_not_delivered_is_seen(item: relay_pb2.Item) -> None:
    assert wrong(from_start(shown(event(1), 1), item))


def test_an_error_that_names_another_place_is_seen() -> None:
    assert wrong(cut(2))
    assert wrong(cut(0))


def test_an_error_that_names_a_place_in_another_log_is_seen() -> None:
    for log_id, sound in ((LOG, True), ("", True), (OTHER, False)):
        error = Unavailable("away", reason="DEPENDENCY_UNAVAILABLE", metadata={"sequence": "1", "log_id": log_id})
        assert (wrong(Connection(cursor(0), [shown(event(1), 1)], refusal=error)) == []) is sound


@pytest.mark.parametrize(("told", "sound"), [(0, False), (3, False), (4, True), (5, True)])
def test_a_tail_that_begins_before_what_was_there_is_seen(told: int, sound: bool) -> None:
    error = Unavailable("shutting down", reason="SHUTTING_DOWN", metadata={"sequence": str(told)})
    for connection in (Connection(None, [], refusal=error, began=5), Connection(None, [ready(told)], began=5)):
        run = Recording.of_reader([connection])
        run.appends = [
            Append(("", ""), event(4), began=1, request=1, answered=3, result=history_pb2.AppendResult(sequence=4)),
            Append(("", ""), event(5), began=4, request=2, answered=6, result=history_pb2.AppendResult(sequence=5)),
        ]
        assert (check(run).wrong == []) is sound


@pytest.mark.parametrize("told", [0, 3])
def test_a_place_named_before_the_tail_was_found_is_seen(told: int) -> None:
    assert wrong(Connection(None, [closing(told)]))


def test_a_reader_that_moves_its_cursor_to_the_head_is_seen() -> None:
    assert wrong(from_start(shown(event(1), 1), ready(1, head=3)), events_from(3, 4))
    assert wrong(Connection(None, [ready(1, head=3)]), events_from(3, 4))


@pytest.mark.parametrize("change", [lambda c: setattr(c, "tag", "0" * 16), lambda c: setattr(c, "log_id", "other")])
def test_a_wrong_cursor_in_an_event_is_seen(change: Callable[[session_pb2.Cursor], None]) -> None:
    item = shown(event(2), 2)
    change(item.event.cursor)
    assert wrong(from_start(shown(event(1), 1), item))
