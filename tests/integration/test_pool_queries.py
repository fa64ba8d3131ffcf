"""Every named statement of the pool is one that Postgres takes, also those that only an accident needs."""

from __future__ import annotations

from importlib.resources import files

import asyncpg
import pytest

from hearth.secret import Secret
from services.chassis.migrations import migrate
from services.chassis.postgres import Queries
from services.pool.store import SCHEMA

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
