"""Known failures of systems like this, each by its code in docs/failures.md: what history does instead."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import asyncpg

from tests.support import events
from tests.support.history_client import Client, ids

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def test_p05_a_long_transaction_elsewhere_delays_nobody(
    history: Client, other: Client, database: Database
) -> None:
    session, elsewhere = events.key(), events.key()
    await history.accepted(session, events.user_message())
    await history.accepted(elsewhere, events.user_message())
    open_one = database.transaction()
    await open_one.start()
    try:
        # It has a transaction id and has written, so that every watermark over transactions stands still.
        await database.execute("UPDATE history.logs SET head = head WHERE session = $1", elsewhere.session)
        async with asyncio.timeout(4):
            for number in range(2, 12):
                assert await history.accepted(session, events.user_message()) == [number]
                assert len(await other.read(session)) == number
    finally:
        await open_one.rollback()


async def test_p13_no_later_event_is_seen_before_an_earlier_one_commits(
    history: Client, other: Client, database: Database
) -> None:
    """The first writer is a transaction that has taken the next place in the log and does not end."""
    session = events.key()
    await history.accepted(session, events.user_message())
    first = database.transaction()
    await first.start()
    await database.execute("UPDATE history.logs SET head = head + 1 WHERE session = $1", session.session)
    late = events.user_message("second writer")
    appending = asyncio.create_task(other.accepted(session, late))
    try:
        for _ in range(10):
            await asyncio.sleep(0.02)
            assert len(await history.read(session)) == 1
        assert not appending.done()
    finally:
        # It never was: its place is free again, and no reader finds a hole.
        await first.rollback()
    assert await appending == [2]
    items = await history.read(session)
    assert [item.cursor.sequence for item in items] == [1, 2]
    assert ids(items)[-1] == late.event_id
    (head,) = await history.heads(session)
    assert head.head == items[-1].cursor
