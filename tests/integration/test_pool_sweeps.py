"""What is found in the rows every second is found every second, whatever other services the pool waits for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import asyncpg
import grpc.aio
import pytest
import pytest_asyncio

from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import session_pb2
from tests.contract.pool.house import Backend, House, eventually, frozen, key
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[House]:
    """Services of which one is frozen."""
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url).running() as found:
        yield found


@pytest_asyncio.fixture
async def backend(house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(house)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def database(house: House) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """The rows themselves."""
    connection = await asyncpg.connect(house.dsn)
    yield connection
    await connection.close()


async def leave_waiting(database: asyncpg.Connection[asyncpg.Record], session: session_pb2.SessionKey) -> str:
    """An execution that was admitted by a process that died before it told anybody."""
    execution_id = str(uuid.uuid4())
    async with database.transaction():
        epoch = await database.fetchval(
            "UPDATE pool.session SET epoch = epoch + 1, execution_id = $3, holder = NULL"
            " WHERE project = $1 AND session = $2 RETURNING epoch",
            session.project,
            session.session,
            execution_id,
        )
        await database.execute(
            "INSERT INTO pool.execution (execution_id, project, session, epoch, admitted_epoch, state)"
            " VALUES ($1, $2, $3, $4, $4, 'PENDING')",
            execution_id,
            session.project,
            session.session,
            epoch,
        )
    return execution_id


async def test_what_was_left_waiting_is_picked_up_while_deletions_wait_for_the_sandbox_service(
    house: House, backend: Backend, database: asyncpg.Connection[asyncpg.Record]
) -> None:
    deleted, waiting = [key() for _ in range(3)], [key() for _ in range(4)]
    await asyncio.gather(*(backend.run(session, "hello") for session in [*deleted, *waiting]))
    # Until then the sandbox service is asked to take back what their turns used.
    await asyncio.gather(*(backend.idle_entry(session) for session in [*deleted, *waiting]))
    names = [session.session for session in deleted]
    with frozen(house, "sandbox"):
        for session in deleted:
            request = calls.DeleteSessionRequest(session=session, request_id="d")
            with pytest.raises(grpc.aio.AioRpcError):
                await backend.sessions.DeleteSession(request, timeout=1)
        due = "UPDATE pool.session SET deleted_at = now() - interval '1 minute' WHERE session = ANY($1)"
        assert await database.execute(due, names) == f"UPDATE {len(names)}"
        # Each of them takes one more look, of which no deletion may be a part.
        for session in waiting:
            execution_id = await leave_waiting(database, session)

            async def picked_up(execution_id: str = execution_id) -> bool:
                row = await database.fetchrow("SELECT tries FROM pool.execution WHERE execution_id = $1", execution_id)
                return row is not None and row["tries"] == 1

            await eventually(picked_up)
        undone = "SELECT count(*) FROM pool.session WHERE session = ANY($1) AND deleted_at IS NOT NULL"
        assert await database.fetchval(f"{undone} AND purged_at IS NULL", names) == len(names)

    async def purged() -> bool:
        return bool(await database.fetchval(f"{undone} AND purged_at IS NOT NULL", names) == len(names))

    await eventually(purged, timeout=60)
