"""GetSnapshot and GetHeads: what a client needs to show a session, from one view of its log."""

from __future__ import annotations

import asyncio

from hearth.types.v1 import session_pb2
from tests.support import events
from tests.support.history_client import Client, ids, refused


async def test_a_session_that_was_never_seen(history: Client) -> None:
    session = events.key()
    snapshot = await history.snapshot(session)
    assert snapshot.head.session == session
    assert snapshot.head.head == session_pb2.Cursor()
    assert (snapshot.complete, snapshot.HasField("execution"), snapshot.next_page_token) == (True, False, "")


async def test_a_snapshot_holds_head_execution_and_the_newest_events(history: Client) -> None:
    session, run = events.key(), events.Run(4)
    await history.accepted(session, events.user_message(), run.started(), run.message())
    items = await history.read(session)
    snapshot = await history.snapshot(session)
    assert list(snapshot.events) == items
    assert snapshot.head.head == items[-1].cursor
    assert (snapshot.head.oldest, snapshot.head.epoch, snapshot.head.ended) == (1, 4, False)
    assert snapshot.head.execution_id == snapshot.execution.execution_id == run.execution_id
    assert (snapshot.execution.epoch, snapshot.execution.HasField("ending")) == (4, False)
    ending = run.completed()
    await history.accepted(session, ending)
    snapshot = await history.snapshot(session)
    assert snapshot.head.ended
    assert snapshot.execution.ending.event_id == ending.event_id
    assert (snapshot.execution.ending.type, snapshot.execution.ending.sequence) == ("execution.completed", 4)


async def test_pages_of_a_snapshot_go_back_to_the_first_event(history: Client) -> None:
    session = events.key()
    await history.accepted(session, *(events.user_message() for _ in range(10)))
    items = await history.read(session)
    for size in (1, 3, 5, 10):
        found, token = list((await history.snapshot(session, size)).events), ""
        assert found == items[-size:]
        token = (await history.snapshot(session, size)).next_page_token
        while token:
            await history.accepted(session, events.user_message("meanwhile"))
            page = await history.snapshot(session, size, token)
            assert page.events[-1].cursor.sequence == found[0].cursor.sequence - 1
            found = [*page.events, *found]
            token = page.next_page_token
        assert found == items
        items = await history.read(session)


async def test_a_subscription_from_the_snapshots_head_misses_nothing(history: Client, other: Client) -> None:
    session = events.key()
    total = 60
    seen: list[list[str]] = []

    async def write() -> None:
        for _ in range(total):
            await other.accepted(session, events.user_message())

    async def look() -> None:
        while True:
            snapshot = await history.snapshot(session, 1_000)
            shown = [*snapshot.events]
            assert [item.cursor.sequence for item in shown] == list(range(1, snapshot.head.head.sequence + 1))
            rest = await history.page(session, snapshot.head.head, page_size=1_000)
            seen.append(ids([*shown, *rest.events]))
            if len(shown) == total:
                return

    await asyncio.gather(write(), look(), look())
    log = ids(await history.read(session))
    assert all(found == log[: len(found)] for found in seen)


async def test_a_token_of_another_log_is_refused(history: Client) -> None:
    session, foreign = events.key(), events.key()
    for key in (session, foreign):
        await history.accepted(key, *(events.user_message() for _ in range(5)))
    token = (await history.snapshot(foreign, 2)).next_page_token
    assert (await refused(history.snapshot(session, 2, token))).reason == "LOG_REPLACED"


async def test_what_is_known_to_be_missing_is_said(history: Client) -> None:
    session = events.key()
    await history.accepted(session, *(events.user_message() for _ in range(4)), events.gap("a row was refused"))
    snapshot = await history.snapshot(session)
    assert (snapshot.complete, snapshot.incomplete_reason) == (False, "a row was refused")
    trimmed = events.key()
    await history.accepted(trimmed, *(events.user_message() for _ in range(4)))
    await history.trim(trimmed, 2)
    snapshot = await history.snapshot(trimmed)
    assert (snapshot.complete, snapshot.incomplete_reason) == (False, "older events were removed")
    assert [item.cursor.sequence for item in snapshot.events] == [3, 4]
    assert snapshot.next_page_token == ""
    assert snapshot.head.oldest == 3


async def test_a_page_whose_older_events_were_trimmed_meanwhile_is_empty(history: Client) -> None:
    session = events.key()
    await history.accepted(session, *(events.user_message() for _ in range(6)))
    token = (await history.snapshot(session, 2)).next_page_token
    await history.trim(session, 5)
    page = await history.snapshot(session, 2, token)
    assert not page.events
    assert page.next_page_token == ""


async def test_heads_come_in_the_order_asked(history: Client) -> None:
    known, unknown, open_one = events.key(), events.key(), events.key()
    ended, running = events.Run(5), events.Run(2)
    await history.accepted(known, ended.started(), ended.completed())
    await history.accepted(open_one, running.started())
    heads = await history.heads(open_one, unknown, known, open_one)
    assert [head.session for head in heads] == [open_one, unknown, known, open_one]
    assert heads[0] == heads[3]
    assert heads[1].head == session_pb2.Cursor()
    assert (heads[1].oldest, heads[1].epoch, heads[1].execution_id) == (0, 0, "")
    last = (await history.read(known))[-1].cursor
    assert heads[2].head == last
    assert [(head.epoch, head.execution_id, head.ended) for head in heads] == [
        (2, running.execution_id, False),
        (0, "", False),
        (5, ended.execution_id, True),
        (2, running.execution_id, False),
    ]


async def test_a_thousand_heads_in_one_call(history: Client) -> None:
    sessions = [events.key() for _ in range(1_000)]
    await history.append_sets(*(events.append_set(session, events.user_message()) for session in sessions[:500]))
    heads = await history.heads(*sessions)
    assert [head.head.sequence for head in heads] == [1] * 500 + [0] * 500


async def test_large_transcripts_come_in_bounded_pages(history: Client) -> None:
    session = events.key()
    for _ in range(5):
        await history.accepted(session, *(events.custom(70_000) for _ in range(10)))
    snapshot = await history.snapshot(session, 1_000)
    assert snapshot.ByteSize() < 2**20
    assert snapshot.events[-1].cursor.sequence == 50
    assert snapshot.next_page_token
