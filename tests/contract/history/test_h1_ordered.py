"""H1: any read path returns ascending, contiguous sequences, and their order is that of the commits."""

from __future__ import annotations

import asyncio

from tests.support import events
from tests.support.history_client import APPENDED, DUPLICATE, Client, ids

APPENDERS = 32
EACH = 12


async def test_appenders_of_two_replicas_fill_one_log_without_a_hole(history: Client, other: Client) -> None:
    session = events.key()
    clients = [history, other]

    async def append(number: int) -> list[tuple[int, str]]:
        client, placed = clients[number % 2], []
        for _ in range(EACH):
            event = events.user_message(f"from {number}")
            (sequence,) = await client.accepted(session, event)
            placed.append((sequence, event.event_id))
        assert placed == sorted(placed), "an appender's own order was lost"
        return placed

    found = await asyncio.gather(*(append(number) for number in range(APPENDERS)))
    placed = sorted(item for own in found for item in own)
    assert [sequence for sequence, _ in placed] == list(range(1, APPENDERS * EACH + 1))
    items = await history.read(session, page_size=37)
    assert ids(items) == [event_id for _, event_id in placed]
    assert await other.read(session) == items
    streamed = [item for chunk in await history.chunks(session) for item in chunk.events]
    assert streamed == items


async def test_the_same_events_pushed_from_everywhere_are_stored_once(history: Client, other: Client) -> None:
    sessions = [events.key() for _ in range(4)]
    batches = {session.session: [[events.user_message() for _ in range(5)] for _ in range(6)] for session in sessions}

    async def push(client: Client) -> None:
        for place in range(6):
            for session in sessions:
                for result in await client.append(session, *batches[session.session][place]):
                    assert result.outcome in (APPENDED, DUPLICATE)
                    assert result.sequence > 0

    await asyncio.gather(*(push(client) for client in (history, other) * 4))
    for session in sessions:
        sent = [event.event_id for batch in batches[session.session] for event in batch]
        assert ids(await history.read(session)) == sent


async def test_a_reader_that_follows_never_sees_a_later_event_first(history: Client, other: Client) -> None:
    session = events.key()
    total = 120

    async def write(client: Client) -> None:
        for _ in range(total // 4):
            await client.accepted(session, events.user_message())

    async def follow(client: Client) -> list[str]:
        seen: list[str] = []
        cursor = None
        while len(seen) < total:
            page = await client.page(session, cursor, page_size=7)
            for item in page.events:
                assert item.cursor.sequence == len(seen) + 1
                seen.append(item.event.event_id)
                cursor = item.cursor
        return seen

    *_, first, second = await asyncio.gather(
        *(write(client) for client in (history, other) * 2), follow(history), follow(other)
    )
    assert first == second


async def test_the_sets_of_a_request_are_appended_in_its_order(history: Client) -> None:
    session, between = events.key(), events.key()
    first, second, third = (events.user_message(text) for text in "abc")
    sets = [
        events.append_set(session, first),
        events.append_set(between, events.user_message()),
        events.append_set(session, second, third, atomic=True),
    ]
    response = await history.append_sets(*sets)
    assert [[result.sequence for result in found.results] for found in response] == [[1], [1], [2, 3]]
    assert ids(await history.read(session)) == [first.event_id, second.event_id, third.event_id]
