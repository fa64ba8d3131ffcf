"""Every query of history is bound by an index, also when its plan was made while the tables were empty."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import grpc.aio

from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import Client

SESSIONS = 20
ROUNDS = 12
EACH = 40


async def test_no_table_is_scanned_and_no_lookup_grows_with_its_log(
    start_service: StartService, migrated_dsn: str, valkey_url: str
) -> None:
    service = await start_service("services.history", HEARTH_POSTGRES_DSN=migrated_dsn, HEARTH_VALKEY_URL=valkey_url)
    database: Any = await asyncpg.connect(migrated_dsn)
    await database.execute("ALTER TABLE history.events SET (autovacuum_enabled = false)")
    await database.execute("ALTER TABLE history.logs SET (autovacuum_enabled = false)")
    runs = [(events.key(), events.Run()) for _ in range(SESSIONS)]
    async with grpc.aio.insecure_channel(service.address) as channel:
        history = Client(channel)

        async def work(number: int, step: int) -> None:
            session, run = runs[number]
            if step == 0:
                await history.accepted(session, run.started())
            await history.accepted(session, *(run.message() for _ in range(EACH)))
            await history.append(session, events.Run(1).started(), events.Run(1).message())
            head = (await history.heads(session))[0].head
            await history.page(session, head)
            await history.snapshot(session, 5)
            await history.quarantined(session)
            await history.mark_incomplete(session, run.execution_id, "a test")

        for step in range(ROUNDS):
            await asyncio.gather(*(work(number, step) for number in range(SESSIONS)))
        for number in range(SESSIONS):
            await history.trim(runs[number][0], 10)
        await history.delete(runs[0][0])
    await service.terminate()

    scans = await database.fetch(
        "SELECT relname, seq_scan, seq_tup_read FROM pg_stat_user_tables"
        " WHERE schemaname = 'history' AND relname NOT LIKE 'schema\\_%'"
    )
    assert {row["relname"]: row["seq_tup_read"] for row in scans} == dict.fromkeys(
        ("logs", "events", "executions", "quarantine", "expiry"), 0
    )
    ids = await database.fetchrow(
        "SELECT idx_scan, idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'events_event_id'"
    )
    assert ids["idx_scan"] > SESSIONS * ROUNDS * EACH
    assert ids["idx_tup_read"] < ids["idx_scan"]
    await database.close()
