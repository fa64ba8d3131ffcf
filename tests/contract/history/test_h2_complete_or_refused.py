"""H2: a resume delivers everything after its cursor or is refused with a reason and what is kept; no silent gap."""

from __future__ import annotations

from typing import TypeAlias

import asyncpg
import pytest

from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import FailedPrecondition, HearthError, InvalidArgument, OutOfRange
from tests.support import events
from tests.support.history_client import Client, ids, refused

Cursor = session_pb2.Cursor
Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def filled(history: Client, count: int) -> tuple[session_pb2.SessionKey, list[event_pb2.EventItem]]:
    session = events.key()
    await history.accepted(session, *(events.user_message(f"{number}") for number in range(count)))
    return session, await history.read(session)


async def test_every_cursor_of_a_log_reads_what_follows_it(history: Client) -> None:
    session, items = await filled(history, 9)
    for place in range(10):
        after = items[place - 1].cursor if place else None
        page = await history.page(session, after)
        assert list(page.events) == items[place:]
        assert not page.more
        assert (page.bounds.oldest, page.bounds.head) == (1, 9)
        streamed = [item for chunk in await history.chunks(session, after) for item in chunk.events]
        assert streamed == items[place:]


async def test_pages_of_any_size_join_to_the_whole(history: Client) -> None:
    session, items = await filled(history, 11)
    for size in (1, 2, 3, 10, 11, 12):
        assert await history.read(session, page_size=size) == items


async def test_an_unknown_session_reads_as_empty(history: Client) -> None:
    session = events.key()
    page = await history.page(session)
    assert not page.events
    assert not page.more
    assert (page.bounds.log_id, page.bounds.oldest, page.bounds.head) == ("", 0, 0)
    (chunk,) = await history.chunks(session)
    assert not chunk.events


async def test_a_cursor_above_the_head_is_refused(history: Client) -> None:
    session, items = await filled(history, 3)
    log_id = items[0].cursor.log_id
    for cursor in (Cursor(sequence=4), Cursor(log_id=log_id, sequence=99), Cursor(sequence=2**63 - 1)):
        for error in await both(history, session, cursor):
            assert isinstance(error, OutOfRange)
            assert error.reason == "CURSOR_AHEAD"
            assert error.metadata == {"log_id": log_id, "oldest": "1", "head": "3"}
    error = await refused(history.page(events.key(), Cursor(sequence=1)))
    assert error.metadata == {"log_id": "", "oldest": "0", "head": "0"}


async def test_a_cursor_of_another_log_is_refused(history: Client) -> None:
    session, items = await filled(history, 3)
    _, foreign = await filled(history, 5)
    wrong_tag = Cursor(log_id=items[1].cursor.log_id, sequence=2, tag=items[0].cursor.tag)
    only_tag = Cursor(sequence=2, tag=items[0].cursor.tag)
    for cursor in (foreign[1].cursor, foreign[4].cursor, wrong_tag, only_tag, Cursor(log_id=events.new_id())):
        for error in await both(history, session, cursor):
            assert isinstance(error, FailedPrecondition)
            assert error.reason == "LOG_REPLACED"
            assert error.metadata["head"] == "3"
    error = await refused(history.page(events.key(), foreign[0].cursor))
    assert error.reason == "LOG_REPLACED"


async def test_a_cursor_without_log_and_tag_is_taken_unchecked(history: Client) -> None:
    session, items = await filled(history, 3)
    assert list((await history.page(session, Cursor(sequence=2))).events) == items[2:]


async def test_a_log_that_lost_its_tail_in_a_failover_and_grew_again_is_told(
    history: Client, database: Database
) -> None:
    session, items = await filled(history, 3)
    await database.execute("DELETE FROM history.events WHERE event_id = $1", items[2].event.event_id)
    await database.execute(
        "UPDATE history.logs SET head = 2, tail_id = $2, revision = gen_random_uuid() WHERE log_id = $1",
        items[0].cursor.log_id,
        items[1].event.event_id,
    )
    assert (await refused(history.page(session, items[2].cursor))).reason == "CURSOR_AHEAD"
    await history.accepted(session, events.user_message("another third"))
    assert (await refused(history.page(session, items[2].cursor))).reason == "LOG_REPLACED"
    assert len((await history.page(session, items[1].cursor)).events) == 1


@pytest.mark.parametrize("trimmed", [1, 4, 8])
async def test_the_edge_of_what_is_kept(history: Client, trimmed: int) -> None:
    session, items = await filled(history, 9)
    bounds = await history.trim(session, trimmed)
    assert (bounds.oldest, bounds.head) == (trimmed + 1, 9)
    for place in range(trimmed):
        for error in await both(history, session, items[place - 1].cursor if place else None):
            assert isinstance(error, OutOfRange)
            assert error.reason == "CURSOR_EXPIRED"
            assert error.metadata == {
                "log_id": items[0].cursor.log_id,
                "oldest": str(trimmed + 1),
                "head": "9",
            }
    for place in range(trimmed, 10):
        assert list((await history.page(session, items[place - 1].cursor)).events) == items[place:]
    last_removed = items[trimmed - 1].cursor
    forged = Cursor(log_id=last_removed.log_id, sequence=trimmed, tag=items[trimmed].cursor.tag)
    assert (await refused(history.page(session, forged))).reason == "LOG_REPLACED"


async def test_a_log_that_was_trimmed_to_its_head(history: Client) -> None:
    session, items = await filled(history, 3)
    bounds = await history.trim(session, 3)
    assert (bounds.oldest, bounds.head) == (0, 3)
    page = await history.page(session, items[2].cursor)
    assert not page.events
    assert not page.more
    assert (await refused(history.page(session, items[1].cursor))).metadata["oldest"] == "0"
    assert (await refused(history.page(session))).reason == "CURSOR_EXPIRED"
    assert await history.accepted(session, events.user_message()) == [4]
    page = await history.page(session, items[2].cursor)
    assert [item.cursor.sequence for item in page.events] == [4]
    assert page.bounds.oldest == 4


@pytest.mark.parametrize(
    ("cursor", "field"),
    [
        (Cursor(log_id="no uuid", sequence=1), "after.log_id"),
        (Cursor(sequence=1, tag="short"), "after.tag"),
        (Cursor(sequence=2**64 - 1), "after.sequence"),
        (Cursor(tag="0123456789abcdef"), "after.tag"),
    ],
)
async def test_a_malformed_cursor_is_no_read_from_the_start(history: Client, cursor: Cursor, field: str) -> None:
    session, _ = await filled(history, 1)
    for error in await both(history, session, cursor):
        assert isinstance(error, InvalidArgument)
        assert [violation[0] for violation in error.field_violations] == [field]


async def test_large_logs_come_in_chunks_below_a_mebibyte(history: Client) -> None:
    session = events.key()
    for _ in range(6):
        await history.accepted(session, *(events.custom(90_000) for _ in range(10)))
    chunks = await history.chunks(session)
    assert len(chunks) > 5
    assert all(chunk.ByteSize() < 2**20 for chunk in chunks)
    streamed = [item for chunk in chunks for item in chunk.events]
    assert [item.cursor.sequence for item in streamed] == list(range(1, 61))
    page = await history.page(session, page_size=5_000)
    assert page.ByteSize() < 2**20
    assert page.more
    assert ids(await history.read(session)) == ids(streamed)


async def test_events_of_the_greatest_size_are_read_one_by_one(history: Client) -> None:
    session = events.key()
    for _ in range(3):
        await history.accepted(session, events.custom(2**20 - 300))
    pages = await history.page(session)
    assert len(pages.events) == 1
    assert pages.more
    assert len(await history.read(session)) == 3
    assert len(await history.chunks(session)) == 3


async def test_a_stored_log_with_a_hole_is_never_delivered(history: Client, database: Database) -> None:
    session, items = await filled(history, 5)
    await database.execute("DELETE FROM history.events WHERE event_id = $1", items[2].event.event_id)
    for error in await both(history, session, None):
        assert error.code.name == "DATA_LOSS"
    assert list((await history.page(session, Cursor(sequence=3))).events) == items[3:]


async def both(history: Client, session: session_pb2.SessionKey, after: Cursor | None) -> list[HearthError]:
    """The refusals of both ways to read."""
    return [await refused(history.page(session, after)), await refused(history.chunks(session, after))]
