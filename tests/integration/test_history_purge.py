"""The rest of a deleted log goes to the last row: where several remove it, and where it was called gone too early."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import asyncpg
import pytest

from hearth.secret import Secret
from services.chassis.migrations import migrate
from services.history.store import QUERIES, SCHEMA

VERSIONS = Path(__file__).resolve().parents[2] / "services" / "history" / "migrations" / "versions"
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def connections(postgres_dsn: str) -> AsyncIterator[list[Connection]]:
    """Those of two replicas, and of somebody who looks on."""
    found = [await asyncpg.connect(postgres_dsn) for _ in range(3)]
    yield found
    for connection in found:
        await connection.close()


async def deleted_log(database: Connection, *, events: int = 0, executions: int = 0, quarantined: int = 0) -> int:
    """A tombstone with this many rows behind it; its row id."""
    log: int = await database.fetchval(
        "INSERT INTO history.logs (project, session, log_id, revision, deleted_at)"
        " VALUES ('p', gen_random_uuid()::text, gen_random_uuid(), gen_random_uuid(), now()) RETURNING id"
    )
    await database.execute(
        "INSERT INTO history.events (log, sequence, event_id, digest, body)"
        " SELECT $1, n, gen_random_uuid(), '', '' FROM generate_series(1, $2) AS n",
        log,
        events,
    )
    await database.execute(
        "INSERT INTO history.executions (log, execution_id, epoch)"
        " SELECT $1, gen_random_uuid(), n FROM generate_series(1, $2) AS n",
        log,
        executions,
    )
    await database.execute(
        "INSERT INTO history.quarantine (log, current_epoch, event_id, execution_id, reason, digest, body)"
        " SELECT $1, n, gen_random_uuid(), gen_random_uuid(), 'x', '', '' FROM generate_series(1, $2) AS n",
        log,
        quarantined,
    )
    return log


async def is_purged(database: Connection, log: int) -> bool:
    """Whether nobody will look at this log again."""
    return bool(await database.fetchval("SELECT purged_at IS NOT NULL FROM history.logs WHERE id = $1", log))


async def purge(connection: Connection, log: int) -> int:
    """One batch of two rows."""
    return int(await connection.fetchval("SELECT history.purge_batch($1, 2)", log))


async def test_who_removes_a_log_that_another_one_removes_does_not_call_it_done(
    postgres_dsn: str, connections: list[Connection]
) -> None:
    await migrate(Secret(postgres_dsn), SCHEMA, "services.history")
    first, second, database = connections
    log = await deleted_log(database, events=5)
    transaction = first.transaction()
    await transaction.start()
    assert await purge(first, log) == 2
    other = asyncio.create_task(purge(second, log))
    waiting = "SELECT count(*) FROM pg_locks WHERE pid = $1 AND NOT granted"
    async with asyncio.timeout(10):
        while not await database.fetchval(waiting, second.get_server_pid()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    await transaction.commit()
    assert await other == 2
    assert not await is_purged(database, log)
    assert [await purge(first, log) for _ in range(2)] == [1, 0]
    assert await is_purged(database, log)


async def test_a_log_that_was_called_purged_with_rows_behind_it_is_purged_again(
    postgres_dsn: str, connections: list[Connection], tmp_path: Path
) -> None:
    for path in VERSIONS.glob("000[12]_*"):
        shutil.copy(path, tmp_path)
    await migrate(Secret(postgres_dsn), SCHEMA, tmp_path)
    *_, database = connections
    logs = [
        await deleted_log(database, events=3),
        await deleted_log(database, executions=1),
        await deleted_log(database, quarantined=1),
        await deleted_log(database),
    ]
    await database.execute("UPDATE history.logs SET purged_at = now()")
    await migrate(Secret(postgres_dsn), SCHEMA, "services.history")
    assert [await is_purged(database, log) for log in logs] == [False, False, False, True]


async def test_a_log_that_cannot_be_removed_keeps_no_other_one(
    postgres_dsn: str, connections: list[Connection]
) -> None:
    await migrate(Secret(postgres_dsn), SCHEMA, "services.history")
    database = connections[0]
    logs, found = {await deleted_log(database, events=1) for _ in range(3)}, set[int]()
    for _ in range(200):
        found |= {row["id"] for row in await database.fetch(QUERIES.logs_to_purge, 1)}
    assert found == logs
