"""TrimLog and DeleteLog: what is removed is refused from then on, and nothing brings a deleted log back."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import asyncpg
import grpc

from services.chassis.errors import FailedPrecondition, OutOfRange
from tests.support import events
from tests.support.history_client import APPENDED, DUPLICATE, INVALID, QUARANTINED, Client, ids, refused

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def test_a_trim_takes_many_batches_and_can_be_repeated(history: Client) -> None:
    session = events.key()
    for _ in range(3):
        await history.accepted(session, *(events.custom() for _ in range(900)))
    for through, oldest in ((2_500, 2_501), (2_500, 2_501), (10, 2_501), (2_699, 2_700)):
        bounds = await history.trim(session, through)
        assert (bounds.oldest, bounds.head) == (oldest, 2_700)
    assert await history.accepted(session, events.user_message()) == [2_701]


async def test_a_trim_above_the_head_is_refused(history: Client) -> None:
    session = events.key()
    await history.accepted(session, events.user_message())
    error = await refused(history.trim(session, 2))
    assert isinstance(error, OutOfRange)
    assert (error.reason, error.metadata["head"]) == ("CURSOR_AHEAD", "1")
    assert (await refused(history.trim(events.key(), 1))).reason == "CURSOR_AHEAD"
    assert (await history.trim(events.key(), 0)).head == 0
    assert (await history.trim(session, 0)).oldest == 1


async def test_readers_of_a_log_that_is_trimmed_are_complete_or_refused(history: Client) -> None:
    session = events.key()
    await history.accepted(session, *(events.custom() for _ in range(900)))
    log = ids(await history.read(session))
    codes: list[grpc.StatusCode] = []

    async def follow() -> None:
        for _ in range(20):
            try:
                found = [item for chunk in await history.chunks(session) for item in chunk.events]
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
            else:
                assert ids(found) == log

    async def trim() -> None:
        for through in range(100, 900, 100):
            await history.trim(session, through)

    await asyncio.gather(follow(), trim(), follow())
    assert set(codes) == {grpc.StatusCode.OUT_OF_RANGE}


async def test_an_ended_execution_stays_fenced_after_its_events_are_gone(history: Client) -> None:
    session, run = events.key(), events.Run()
    late = run.message()
    await history.accepted(session, run.started(), run.completed(counted=0))
    await history.trim(session, 2)
    (result,) = await history.append(session, late)
    assert (result.outcome, result.reason) == (QUARANTINED, "EXECUTION_ENDED")


async def test_a_deleted_log_answers_so_to_everybody(history: Client, other: Client) -> None:
    session, run = events.key(), events.Run(6)
    await history.accepted(session, run.started(), run.message())
    await other.append(session, events.Run(1).started())
    cursor = (await history.read(session))[0].cursor
    await history.delete(session)
    for client in (history, other):
        for call in (
            client.page(session),
            client.page(session, cursor),
            client.chunks(session),
            client.snapshot(session),
            client.trim(session, 1),
        ):
            error = await refused(call)
            assert isinstance(error, FailedPrecondition)
            assert (error.reason, error.metadata["log_id"]) == ("LOG_DELETED", cursor.log_id)
        results = await client.append(session, events.user_message(), run.message(), events.Run(9).started())
        assert [(result.outcome, result.reason) for result in results] == [(INVALID, "LOG_DELETED")] * 3
        assert (await refused(client.mark_incomplete(session, run.execution_id, "x"))).reason == "EXECUTION_NOT_FOUND"
        assert await client.quarantined(session) == []
    (head,) = await history.heads(session)
    assert (head.head.sequence, head.head.log_id, head.oldest) == (0, "", 0)
    assert (head.epoch, head.execution_id, head.ended) == (6, run.execution_id, True)


async def test_no_row_of_a_deleted_log_is_kept(history: Client, database: Database) -> None:
    session, run = events.key(), events.Run(6)
    await history.accepted(session, run.started(), run.message())
    await history.append(session, events.Run(1).started())
    await history.delete(session)
    log = await database.fetchval("SELECT id FROM history.logs WHERE session = $1", session.session)
    for table in ("events", "executions", "quarantine"):
        assert await database.fetchval(f"SELECT count(*) FROM history.{table} WHERE log = $1", log) == 0


async def test_deleting_is_idempotent_and_works_on_what_was_never_seen(history: Client) -> None:
    session = events.key()
    for _ in range(2):
        await history.delete(session)
    (result,) = await history.append(session, events.user_message())
    assert (result.outcome, result.reason) == (INVALID, "LOG_DELETED")


async def test_a_delete_races_appenders_and_wins_once(history: Client, other: Client) -> None:
    session = events.key()

    async def append(client: Client) -> list[int]:
        return [(await client.append(session, events.user_message()))[0].outcome for _ in range(30)]

    async def delete() -> None:
        while True:
            if (await history.heads(session))[0].head.sequence:
                break
        await history.delete(session)

    *found, _ = await asyncio.gather(append(history), append(other), delete())
    for outcomes in found:
        stored = outcomes.count(APPENDED)
        assert outcomes == [APPENDED] * stored + [INVALID] * (30 - stored)
    assert (await refused(history.page(session))).reason == "LOG_DELETED"


async def test_a_delete_that_was_cut_off_is_finished_by_the_next(history: Client, database: Database) -> None:
    session = events.key()
    await history.accepted(session, *(events.custom() for _ in range(5)))
    await database.execute("UPDATE history.logs SET deleted_at = now() WHERE session = $1", session.session)
    await history.delete(session)
    row = await database.fetchrow(
        "SELECT purged_at, (SELECT count(*) FROM history.events e WHERE e.log = l.id) AS events"
        " FROM history.logs l WHERE session = $1",
        session.session,
    )
    assert row is not None
    assert row["purged_at"] is not None
    assert row["events"] == 0


async def test_a_trimmed_duplicate_of_a_kept_event_is_still_known(history: Client) -> None:
    session = events.key()
    kept = events.user_message()
    await history.accepted(session, events.user_message(), kept)
    await history.trim(session, 1)
    (result,) = await history.append(session, kept)
    assert (result.outcome, result.sequence) == (DUPLICATE, 2)
