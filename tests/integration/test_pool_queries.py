"""Every named statement of the pool is one that Postgres takes, also those that only an accident needs."""

from __future__ import annotations

from importlib.resources import files

import asyncpg
import pytest

from hearth.secret import Secret
from services.chassis.migrations import migrate
from services.chassis.postgres import Queries, create_pool
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, Store

FILES = sorted(one.name for one in files("services.pool").iterdir() if one.name.endswith(".sql"))


@pytest.mark.parametrize("file", FILES)
async def test_every_statement_can_be_prepared(module_postgres_dsn: str, file: str) -> None:
    await migrate(Secret(module_postgres_dsn), SCHEMA, "services.pool")
    queries = Queries.load("services.pool", file)
    connection = await asyncpg.connect(module_postgres_dsn)
    try:
        for name in sorted(queries.names):
            await connection.prepare(getattr(queries, name))
    finally:
        await connection.close()
    assert queries.names


async def test_deletions_that_never_get_done_hold_up_no_others(module_postgres_dsn: str) -> None:
    settings = PoolSettings(postgres_dsn=Secret(module_postgres_dsn))
    await migrate(settings.postgres_dsn, SCHEMA, "services.pool")
    async with await create_pool(settings, "pool", server_settings=PLANNER) as pool:
        await pool.execute(
            "INSERT INTO pool.session (project, session, deleted_at)"
            " SELECT 'p', 's' || n, now() - n * interval '1 hour' FROM generate_series(1, 12) AS n"
        )
        store, seen = Store(pool), set[str]()
        # None of them is ever done; a look misses a given one of them with a chance of one in six.
        for _ in range(200):
            found = {key.session for key, _ in await store.to_purge(10)}
            assert len(found) == 10
            seen |= found
        assert seen == {f"s{number}" for number in range(1, 13)}
