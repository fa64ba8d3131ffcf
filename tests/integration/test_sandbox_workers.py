"""A dead worker is seen at once by the lock that it lost; one that lives is not taken for dead.

Beside it: what comes later than its row was seen gone, what no row knows, and addresses that changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from hearth.secret import Secret
from services.chassis.clock import SystemClock
from services.chassis.migrations import migrate
from services.sandbox.claims import Claim
from services.sandbox.compatibility import Spec
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import Address, CreateRequest, DaemonRequest, ProviderError
from services.sandbox.providers.processes import end as real_end
from services.sandbox.rows import Key, instance_name
from services.sandbox.states import How, Observed, Tenure
from services.sandbox.store import Renewal
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandbox_parts import Replica, clear, holder, replica
from tests.support.sandboxes import left_below, members, new_id, until
from tests.support.servers import with_database

GONE_AFTER = 0.3
HOUR: dict[str, Any] = {"create_deadline": 3600.0, "start_deadline": 3600.0, "worker_gone": GONE_AFTER}


@pytest.fixture
def root(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_MARKER, marker())
    return scratch / "sandboxes"


@pytest_asyncio.fixture
async def one(migrated_dsn: str, root: Path) -> AsyncIterator[Replica]:
    async with replica(migrated_dsn, root) as found:
        yield found
    await clear(root)
    assert left_below(root) == []


async def in_a_create(found: Replica, *, holding: str) -> asyncio.Task[object]:
    """An Acquire that hangs in its create."""
    found.switches.pause("create", after=True)
    acquiring: asyncio.Task[object] = asyncio.create_task(found.acquire("s", holder=holding))
    await found.switches.entered["create"].wait()
    return acquiring


async def seen_dead(observer: Replica) -> bool:
    return bool(await observer.parts.workers.look())


async def test_the_work_of_a_dead_process_is_free_long_before_its_deadline(migrated_dsn: str, root: Path) -> None:
    me = holder()
    async with replica(migrated_dsn, root, **HOUR) as dead, replica(migrated_dsn, root, **HOUR) as alive:
        lost = await in_a_create(dead, holding=me)
        assert await alive.parts.workers.look() == []
        await dead.die()
        await asyncio.wait([lost])
        waiting = asyncio.create_task(alive.acquire("s", holder=me))
        await until(lambda: seen_dead(alive))
        answer = await waiting
        assert answer.how is How.RESTARTED
        assert [row.sandbox_id for row in await alive.rows()] == [answer.sandbox_id]
    await clear(root)


async def test_a_process_that_lives_keeps_its_work_also_when_its_connection_is_cut(
    migrated_dsn: str, root: Path
) -> None:
    me = holder()
    async with replica(migrated_dsn, root, **HOUR) as busy, replica(migrated_dsn, root, **HOUR) as other:
        acquiring = await in_a_create(busy, holding=me)
        for _ in range(5):
            assert await other.parts.workers.look() == []
            await asyncio.sleep(GONE_AFTER / 4)
        connection = await asyncpg.connect(migrated_dsn)
        # Everything that holds a lock of this kind is cut, of both of them.
        cut = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'"
            " AND pid <> pg_backend_pid()"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert cut == 2

        async def held_again() -> bool:
            return bool(
                await connection.fetchval(
                    "SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory'"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
            )

        await until(held_again)
        await connection.close()
        for _ in range(5):
            assert await other.parts.workers.look() == []
            await asyncio.sleep(GONE_AFTER / 4)
        busy.switches.hold_after["create"].set()
        assert (await acquiring).how is How.CREATED  # type: ignore[attr-defined]
    await clear(root)


async def test_a_process_outlasts_a_server_that_takes_no_connection(
    migrated_dsn: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(migrated_dsn, root):
        watching = await asyncpg.connect(migrated_dsn)
        name = await watching.fetchval("SELECT current_database()")
        holders = (
            "FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        elsewhere = await asyncpg.connect(with_database(migrated_dsn, "postgres"))
        await elsewhere.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        assert await watching.fetchval(f"SELECT count(pg_terminate_backend(pid)) {holders}") == 1

        async def refused() -> bool:
            return "no connection for the lock of this process" in caplog.text

        async def held_again() -> bool:
            return bool(await watching.fetchval(f"SELECT count(*) = 1 {holders}"))

        await until(refused)
        assert not await held_again()
        await elsewhere.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        await until(held_again)
        await elsewhere.close()
        await watching.close()


async def test_one_that_was_taken_for_dead_and_finishes_first_keeps_its_work(migrated_dsn: str, root: Path) -> None:
    me = holder()
    async with replica(migrated_dsn, root, **HOUR) as busy:
        acquiring = await in_a_create(busy, holding=me)
        async with busy.parts.store._pool.acquire() as connection:
            await connection.execute("UPDATE sandbox.sandboxes SET deadline = now() - interval '1 second'")
        busy.switches.hold_after["create"].set()
        assert (await acquiring).how is How.CREATED  # type: ignore[attr-defined]
    await clear(root)


async def test_a_create_that_lands_after_it_was_given_up_is_an_orphan_until_it_is_seen_gone(
    one: Replica, root: Path
) -> None:
    # Its row was seen gone, and then the provider makes it after all.
    first = await one.acquire("s", holder=holder())
    await one.release("s", reason="KILLED")
    deployment = await one.parts.store.deployment_id()
    labels = {"hearth-deployment": deployment, "hearth-project": "p1", "hearth-session": "s"}
    name = instance_name(first.sandbox_id)
    await one.provider.create(CreateRequest(name, labels, Key("p1", "s"), Spec("local", "scripted")))
    one.switches.fail = {"delete": [ProviderError("not now")]}
    # It is young, and all the same not left: there can be nobody who waits for it.
    report = await one.parts.reconciler.run(confirm_unknown=False)
    assert (report.unknown, report.refused_unknown) == (0, False)
    (orphan,) = await one.rows()
    assert (orphan.tenure, orphan.observed, orphan.key) == (Tenure.ORPHAN, Observed.UNKNOWN, Key("p1", "s"))
    assert orphan.sandbox_id != first.sandbox_id
    assert (await one.parts.store.orphans(None))[0] == 1
    # It stands in nobody's way.
    assert (await one.acquire("s", 2, holder=holder())).how is How.CREATED
    await one.release("s", 2, reason="KILLED")
    await one.parts.reconciler.run(confirm_unknown=False)
    assert (await one.parts.store.orphans(None))[0] == 0
    assert list(root.glob("hearth-*")) == []


async def test_an_unknown_instance_that_cannot_be_deleted_is_counted(one: Replica, root: Path) -> None:
    labels = {"hearth-deployment": await one.parts.store.deployment_id()}
    name = instance_name(new_id())
    made = await one.provider.create(CreateRequest(name, labels, Key("p1", "s"), Spec("local", "scripted")))
    one.parts.reconciler._limits = dataclasses.replace(one.parts.reconciler._limits, young=0.0)
    one.switches.always = {"delete": ProviderError("no")}
    for _ in range(2):
        await one.parts.reconciler.run(confirm_unknown=False)
        (orphan,) = await one.rows()
        assert (orphan.tenure, orphan.key, orphan.provider_id) == (Tenure.ORPHAN, None, made.provider_id)
        assert (await one.parts.store.orphans(None))[0] == 1
    one.switches.always = {}
    await one.parts.reconciler.run(confirm_unknown=False)
    assert await one.rows() == []


async def test_an_address_that_changed_is_looked_up_before_a_daemon_is_taken_for_lost(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    await one.release("s", 1)
    # What leads to the daemon is out of date, as a preview token is; the provider knows the new one.
    async with one.parts.store._pool.acquire() as connection:
        await connection.execute(
            "UPDATE sandbox.sandboxes SET endpoint_url = 'http://127.0.0.1:9', version = version + 1"
        )

    async def endpoint(reference: str) -> Address:
        return Address(answer.url, {"X-New": "1"})

    monkeypatch.setattr(one.provider, "endpoint", endpoint)
    before = {process.pid for process in members(answer.sandbox_id)}
    again = await one.acquire("s", 2, holder=me)
    assert (again.how, again.url, again.headers) == (How.ATTACHED, answer.url, {"X-New": "1"})
    assert {process.pid for process in members(answer.sandbox_id)} == before
    # It is written down: nobody has to look again.
    assert (await one.row(answer.sandbox_id)).headers == {"X-New": "1"}


async def test_activity_is_told_of_turns_and_once_of_a_park(one: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def refresh_activity(reference: str) -> None:
        told.append(reference)

    monkeypatch.setattr(one.provider, "refresh_activity", refresh_activity)
    me = holder()
    await one.acquire("active", holder=me)
    await one.acquire("parked", holder=me)
    await one.release("parked")
    await one.parts.works.drain()
    (parked,) = told
    reference = {row.reference: row.tenure for row in await one.rows()}
    assert reference[parked] is Tenure.PARKED

    async def refreshes(after: float) -> list[str]:
        renewals = [Renewal(Key("p1", name), Claim(1, 1), active=name == "active") for name in ("active", "parked")]
        results = await one.parts.store.renew(me, renewals, refresh_after=after)
        assert all(result.sandbox_id for result in results)
        return [result.provider_id for result in results if result.refresh]

    assert await refreshes(after=240) == [], "not yet"
    (active,) = await refreshes(after=0)
    assert reference[active] is Tenure.ACTIVE
    # A holder that calls a parked one active keeps nothing alive by it.
    async with one.parts.store._pool.acquire() as connection:
        await connection.execute("UPDATE sandbox.sandboxes SET refreshed_at = now() - interval '1 hour'")
    renewal = [Renewal(Key("p1", "parked"), Claim(1, 1), active=True)]
    assert [result.refresh for result in await one.parts.store.renew(me, renewal, refresh_after=240)] == [False]


async def test_rows_of_before_are_carried_over(postgres_dsn: str, tmp_path: Path) -> None:
    """A sandbox of the first schema is found by the second; nobody takes its network policy for a known one."""
    versions = Path("services/sandbox/migrations/versions")
    for part in ("0001_sandboxes.py", "0001_sandboxes.sql"):
        (tmp_path / part).write_bytes((versions / part).read_bytes())
    await migrate(Secret(postgres_dsn), "sandbox", tmp_path)
    connection = await asyncpg.connect(postgres_dsn)
    sandbox_id = new_id()
    await connection.execute(
        "INSERT INTO sandbox.sandboxes (sandbox_id, project, session, provider, desired, observed, tenure, holder,"
        " claim_epoch, claim_attempt, token, endpoint_url) VALUES ($1, 'p1', 's', 'local', 'RUNNING', 'RUNNING',"
        " 'PARKED', $2, 3, 1, 't', 'http://127.0.0.1:9')",
        sandbox_id,
        new_id(),
    )
    await migrate(Secret(postgres_dsn), "sandbox", "services.sandbox")
    row = await connection.fetchrow("SELECT * FROM sandbox.sandboxes WHERE sandbox_id = $1", sandbox_id)
    assert row is not None
    assert (row["network"], row["claim_epoch"], row["tenure"]) == ("?", 3, "PARKED")
    assert await connection.fetchval("SELECT count(*) FROM sandbox.breakers") == 0
    await connection.close()


async def test_one_stops_and_starts_five_times_and_keeps_its_files(one: Replica) -> None:
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    kept = Path(answer.workspace) / "kept"
    kept.write_bytes(bytes(range(256)) * 4096)
    for epoch in range(2, 7):
        await one.release("s", epoch - 1, reason="IDLE_EXPIRED")
        again = await one.acquire("s", epoch, holder=me)
        assert (again.how, again.sandbox_id) == (How.RESTARTED, answer.sandbox_id)
        assert kept.read_bytes() == bytes(range(256)) * 4096


async def test_what_an_agent_remembers_outlives_its_sandbox_and_logins_do_not(one: Replica) -> None:
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    home = Path(answer.workspace) / ".home"
    for path in (".codex/sessions/rollout.jsonl", ".codex/auth.json", ".claude/.credentials.json"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("x")
    await one.release("s", 1, reason="KILLED")
    assert (home / ".codex/sessions/rollout.jsonl").exists()
    assert not (home / ".codex/auth.json").exists()
    assert not (home / ".claude/.credentials.json").exists()
    # Nor does one that somebody put there meanwhile reach the next daemon.
    (home / ".codex/auth.json").write_text("x")
    await one.acquire("s", 2, holder=me)
    assert not (home / ".codex/auth.json").exists()


async def test_one_that_was_frozen_in_a_restart_neither_kills_nor_joins_the_daemon_that_came_after_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, awake = (LocalProvider(root, SystemClock(), inherit=[RUN_MARKER]) for _ in range(2))
    key, sandbox_id = Key("p1", "s"), new_id()
    made = await awake.create(CreateRequest(instance_name(sandbox_id), {}, key, Spec("local", "scripted")))

    def request(token: str) -> DaemonRequest:
        return DaemonRequest(token=Secret(token), key=key, agents={}, env={}, secrets={})

    await awake.restart_daemon(made.provider_id, request("first"))
    for held in ("before the kill", "before the start"):
        stopped, thaw = asyncio.Event(), asyncio.Event()

        async def freezing_end(*given: object, held: str = held, **more: object) -> None:
            if held == "before the kill":
                stopped.set()  # noqa: B023 - awaited within the round
                await thaw.wait()  # noqa: B023
            await real_end(*given, **more)  # type: ignore[arg-type]
            if held == "before the start":
                stopped.set()  # noqa: B023
                await thaw.wait()  # noqa: B023

        monkeypatch.setattr("services.sandbox.providers.local.end", freezing_end)
        late = asyncio.create_task(frozen.restart_daemon(made.provider_id, request(f"late {held}")))
        await stopped.wait()
        monkeypatch.setattr("services.sandbox.providers.local.end", real_end)
        await awake.restart_daemon(made.provider_id, request(f"new {held}"))
        before = {process.pid for process in members(sandbox_id)}
        assert len(before) == 1
        thaw.set()
        with pytest.raises(ProviderError, match="another daemon"):
            await late
        assert {process.pid for process in members(sandbox_id)} == before
    await awake.delete(made.provider_id)
    await awake.close()
    await frozen.close()
    assert left_below(root) == []


async def test_a_claim_that_was_overtaken_begins_nothing(one: Replica) -> None:
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    await one.release("s", 1)
    row, store = await one.row(answer.sandbox_id), one.parts.store
    # Both were admitted, the higher one last; the lower one has decided by what it read before that.
    for epoch in (2, 3):
        assert (await store.admit(Key("p1", "s"), Claim(epoch, 1), me)).admitted
    lower = dataclasses.replace(row, claim=Claim(2, 1), tenure=Tenure.ACTIVE, holder=me)
    assert await store.move(row, lower, while_highest=True) is None
    assert await store.move(row, dataclasses.replace(lower, claim=Claim(3, 1)), while_highest=True) is not None
    await one.release("s", 3, reason="KILLED")
    for epoch in (4, 5):
        assert (await store.admit(Key("p1", "s"), Claim(epoch, 1), me)).admitted
    intent = dataclasses.replace(lower, sandbox_id=new_id(), claim=Claim(4, 1))
    assert await store.insert(intent, deadline=60) is None
    written = await store.insert(dataclasses.replace(intent, claim=Claim(5, 1)), deadline=60)
    assert written is not None
    await one.parts.reconciler._transitions.delete(written)
