"""From where a log may be read on, and from where not."""

from __future__ import annotations

import pytest

from hearth.types.v1 import session_pb2
from services.chassis.errors import DataLoss, FailedPrecondition, HearthError, InvalidArgument, OutOfRange
from services.history.reader import Place, check_place, check_rows, place_of
from services.history.store import Bounds, Row

LOG = "5d0f3a52-9a0a-4f77-8a38-0d3f1c6c2a11"
OTHER = "5d0f3a52-9a0a-4f77-8a38-0d3f1c6c2a12"
EVENT = "0123abcd-4567-4f77-8a38-0d3f1c6c2a11"
TAG = "0123abcd45674f77"
WHOLE = Bounds(LOG, 1, 10)
TRIMMED = Bounds(LOG, 5, 10)
EMPTIED = Bounds(LOG, 11, 10)
NONE = Bounds()


@pytest.mark.parametrize(
    ("place", "bounds", "at_place"),
    [
        (Place(), NONE, ""),
        (Place(), WHOLE, ""),
        (Place(LOG, 10, TAG), WHOLE, EVENT),
        (Place("", 10), WHOLE, EVENT),
        (Place(LOG, 4, TAG), TRIMMED, EVENT),
        (Place(LOG, 5), TRIMMED, EVENT),
        (Place(LOG, 10, TAG), EMPTIED, EVENT),
    ],
)
def test_a_place_from_which_nothing_is_missing_is_taken(place: Place, bounds: Bounds, at_place: str) -> None:
    check_place(place, bounds, at_place)


@pytest.mark.parametrize(
    ("place", "bounds", "at_place", "kind", "reason"),
    [
        (Place("", 11), WHOLE, "", OutOfRange, "CURSOR_AHEAD"),
        (Place("", 1), NONE, "", OutOfRange, "CURSOR_AHEAD"),
        (Place("", 3), TRIMMED, "", OutOfRange, "CURSOR_EXPIRED"),
        (Place(), TRIMMED, "", OutOfRange, "CURSOR_EXPIRED"),
        (Place("", 9), EMPTIED, "", OutOfRange, "CURSOR_EXPIRED"),
        (Place(LOG, 4, TAG), TRIMMED, OTHER, FailedPrecondition, "LOG_REPLACED"),
        (Place(OTHER, 3), WHOLE, EVENT, FailedPrecondition, "LOG_REPLACED"),
        (Place(OTHER, 30), WHOLE, "", FailedPrecondition, "LOG_REPLACED"),
        (Place(OTHER, 0), NONE, "", FailedPrecondition, "LOG_REPLACED"),
        (Place(LOG, 3, TAG), WHOLE, OTHER, FailedPrecondition, "LOG_REPLACED"),
        (Place(LOG, 3), Bounds(LOG, 1, 10, deleted=True), "", FailedPrecondition, "LOG_DELETED"),
    ],
)
def test_any_other_is_refused_with_the_bounds(
    place: Place, bounds: Bounds, at_place: str, kind: type[HearthError], reason: str
) -> None:
    with pytest.raises(kind) as refusal:
        check_place(place, bounds, at_place)
    assert refusal.value.reason == reason
    kept = bounds.oldest if bounds.oldest <= bounds.head and not bounds.deleted else 0
    assert refusal.value.metadata == {"log_id": bounds.log_id, "oldest": str(kept), "head": str(bounds.head)}


def test_a_cursor_is_taken_as_it_was_given_out() -> None:
    cursor = session_pb2.Cursor(log_id=LOG.upper(), sequence=3, tag=TAG.upper())
    assert place_of(cursor) == Place(LOG, 3, TAG)
    assert place_of(session_pb2.Cursor()) == Place()


@pytest.mark.parametrize(
    ("cursor", "field"),
    [
        (session_pb2.Cursor(log_id="x"), "after.log_id"),
        (session_pb2.Cursor(sequence=2**63), "after.sequence"),
        (session_pb2.Cursor(sequence=1, tag="xyz"), "after.tag"),
        (session_pb2.Cursor(sequence=1, tag="0" * 15), "after.tag"),
        (session_pb2.Cursor(sequence=0, tag=TAG), "after.tag"),
    ],
)
def test_a_malformed_cursor_never_reads_from_the_start(cursor: session_pb2.Cursor, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        place_of(cursor)
    assert refusal.value.field_violations[0][0] == field


def rows(*sequences: int) -> list[Row]:
    return [Row(sequence, EVENT, b"") for sequence in sequences]


def test_a_page_with_a_hole_is_not_delivered() -> None:
    check_rows(3, rows(4, 5, 6), WHOLE)
    check_rows(10, rows(), WHOLE)
    for after, found in ((3, rows(5)), (3, rows(4, 6)), (3, rows()), (3, rows(4, 4))):
        with pytest.raises(DataLoss):
            check_rows(after, found, WHOLE)
