"""The pool and the migrations on a real Postgres: bounds, cancelled commands, durability, safe upgrades."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from hearth.secret import Secret
from services.chassis.errors import Unavailable, as_hearth_error
from services.chassis.migrations import current_revision, known_revisions, migrate
from services.chassis.postgres import Pool, create_pool
from services.chassis.settings import PostgresSettings, StartupError
from services.chassis.tasks import Tasks

SAMPLE = "tests.support.sample"
OpenPool = Callable[..., Any]


@pytest.fixture
def open_pool(postgres_dsn: str) -> OpenPool:
    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Pool]:
        async with await create_pool(PostgresSettings(postgres_dsn=Secret(postgres_dsn), **settings), "test") as pool:
            yield pool

    return opened


async def test_sessions_are_named_and_bounded(open_pool: OpenPool) -> None:
    async with open_pool(postgres_statement_timeout=0.2) as pool:
        await pool.ping()
        assert await pool.fetchval("SHOW application_name") == "hearth-test"
        began = time.monotonic()
        with pytest.raises(asyncpg.QueryCanceledError) as caught:
            await pool.execute("SELECT pg_sleep(5)")
        assert time.monotonic() - began < 2
        assert isinstance(as_hearth_error(caught.value), Unavailable)


async def test_a_row_lock_is_not_waited_for_for_ever(open_pool: OpenPool) -> None:
    async with open_pool(postgres_lock_timeout=0.2) as pool:
        await pool.execute("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
        async with pool.acquire() as holder, holder.transaction():
            await holder.execute("SELECT * FROM t FOR UPDATE")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await pool.execute("SELECT * FROM t FOR UPDATE")


async def test_no_free_connection_is_unavailable(open_pool: OpenPool) -> None:
    async with open_pool(postgres_pool_size=1, postgres_acquire_timeout=0.2) as pool:
        async with pool.acquire():
            with pytest.raises(Unavailable) as caught:
                async with pool.acquire():
                    pass
            assert caught.value.reason == "DEPENDENCY_UNAVAILABLE"
            with pytest.raises(Unavailable):
                await pool.fetchval("SELECT 1")
        assert await pool.fetchval("SELECT 1") == 1


@pytest.fixture(params=["postgresql://u@postgres.invalid/d", "postgresql://u@/d?host=/nowhere"])
async def unreachable(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    """A pool whose server no connect reaches: its name does not resolve, its socket is not there."""
    async with Pool(
        request.param,
        acquire_timeout=10.0,
        min_size=0,
        max_size=1,
        max_queries=1,
        max_inactive_connection_lifetime=0.0,
        setup=None,
        init=None,
        connect=None,
        reset=None,
        loop=None,
        connection_class=asyncpg.Connection,
        record_class=asyncpg.Record,
    ) as pool:
        yield pool


async def test_a_server_that_cannot_be_reached_is_unavailable(unreachable: Pool) -> None:
    with pytest.raises(Unavailable) as caught:
        async with unreachable.acquire():
            pass
    assert caught.value.metadata["dependency"] == "Postgres"
    with pytest.raises(Unavailable):
        await unreachable.fetchval("SELECT 1")


async def test_background_work_outlasts_a_server_that_cannot_be_reached(unreachable: Pool) -> None:
    tasks = Tasks(pytest.fail)
    rounds: asyncio.Queue[None] = asyncio.Queue()

    async def work() -> None:
        rounds.put_nowait(None)
        await unreachable.ping()

    repeating = tasks.repeat("sweep", work, every=0.001)
    for _ in range(3):
        await asyncio.wait([repeating, waiting := asyncio.ensure_future(rounds.get())], return_when="FIRST_COMPLETED")
        assert waiting.done()
    await tasks.stop()


async def test_a_cancelled_command_drops_its_connection(open_pool: OpenPool) -> None:
    async with open_pool(postgres_pool_size=1) as pool:
        before = await pool.fetchval("SELECT pg_backend_pid()")
        task = asyncio.create_task(pool.execute("SELECT pg_sleep(5)"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = await pool.fetchval("SELECT pg_backend_pid()")
        assert after != before
        # Nothing that was on its way reaches a later user.
        assert [await pool.fetchval("SELECT $1::int", n) for n in range(50)] == list(range(50))


async def test_cancelled_in_the_middle_of_a_transaction_leaves_nothing(open_pool: OpenPool) -> None:
    async with open_pool(postgres_pool_size=2) as pool:
        await pool.execute("CREATE TABLE t (n int)")

        async def write() -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute("INSERT INTO t VALUES (1)")
                await connection.execute("SELECT pg_sleep(5)")

        for pause in (0.0, 0.005, 0.02, 0.1):
            task = asyncio.create_task(write())
            await asyncio.sleep(pause)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await pool.fetchval("SELECT count(*) FROM t") == 0
        # Nor a lock.
        await pool.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE; COMMIT")


async def test_an_open_transaction_is_rolled_back_at_release(open_pool: OpenPool) -> None:
    async with open_pool(postgres_pool_size=1) as pool:
        await pool.execute("CREATE TABLE t (n int)")

        async def fail() -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute("INSERT INTO t VALUES (1)")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await pool.fetchval("SELECT count(*) FROM t") == 0


async def test_a_schema_change_under_a_cached_statement(open_pool: OpenPool) -> None:
    async with open_pool(postgres_pool_size=1) as pool:
        await pool.execute("CREATE TABLE t (n int)")
        assert await pool.fetch("SELECT * FROM t") == []
        await pool.execute("ALTER TABLE t ADD COLUMN m int")
        assert await pool.fetch("SELECT * FROM t") == []

        async def change_and_read() -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute("ALTER TABLE t ADD COLUMN o int")
                await connection.fetch("SELECT * FROM t")

        with pytest.raises(asyncpg.InvalidCachedStatementError) as caught:
            await change_and_read()
        # Inside of a transaction the whole call has to be made again.
        assert isinstance(as_hearth_error(caught.value), Unavailable)


@pytest.mark.parametrize("level", ["off", "local", "remote_write"])
async def test_a_database_that_may_lose_commits_is_refused(postgres_dsn: str, level: str) -> None:
    connection = await asyncpg.connect(postgres_dsn)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = {level}')
    await connection.close()
    with pytest.raises(StartupError, match=f"synchronous_commit={level}") as caught:
        await create_pool(PostgresSettings(postgres_dsn=Secret(postgres_dsn)), "test")
    assert caught.value.exit_code == 2


async def test_a_wrong_database_is_named_at_once(postgres_dsn: str) -> None:
    settings = PostgresSettings(postgres_dsn=Secret(f"{postgres_dsn}_no"), postgres_start_timeout=30)
    with pytest.raises(StartupError, match="HEARTH_POSTGRES_DSN is wrong"):
        await create_pool(settings, "test")


async def test_migrating_twice_and_together(postgres_dsn: str) -> None:
    assert await current_revision(Secret(postgres_dsn), "sample") is None
    await asyncio.gather(*(migrate(Secret(postgres_dsn), "sample", SAMPLE) for _ in range(3)))
    assert await current_revision(Secret(postgres_dsn), "sample") == "0002"
    await migrate(Secret(postgres_dsn), "sample", SAMPLE)


def revision(directory: Path, number: int, sql: str, needs: str = "") -> None:
    name = f"{number:04d}_step"
    before = f'"{number - 1:04d}"' if number > 1 else "None"
    (directory / f"{name}.sql").write_text(sql)
    (directory / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "from services.chassis.migrations import run_sql\n"
        f'revision = "{number:04d}"\ndown_revision = {before}\n'
        + (f'needs = "{needs}"\n' if needs else "")
        + 'def upgrade() -> None:\n    run_sql(Path(__file__).with_suffix(".sql"))\n'
    )


async def test_steps_that_come_later(postgres_dsn: str, tmp_path: Path) -> None:
    revision(tmp_path, 1, "CREATE TABLE s.t (n int); INSERT INTO s.t VALUES (1);")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    revision(tmp_path, 2, "UPDATE s.t SET n = n + 1;")
    revision(tmp_path, 3, "UPDATE s.t SET n = n * 10;")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    connection = await asyncpg.connect(postgres_dsn)
    assert await connection.fetchval("SELECT n FROM s.t") == 20
    await connection.close()


async def test_a_step_that_fails_leaves_the_schema_as_it_was(postgres_dsn: str, tmp_path: Path) -> None:
    revision(tmp_path, 1, "CREATE TABLE s.t (n int)")
    revision(tmp_path, 2, "INSERT INTO s.t VALUES (1); SELECT nothing_there()")
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await migrate(Secret(postgres_dsn), "s", tmp_path)
    assert await current_revision(Secret(postgres_dsn), "s") is None
    revision(tmp_path, 2, "INSERT INTO s.t VALUES (1)")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    assert await current_revision(Secret(postgres_dsn), "s") == "0002"


async def test_an_older_program_starts_on_a_schema_that_only_grew(postgres_dsn: str, tmp_path: Path) -> None:
    revision(tmp_path, 1, "CREATE TABLE s.t (n int)")
    revision(tmp_path, 2, "CREATE TABLE s.u (n int)")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    (tmp_path / "0002_step.py").unlink()
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    assert await current_revision(Secret(postgres_dsn), "s") == "0002"


async def test_an_older_program_is_refused_by_a_schema_that_lacks_what_it_uses(
    postgres_dsn: str, tmp_path: Path
) -> None:
    revision(tmp_path, 1, "CREATE TABLE s.t (n int)")
    revision(tmp_path, 2, "CREATE TABLE s.u (n int)")
    revision(tmp_path, 3, "DROP TABLE s.t", needs="0002")
    revision(tmp_path, 4, "CREATE TABLE s.v (n int)")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    for newer in (4, 3):
        (tmp_path / f"{newer:04d}_step.py").unlink()
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    (tmp_path / "0002_step.py").unlink()
    with pytest.raises(StartupError, match="at revision 0004, this program knows up to 0001"):
        await migrate(Secret(postgres_dsn), "s", tmp_path)


async def test_an_older_program_is_refused_where_nobody_said_what_a_schema_needs(
    postgres_dsn: str, tmp_path: Path
) -> None:
    revision(tmp_path, 1, "CREATE TABLE s.t (n int)")
    revision(tmp_path, 2, "CREATE TABLE s.u (n int)")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    (tmp_path / "0002_step.py").unlink()
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute("DROP TABLE s.schema_floor")
    await connection.close()
    with pytest.raises(StartupError, match="at revision 0002, this program knows up to 0001"):
        await migrate(Secret(postgres_dsn), "s", tmp_path)


async def test_a_table_in_use_is_waited_for_in_short_turns(postgres_dsn: str, tmp_path: Path) -> None:
    """Whoever reads or writes the table meanwhile must not wait behind the migration."""
    revision(tmp_path, 1, "CREATE TABLE s.t (n int)")
    await migrate(Secret(postgres_dsn), "s", tmp_path)
    revision(tmp_path, 2, "ALTER TABLE s.t ADD COLUMN m int")
    holder, other = [await asyncpg.connect(postgres_dsn) for _ in range(2)]
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT * FROM s.t")
        migrating = asyncio.create_task(migrate(Secret(postgres_dsn), "s", tmp_path))
        waiting = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"
        while not await other.fetchval(waiting):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        await other.execute("INSERT INTO s.t VALUES (1)", timeout=10)
        assert not migrating.done()
        await transaction.commit()
        await migrating
        assert await current_revision(Secret(postgres_dsn), "s") == "0002"
    finally:
        await holder.close()
        await other.close()


def test_a_hole_in_the_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a hole"):
        known_revisions(tmp_path)
    revision(tmp_path, 1, "")
    revision(tmp_path, 3, "")
    with pytest.raises(ValueError, match="without a hole"):
        known_revisions(tmp_path)
