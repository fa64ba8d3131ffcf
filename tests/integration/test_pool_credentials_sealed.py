"""A value of a credential is nowhere but in its agent: not in a row, an event, a log, a trace, a file or an answer; and
it outlives a change of the key that seals it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import psutil
import pytest

from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from services.chassis.clock import SystemClock
from services.chassis.errors import HearthError
from services.chassis.migrations import migrate
from services.chassis.postgres import Pool, create_pool
from services.pool.credentials import place_of
from services.pool.credentials_store import Credentials
from services.pool.sealing import Sealer, new_key, parse_keys
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA
from tests.contract.pool.house import Backend, House, key, summary
from tests.support.servers import Servers

# Long and random, so that every text in which it turns up was made from it.
VALUES = [f"sk-{uuid.uuid4().hex}{uuid.uuid4().hex}" for _ in range(4)]


def forms(value: str) -> list[bytes]:
    """What a value may look like to somebody who searches for it."""
    raw = value.encode()
    # A base64 text in which it stands somewhere in the middle has one of three forms, ends aside.
    shifted = [base64.b64encode(b"x" * shift + raw)[4 : -(4 if shift else 1) - 3] for shift in range(3)]
    return [raw, raw.hex().encode(), raw[::-1], *shifted]


def found_in(content: bytes) -> list[int]:
    """Which of the values stand in some bytes."""
    return [number for number, value in enumerate(VALUES) if any(form in content for form in forms(value))]


async def database(dsn: str) -> bytes:
    """Every row of every table, as text."""
    connection = await asyncpg.connect(dsn)
    try:
        tables = await connection.fetch(
            "SELECT schemaname, tablename FROM pg_tables WHERE schemaname IN ('pool', 'history', 'sandbox')"
        )
        found = b""
        for schema, table in tables:
            rows = await connection.fetch(f'SELECT * FROM "{schema}"."{table}"')
            for row in rows:
                for value in row.values():
                    found += b"\n" + (value if isinstance(value, bytes) else str(value).encode())
        return found
    finally:
        await connection.close()


@pytest.fixture
def loud_house(servers: Servers) -> Iterator[House]:
    """Services that log and trace all they can."""
    dsn, directory = servers.create_database(migrated=True), servers.scratch()
    env = {"HEARTH_SECRET_KEY": new_key(), "HEARTH_LOG_LEVEL": "DEBUG", "HEARTH_LOG_FORMAT": "json"}
    found = House(directory, dsn, servers.empty_valkey(), env)
    for name, process in found.processes.items():
        process.env["HEARTH_TRACE_FILE"] = str(directory / f"{name}.traces")
    try:
        found.start_blocking()
        yield found
    finally:
        found.stop()
        servers.drop_database(dsn)


def spec(names: list[str]) -> sessions.SessionSpec:
    """Credentials in all places that there are."""
    model, tool, web = (sessions.CredentialBinding(credential=one, target="A_KEY") for one in names)
    return sessions.SessionSpec(
        credentials=[model],
        mcp_servers=[
            sessions.McpServer(name="tool", stdio=sessions.McpStdio(command=["true"], credentials=[tool])),
            sessions.McpServer(name="web", http=sessions.McpHttp(url="http://127.0.0.1:9", credentials=[web])),
        ],
    )


async def test_w_c10_w_e10_no_value_is_anywhere_but_in_its_agent(loud_house: House) -> None:
    backend, names = Backend(loud_house), ["model", "tool", "web"]
    answers: list[object] = []
    try:
        for number, name in enumerate(names):
            request = calls.PutCredentialRequest(project="acme", request_id=name, name=name, value=VALUES[number])
            answers += [await backend.sessions.PutCredential(request) for _ in range(2)]
        session = key()
        first = await backend.run(session, "hello", spec=spec(names))
        agent = psutil.Process(json.loads(summary(first).agent_report_json)["hearth.dev/agent"]["pid"])
        assert agent.environ()["A_KEY"] == VALUES[0]
        rotated = calls.PutCredentialRequest(project="acme", request_id="again", name="web", value=VALUES[3])
        answers.append(await backend.sessions.PutCredential(rotated))
        await backend.run(session, "error something broke")
        await backend.run(session, "hello")
        await backend.idle_entry(session)
        answers += [
            await backend.sessions.ListCredentials(calls.ListCredentialsRequest(project="acme")),
            await backend.session(session),
            *(await backend.events(session)),
        ]
    finally:
        await backend.close()
    assert found_in("".join(map(str, answers)).encode()) == []
    assert found_in(await database(loud_house.dsn)) == []
    for process in loud_house.processes.values():
        process.stop()
    files = [path for path in Path(loud_house.directory).rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in files} >= {"pool.traces", "sandbox.traces"}
    assert {str(path): found for path in files if (found := found_in(path.read_bytes()))} == {}


@pytest.fixture
async def rows(postgres_dsn: str) -> object:
    """A schema and its connections."""
    await migrate(Secret(postgres_dsn), SCHEMA, "services.pool")
    async with await create_pool(
        PoolSettings(postgres_dsn=Secret(postgres_dsn)), "test", server_settings=PLANNER
    ) as pool:
        yield pool


def bound(name: str) -> sessions.SessionSpec:
    """A spec with one credential."""
    return sessions.SessionSpec(credentials=[sessions.CredentialBinding(credential=name, target="A")])


async def value_of(credentials: Credentials, name: str) -> str:
    """What an agent would be given."""
    (slot,) = (await credentials.given("p", bound(name))).slots()
    return slot.value


async def test_a_key_is_rotated_and_dropped(rows: Pool) -> None:
    old, new = (parse_keys(new_key())[0] for _ in range(2))
    before, between, after = (Credentials(rows, Sealer(keys), SystemClock()) for keys in ([old], [new, old], [new]))
    for number in range(3):
        await before.put("p", f"r{number}", f"c{number}", Secret(VALUES[number]), None)
    assert await value_of(between, "c1") == VALUES[1]
    with pytest.raises(HearthError, match="HEARTH_SECRET_KEY") as caught:
        await after.given("p", bound("c1"))
    assert caught.value.reason == "SECRET_KEY_MISSING"
    assert VALUES[1] not in str(caught.value)
    # A retry is known by either key.
    assert await between.put("p", "r1", "c1", Secret(VALUES[1]), None) is not None
    with pytest.raises(HearthError, match="request_id"):
        await between.put("p", "r1", "c1", Secret(VALUES[2]), None)
    generations = [one.value_generation for one in await between.listed("p", "", 10)]
    await between.seal_anew()
    assert [await value_of(after, f"c{number}") for number in range(3)] == VALUES[:3]
    assert [one.value_generation for one in await after.listed("p", "", 10)] == generations


async def test_a_row_that_was_moved_does_not_open(rows: Pool) -> None:
    credentials = Credentials(rows, Sealer(parse_keys(new_key())), SystemClock())
    await credentials.put("p", "1", "mine", Secret("one"), None)
    await credentials.put("q", "1", "theirs", Secret("two"), datetime(2100, 1, 1, tzinfo=UTC))
    await rows.execute("UPDATE pool.credential SET sealed = (SELECT sealed FROM pool.credential WHERE project = 'q')")
    with pytest.raises(HearthError):
        await credentials.given("p", bound("mine"))


async def test_many_credentials_are_sealed_anew(rows: Pool) -> None:
    old, new = (parse_keys(new_key())[0] for _ in range(2))
    before, between = (
        Credentials(rows, Sealer([old]), SystemClock()),
        Credentials(rows, Sealer([new, old]), SystemClock()),
    )
    for number in range(205):
        await before.put("p", str(number), f"c{number}", Secret(os.urandom(8).hex()), None)
    await between.seal_anew()
    sealed = await rows.fetch("SELECT sealed FROM pool.credential")
    assert all(Sealer([new]).newest(row["sealed"]) for row in sealed)


async def test_values_that_are_stored_at_once_are_stored_one_after_the_other(rows: Pool) -> None:
    credentials = Credentials(rows, Sealer(parse_keys(new_key())), SystemClock())
    stored = await asyncio.gather(
        *(credentials.put("p", f"r{number}", "a", Secret(f"value {number % 2}"), None) for number in range(20))
    )
    generations = [one.generation for one in stored if one is not None]
    assert len(set(generations)) == 20
    (left,) = await credentials.listed("p", "", 10)
    assert left.generation == max(generations)
    # Each value that follows another one is told apart from it.
    in_order = sorted((one for one in stored if one is not None), key=lambda one: one.generation)
    values = [await _opened(credentials, one.sealed, one.value_generation) for one in in_order]
    for (before, one), (after, other) in itertools.pairwise(zip(values, in_order, strict=True)):
        assert (before == after) == (one.value_generation == other.value_generation)


async def _opened(credentials: Credentials, sealed: bytes, value_generation: int) -> bytes:
    assert credentials._sealer is not None
    return credentials._sealer.open(sealed, place_of("p", "a", value_generation))


async def test_generations_never_come_back(rows: Pool) -> None:
    credentials = Credentials(rows, Sealer(parse_keys(new_key())), SystemClock())
    seen = set()
    for number in range(3):
        stored = await credentials.put("p", f"put {number}", "a", Secret("same"), None)
        assert stored is not None
        seen.add(stored.value_generation)
        await credentials.delete("p", f"delete {number}", "a")
    assert len(seen) == 3
