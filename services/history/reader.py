"""Reading a log: pages, streams, heads and snapshots, complete or refused.

A page is one statement, so its events, its bounds and the event at the cursor are of one view. Events are handed on as
they were stored: a reply is joined from bytes and never parsed here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import session_pb2
from services.chassis import fields
from services.chassis.errors import DataLoss, FailedPrecondition, HearthError, OutOfRange, invalid
from services.history import replies, wire
from services.history.store import Bounds, Page, Row, Store
from services.history.validate import Key

DEFAULT_PAGE = 500
MAX_PAGE = 5_000
DEFAULT_SNAPSHOT = 200
MAX_SNAPSHOT = 1_000
# A little below 1 MiB, for what surrounds the events. A single event always fits, whatever its size.
_PAGE_BYTES = 1024 * 1024 - 4096
# Smaller chunks cost readers nothing, and appends wait less for the loop.
_CHUNK_ROWS = 1_000
_CHUNK_BYTES = 256 * 1024
_TAG_DIGITS = 16
_TRIMMED = "older events were removed"


class Place(NamedTuple):
    """A cursor, checked for its form. Empty `log_id` and `tag` are not compared."""

    log_id: str = ""
    sequence: int = 0
    tag: str = ""


def place_of(cursor: session_pb2.Cursor, field: str = "after") -> Place:
    """The place that a cursor names. Raises `InvalidArgument`: a malformed cursor never means "from the start"."""
    checks = fields.Violations()
    log_id = checks.take(fields.uuid_text, f"{field}.log_id", cursor.log_id) if cursor.log_id else ""
    checks.take(fields.number, f"{field}.sequence", cursor.sequence)
    tag = cursor.tag.lower()
    if tag and (len(tag) != _TAG_DIGITS or not set(tag) <= set("0123456789abcdef")):
        checks.add(f"{field}.tag", f"must be empty or {_TAG_DIGITS} hexadecimal digits")
    elif tag and not cursor.sequence:
        checks.add(f"{field}.tag", "must be empty at sequence 0, where there is no event")
    checks.raise_if_any()
    return Place(log_id, cursor.sequence, tag)


def check_place(place: Place, bounds: Bounds, at_place: str) -> None:
    """Refuse a place from which the log cannot be read on without a gap.

    `at_place` is the id of the event there, as far as it is known. The refusal carries the bounds of what is kept.
    """
    if bounds.deleted:
        raise _refusal(FailedPrecondition, "LOG_DELETED", "the log was deleted", bounds)
    if place.log_id and place.log_id != bounds.log_id:
        raise _replaced(bounds)
    if place.sequence > bounds.head:
        raise _refusal(
            OutOfRange, "CURSOR_AHEAD", f"the cursor {place.sequence} is above the head {bounds.head}", bounds
        )
    if place.sequence < bounds.oldest - 1:
        raise _refusal(
            OutOfRange,
            "CURSOR_EXPIRED",
            f"events after {place.sequence} were removed, the log goes on from {bounds.oldest}",
            bounds,
        )
    if place.tag and place.tag != wire.tag(at_place):
        raise _replaced(bounds)


def check_rows(after: int, rows: Sequence[Row], bounds: Bounds) -> None:
    """Refuse to deliver a page that has a hole, or ends early: that would be damage of the stored log."""
    if (after < bounds.head and not rows) or any(row.sequence != after + place for place, row in enumerate(rows, 1)):
        raise _refusal(DataLoss, "INTERNAL", f"the stored log has a hole after {after}; report it", bounds)


def _replaced(bounds: Bounds) -> HearthError:
    text = "the cursor is of another log than the one kept: it was recreated, restored or failed over; load it anew"
    return _refusal(FailedPrecondition, "LOG_REPLACED", text, bounds)


def _refusal(kind: type[HearthError], reason: str, message: str, bounds: Bounds) -> HearthError:
    metadata = {"log_id": bounds.log_id, "oldest": str(replies.kept_from(bounds)), "head": str(bounds.head)}
    return kind(message, reason=reason, metadata=metadata)


@dataclass(frozen=True, slots=True)
class _SnapshotToken:
    """Where a page of a snapshot begins; the next one ends before it."""

    log_id: str
    before: int
    tag: str

    def text(self) -> str:
        return base64.urlsafe_b64encode(f"{self.log_id} {self.before} {self.tag}".encode()).decode()

    @classmethod
    def parse(cls, text: str) -> _SnapshotToken:
        try:
            log_id, before, tag = base64.b64decode(text.encode(), b"-_", validate=True).decode().split(" ")
            place = place_of(session_pb2.Cursor(log_id=log_id, sequence=int(before), tag=tag))
        except (binascii.Error, ValueError, HearthError):
            raise invalid("page_token", "must be the next_page_token of the page before, unchanged") from None
        return cls(place.log_id, place.sequence, place.tag)


class Reader:
    """Answers the reading calls, as serialized messages."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def page(self, key: Key, place: Place, rows: int) -> bytes:
        """A serialized ReadEventsResponse."""
        page = await self._page(key, place, rows, _PAGE_BYTES)
        last = page.rows[-1].sequence if page.rows else page.bounds.head
        rest = history_service_pb2.ReadEventsResponse(bounds=replies.bounds(page.bounds), more=last < page.bounds.head)
        return wire.join_items(_items(page.bounds.log_id, page.rows), rest.SerializeToString())

    async def stream(self, key: Key, place: Place) -> AsyncIterator[bytes]:
        """Serialized StreamEventsResponses up to the head that stands now; at least one, for its bounds."""
        page = await self._page(key, place, _CHUNK_ROWS, _CHUNK_BYTES)
        end = page.bounds.head
        while True:
            rest = history_service_pb2.StreamEventsResponse(bounds=replies.bounds(page.bounds))
            rows = [row for row in page.rows if row.sequence <= end]
            yield wire.join_items(_items(page.bounds.log_id, rows), rest.SerializeToString())
            if not rows or rows[-1].sequence >= end:
                return
            last = rows[-1]
            place = Place(page.bounds.log_id, last.sequence, wire.tag(last.event_id))
            page = await self._page(key, place, _CHUNK_ROWS, _CHUNK_BYTES)

    async def heads(self, keys: Sequence[Key]) -> list[history_pb2.Head]:
        """Where the logs stand, in the order asked."""
        rows = await self._store.heads(keys)
        return [replies.head(key, row) for key, row in zip(keys, rows, strict=True)]

    async def snapshot(self, key: Key, rows: int, page_token: str) -> bytes:
        """A serialized GetSnapshotResponse."""
        token = _SnapshotToken.parse(page_token) if page_token else None
        before = None if token is None else token.before
        found = await self._store.snapshot(key, before, rows=rows, size=_PAGE_BYTES)
        bounds = found.head.bounds
        _check_token(token, bounds, found.at_before)
        reason = found.incomplete_reason or (_TRIMMED if bounds.oldest > 1 else "")
        rest = history_service_pb2.GetSnapshotResponse(
            head=replies.head(key, found.head),
            execution=None
            if found.execution is None
            else replies.ledger_entry(found.head.execution_id, found.execution),
            complete=not reason,
            incomplete_reason=reason,
            next_page_token=_older(bounds, found.rows),
        )
        return wire.join_items(_items(bounds.log_id, found.rows), rest.SerializeToString(), field=5)

    async def _page(self, key: Key, place: Place, rows: int, size: int) -> Page:
        page = await self._store.page(key, place.sequence, rows=rows, size=size)
        check_place(place, page.bounds, page.at_cursor)
        check_rows(place.sequence, page.rows, page.bounds)
        return page


def _check_token(token: _SnapshotToken | None, bounds: Bounds, at_before: str) -> None:
    if bounds.deleted:
        raise _refusal(FailedPrecondition, "LOG_DELETED", "the log was deleted", bounds)
    if token is None:
        return
    # Where the event of the token was trimmed there is nothing older either, and the page is empty.
    kept = token.before >= bounds.oldest
    if token.log_id != bounds.log_id or token.before > bounds.head or (kept and token.tag != wire.tag(at_before)):
        raise _replaced(bounds)


def _items(log_id: str, rows: Sequence[Row]) -> list[bytes]:
    writer = wire.ItemWriter(log_id)
    return [writer.item(row.body, row.sequence, row.event_id) for row in rows]


def _older(bounds: Bounds, rows: Sequence[Row]) -> str:
    if not rows or rows[0].sequence <= bounds.oldest:
        return ""
    first = rows[0]
    return _SnapshotToken(bounds.log_id, first.sequence, wire.tag(first.event_id)).text()
