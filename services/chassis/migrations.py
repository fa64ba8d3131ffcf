"""Schema migrations: Alembic revisions in `services/<service>/migrations/versions/NNNN_name.py`, a schema for each.

Forward only. A revision is numbered (`revision = "0002"`, `down_revision = "0001"`), and its `upgrade()` runs the file
of SQL beside it:

    def upgrade() -> None:
        run_sql(Path(__file__).with_suffix(".sql"))

Everything that is due runs in one transaction, under a lock, so of several replicas that start together one migrates
and the others wait and find it done.

Processes of the release before run on while a newer one migrates, and may be started again meanwhile. So a revision
only adds. One that takes something away says from which revision on a program does without it, `needs = "0005"`;
whoever knows less is refused from then on, and whoever knows it starts on the newer schema.
"""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from hearth.secret import Secret
from services.chassis.postgres import wait_for_postgres
from services.chassis.settings import EXIT_USAGE, StartupError

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

VERSION_TABLE = "schema_version"
# One row: the lowest revision that a program must know to run on this schema.
FLOOR_TABLE = "schema_floor"
# How long a replica waits for another one that is migrating, and how long it tries.
_LOCK_WAIT_SECONDS = 120
# How long a statement waits for a table that is in use. All who want the table meanwhile wait behind it, so it gives
# up soon and comes again.
_TABLE_WAIT_SECONDS = 2
_TRY_AGAIN_SECONDS = 1.0
_FIRST = "0001"


async def migrate(dsn: Secret, schema: str, package: str | Path, *, start_timeout: float = 30.0) -> None:
    """Bring `schema` to the newest revision of `package` (a package with `migrations/versions`, or that directory).

    Waits up to `start_timeout` seconds for Postgres. Raises `StartupError` when the schema is newer than this program
    and does not go with it, which is then the one to update; and when a table stays in use for two minutes. The usual
    case, nothing to do, costs one query and does not load Alembic.
    """
    if not schema.isidentifier():
        raise ValueError(f"schema name {schema!r}")
    versions = package if isinstance(package, Path) else Path(str(files(package))) / "migrations" / "versions"
    known = known_revisions(versions)
    await wait_for_postgres(dsn, start_timeout)
    current = await current_revision(dsn, schema)
    if current == known[-1]:
        return
    if current is not None and current not in known:
        _refuse_newer(schema, current, await _floor(dsn, schema), known)
        logger.warning("the schema is newer than this program", extra={"schema": schema, "revision": current})
        return
    await _upgrade_patiently(dsn, schema, versions)
    logger.info("schema migrated", extra={"schema": schema, "from": current, "to": known[-1]})


def known_revisions(versions: Path) -> list[str]:
    """The revision numbers of a directory, oldest first, from its file names (`0001_name.py` is revision 0001)."""
    found = sorted(path.name.split("_", 1)[0] for path in versions.glob("[0-9]*_*.py"))
    expected = [f"{number:04d}" for number in range(1, len(found) + 1)]
    if not found or found != expected:
        raise ValueError(f"{versions} must hold 0001_name.py, 0002_name.py ... without a hole, it holds {found}")
    return found


async def current_revision(dsn: Secret, schema: str) -> str | None:
    """The revision that the database is at; None when it was never migrated."""
    connection = await asyncpg.connect(dsn.reveal())
    try:
        if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.{VERSION_TABLE}") is None:
            return None
        # The name is checked to be an identifier, and comes from our code.
        return await connection.fetchval(f'SELECT version_num FROM "{schema}".{VERSION_TABLE}')  # type: ignore[no-any-return]  # noqa: S608
    finally:
        await connection.close()


def run_sql(path: Path) -> None:
    """Run a file of any number of statements; for the `upgrade()` of a revision.

    Sent whole, by the simple query protocol, because the prepared statements that SQLAlchemy uses hold one statement
    each and a split at semicolons would cut function bodies.
    """
    from alembic import op
    from sqlalchemy.util import await_only

    bound = op.get_bind().connection
    raw = bound.driver_connection
    assert isinstance(raw, asyncpg.Connection)
    await_only(raw.execute(path.read_text("utf-8")))


async def _floor(dsn: Secret, schema: str) -> str | None:
    """The revision that a program must know to run on this schema; None when nobody has said."""
    connection = await asyncpg.connect(dsn.reveal())
    try:
        if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.{FLOOR_TABLE}") is None:
            return None
        return await connection.fetchval(f'SELECT revision FROM "{schema}".{FLOOR_TABLE}')  # type: ignore[no-any-return]  # noqa: S608
    finally:
        await connection.close()


def _refuse_newer(schema: str, current: str, floor: str | None, known: list[str]) -> None:
    if floor is None or floor > known[-1]:
        raise StartupError(
            f"schema {schema} is at revision {current}, this program knows up to {known[-1]}; start a newer one",
            exit_code=EXIT_USAGE,
        )


async def _upgrade_patiently(dsn: Secret, schema: str, versions: Path) -> None:
    ends = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        try:
            return await _upgrade(dsn, schema, versions)
        except asyncpg.LockNotAvailableError:
            if time.monotonic() >= ends:
                raise StartupError(
                    f"schema {schema} cannot be migrated: a table or its lock is in use for {_LOCK_WAIT_SECONDS} s;"
                    " look for a long transaction in pg_stat_activity"
                ) from None
            logger.info("a table is in use, migrating again soon", extra={"schema": schema})
            await asyncio.sleep(_TRY_AGAIN_SECONDS)


async def _upgrade(dsn: Secret, schema: str, versions: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    async def connect() -> asyncpg.Connection[asyncpg.Record]:
        return await asyncpg.connect(dsn.reveal())

    # Of a DSN itself SQLAlchemy does not know what asyncpg does, as `sslmode`.
    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade_locked, schema, versions)
    finally:
        await engine.dispose()


def _upgrade_locked(connection: Connection, schema: str, versions: Path) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import text

    connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT_SECONDS}s'"))
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": f"hearth/{schema}"})
    connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
    connection.execute(text(f"SET LOCAL lock_timeout = '{_TABLE_WAIT_SECONDS}s'"))
    scripts = ScriptDirectory(str(versions.parent), version_locations=[str(versions)])

    def due(revision: object, _context: object) -> object:
        return scripts._upgrade_revs("head", revision)  # type: ignore[arg-type]

    with EnvironmentContext(Config(), scripts, fn=due) as environment:
        environment.configure(
            connection=connection,
            version_table=VERSION_TABLE,
            version_table_schema=schema,
            transaction_per_migration=False,
        )
        environment.run_migrations()
    needs = max(getattr(script.module, "needs", _FIRST) for script in scripts.walk_revisions())
    connection.execute(text(f'CREATE TABLE IF NOT EXISTS "{schema}".{FLOOR_TABLE} (revision text NOT NULL)'))
    connection.execute(text(f'DELETE FROM "{schema}".{FLOOR_TABLE}'))  # noqa: S608 - an identifier, checked above
    connection.execute(text(f'INSERT INTO "{schema}".{FLOOR_TABLE} VALUES (:needs)'), {"needs": needs})  # noqa: S608
