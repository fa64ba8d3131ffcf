"""A pool's schema that holds data goes forward: what was there stays as it was, and what is new works beside it."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from hearth.secret import Secret
from services.chassis.clock import SystemClock, SystemIds
from services.chassis.migrations import current_revision, migrate
from services.chassis.postgres import create_pool
from services.pool.attachments import NewAttachment
from services.pool.credentials_store import Credentials
from services.pool.rows import Key
from services.pool.sealing import Sealer, new_key, parse_keys
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, Store

VERSIONS = Path(__file__).resolve().parents[2] / "services" / "pool" / "migrations" / "versions"
KEY = Key("acme", "old")
EXECUTION, INPUT, COMMAND = (SystemIds().new() for _ in range(3))


def up_to(number: int, directory: Path) -> Path:
    """The revisions of an earlier release."""
    versions = directory / "migrations" / "versions"
    versions.mkdir(parents=True)
    for path in VERSIONS.glob("[0-9]*"):
        if int(path.name[:4]) <= number:
            shutil.copy(path, versions)
    return versions


async def fill(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """A session with something in every table of the first revision."""
    await connection.execute("INSERT INTO pool.session (project, session, epoch) VALUES ($1, $2, 7)", *KEY)
    await connection.execute(
        "INSERT INTO pool.execution (execution_id, project, session, epoch, admitted_epoch, state, outcome)"
        " VALUES ($1, $2, $3, 7, 7, 'TERMINAL', 'COMPLETED')",
        EXECUTION,
        *KEY,
    )
    await connection.execute(
        "INSERT INTO pool.input (input_id, project, session, state, content, order_key, execution_id)"
        " VALUES ($1, $2, $3, 'PROMOTED', '', 1, $4)",
        INPUT,
        *KEY,
        EXECUTION,
    )
    await connection.execute(
        "INSERT INTO pool.command (command_id, project, session, kind, state, outcome)"
        " VALUES ($1, $2, $3, 'CANCEL', 'OBSOLETE', 'NOT_RUNNING')",
        COMMAND,
        *KEY,
    )
    for request_id, column, made in (("r1", "input_id", INPUT), ("r2", "command_id", COMMAND)):
        await connection.execute(
            f"INSERT INTO pool.request (project, session, request_id, method, fingerprint, {column})"
            " VALUES ($1, $2, $3, 'X', '\\x01', $4)",
            *KEY,
            request_id,
            made,
        )


async def test_data_of_the_first_revision_goes_forward(postgres_dsn: str, tmp_path: Path) -> None:
    await migrate(Secret(postgres_dsn), SCHEMA, up_to(1, tmp_path))
    connection = await asyncpg.connect(postgres_dsn)
    try:
        await fill(connection)
        tables = ("session", "execution", "input", "command")
        before = {table: await connection.fetch(f"SELECT * FROM pool.{table}") for table in tables}
        await migrate(Secret(postgres_dsn), SCHEMA, "services.pool")
        assert await current_revision(Secret(postgres_dsn), SCHEMA) == "0006"
        after = {table: await connection.fetch(f"SELECT * FROM pool.{table}") for table in tables}
        assert after == before
    finally:
        await connection.close()
    settings = PoolSettings(postgres_dsn=Secret(postgres_dsn))
    async with await create_pool(settings, "test", server_settings=PLANNER) as pool:
        store, data = Store(pool), b"data"
        new = NewAttachment(KEY, "r3", b"\x02", "a.txt", "text/plain", b"digest", data)
        async with store.changing(KEY) as changing:
            assert changing is not None
            known = (await changing.view("r1")).request
            assert known is not None
            assert (known.input_id, known.attachment_id) == (INPUT, None)
            await changing.attach(EXECUTION, new)
            await changing.insert_request("r3", "PutAttachment", b"\x02", attachment_id=EXECUTION)
            made = (await changing.view("r3")).request
            assert made is not None
            assert made.attachment_id == EXECUTION
        assert await store.attachment_content(KEY, EXECUTION) == data
        credentials = Credentials(pool, Sealer(parse_keys(new_key())), SystemClock())
        stored = await credentials.put(KEY.project, "r", "a", Secret("value"), datetime(2100, 1, 1, tzinfo=UTC))
        assert stored is not None
        assert [one.name for one in await credentials.listed(KEY.project, "", 10)] == ["a"]
