"""Schema migrations: Alembic revisions in `services/<service>/migrations/versions/NNNN_name.py`, a schema for each.

Forward only. A revision is numbered (`revision = "0002"`, `down_revision = "0001"`), and its `upgrade()` runs the file
of SQL beside it:

    def upgrade() -> None:
        run_sql(Path(__file__).with_suffix(".sql"))

Everything that is due runs in one transaction, under a lock, so of several replicas that start together one migrates
and the others wait and find it done.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from services.chassis.postgres import wait_for_postgres
from services.chassis.settings import EXIT_USAGE, StartupError

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

VERSION_TABLE = "schema_version"
# How long a replica waits for another one that is migrating.
_LOCK_WAIT_SECONDS = 120


async def migrate(dsn: str, schema: str, package: str | Path, *, start_timeout: float = 30.0) -> None:
    """Bring `schema` to the newest revision of `package` (a package with `migrations/versions`, or that directory).

    Waits up to `start_timeout` seconds for Postgres. Raises `StartupError` when the schema is newer than this program,
    which is then the one to update. The usual case, nothing to do, costs one query and does not load Alembic.
    """
    if not schema.isidentifier():
        raise ValueError(f"schema name {schema!r}")
    versions = package if isinstance(package, Path) else Path(str(files(package))) / "migrations" / "versions"
    known = known_revisions(versions)
    await wait_for_postgres(dsn, start_timeout)
    current = await current_revision(dsn, schema)
    if current == known[-1]:
        return
    _refuse_newer(schema, current, known)
    await _upgrade(dsn, schema, versions)
    logger.info("schema migrated", extra={"schema": schema, "from": current, "to": known[-1]})


def known_revisions(versions: Path) -> list[str]:
    """The revision numbers of a directory, oldest first, from its file names (`0001_name.py` is revision 0001)."""
    found = sorted(path.name.split("_", 1)[0] for path in versions.glob("[0-9]*_*.py"))
    expected = [f"{number:04d}" for number in range(1, len(found) + 1)]
    if not found or found != expected:
        raise ValueError(f"{versions} must hold 0001_name.py, 0002_name.py ... without a hole, it holds {found}")
    return found


async def current_revision(dsn: str, schema: str) -> str | None:
    """The revision that the database is at; None when it was never migrated."""
    connection = await asyncpg.connect(dsn)
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


def _refuse_newer(schema: str, current: str | None, known: list[str]) -> None:
    if current is not None and current not in known:
        raise StartupError(
            f"schema {schema} is at revision {current}, this program knows up to {known[-1]}; start a newer one",
            exit_code=EXIT_USAGE,
        )


async def _upgrade(dsn: str, schema: str, versions: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    scheme, _, rest = dsn.partition("://")
    assert scheme in {"postgres", "postgresql"}
    engine = create_async_engine(f"postgresql+asyncpg://{rest}", poolclass=NullPool)
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
