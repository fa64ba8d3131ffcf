"""A provider that fails, hangs, lies or comes late costs time, never a second sandbox or one that nobody knows.

S1, S2 and S3 with real rows and real daemons; only the failures are made to order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from services.chassis.errors import HearthError
from services.sandbox.claims import Claim
from services.sandbox.providers.port import (
    InstanceNotFound,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
    StillAlive,
)
from services.sandbox.rows import Key
from services.sandbox.states import Disposition, How, Observed, Tenure
from services.sandbox.store import Renewal
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandbox_parts import Replica, clear, holder, replica
from tests.support.sandboxes import left_below, members

BROKEN = ProviderError("the provider is broken")
AWAY = ProviderUnavailable("503")


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


async def refusal(work: object) -> HearthError:
    with pytest.raises(HearthError) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_an_outage_is_waited_out(one: Replica) -> None:
    one.switches.fail = {"create": [AWAY, AWAY], "restart_daemon": [AWAY]}
    assert (await one.acquire("s", holder=holder())).how is How.CREATED
    assert one.switches.calls.count("create") == 3


async def test_a_create_whose_answer_was_lost_is_found_by_its_name(one: Replica, root: Path) -> None:
    # The first try makes the instance and then says 503; the second finds the name taken.
    create = type(one.provider).create
    tries = 0

    async def once(self: object, request: object) -> object:
        nonlocal tries
        tries += 1
        made = await create(one.provider, request)  # type: ignore[arg-type]
        if tries == 1:
            raise AWAY
        return made

    one.provider.create = once.__get__(one.provider)  # type: ignore[method-assign]
    answer = await one.acquire("s", holder=holder())
    assert answer.how is How.CREATED
    assert tries == 2
    assert len(list(root.glob("hearth-*"))) == 1


async def test_a_refusal_is_told_and_leaves_nothing(one: Replica) -> None:
    one.switches.fail = {"create": [ProviderRefused("over quota", field="resources")]}
    error = await refusal(one.acquire("s", holder=holder()))
    assert (error.code.name, error.reason) == ("FAILED_PRECONDITION", "PROVIDER_REFUSED")
    assert await one.rows() == []


async def test_a_create_that_hangs_ends_in_time_and_what_comes_late_is_deleted(migrated_dsn: str, root: Path) -> None:
    async with replica(migrated_dsn, root, create_deadline=0.5) as one:
        hang = one.switches.pause("create")
        error = await refusal(one.acquire("s", holder=holder()))
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "PROVIDER_UNAVAILABLE")
        assert await one.rows() == []
        hang.set()
        assert (await one.acquire("s", 1, 2, holder=holder())).how is How.CREATED
    await clear(root)


async def test_a_daemon_that_does_not_start_is_told_and_leaves_nothing(one: Replica, root: Path) -> None:
    one.switches.fail = {"restart_daemon": [StillAlive("pid 1")]}
    error = await refusal(one.acquire("s", holder=holder()))
    assert (error.code.name, error.reason) == ("UNAVAILABLE", "DAEMON_UNREACHABLE")
    assert await one.rows() == []
    assert list(root.glob("hearth-*")) == []


async def test_what_cannot_be_shown_dead_is_deleted_and_the_turn_gets_a_new_one(one: Replica) -> None:
    first = await one.acquire("s", 1, holder=holder())
    await one.release("s", 1)
    one.switches.fail = {"restart_daemon": [StillAlive("pid 1")]}
    second = await one.acquire("s", 2, holder=holder())
    assert second.how is How.CREATED
    assert second.sandbox_id != first.sandbox_id
    assert members(first.sandbox_id) == []


async def test_a_start_that_fails_becomes_a_create(one: Replica) -> None:
    await one.acquire("s", 1, holder=holder())
    await one.release("s", 1, reason="IDLE_EXPIRED")
    one.switches.fail = {"start": [BROKEN]}
    assert (await one.acquire("s", 2, holder=holder())).how is How.CREATED


async def test_a_stop_that_fails_becomes_a_delete(one: Replica) -> None:
    answer = await one.acquire("s", holder=holder())
    one.switches.fail = {"stop": [BROKEN]}
    assert await one.release("s", reason="IDLE_EXPIRED") is Disposition.DELETED
    assert members(answer.sandbox_id) == []


async def test_a_delete_that_fails_leaves_an_orphan_that_counts_until_it_is_seen_gone(
    migrated_dsn: str, root: Path
) -> None:
    async with replica(migrated_dsn, root, local_warm_cap=1) as one:
        me = holder()
        first = await one.acquire("s", 1, holder=me)
        assert await one.release("s", 1) is Disposition.PARKED
        one.switches.always = {"stop": BROKEN, "delete": BROKEN}
        assert await one.release("s", 1, reason="IDLE_EXPIRED") is Disposition.ORPHANED
        row = await one.row(first.sandbox_id)
        assert (row.tenure, row.observed) == (Tenure.ORPHAN, Observed.UNKNOWN)
        assert (await one.parts.store.orphans(None))[0] == 1
        assert await one.parts.store.slots_used() == {"local": 1}

        # The session is not held up by it, but its slot is: the next one is stopped instead of parked.
        del one.switches.always["stop"]
        second = await one.acquire("s", 2, holder=me)
        assert second.how is How.CREATED
        assert await one.release("s", 2) is Disposition.STOPPED

        report = await one.parts.reconciler.run(confirm_unknown=False)
        assert (await one.row(first.sandbox_id)).tenure is Tenure.ORPHAN
        assert report.mended == 1
        del one.switches.always["delete"]
        await one.parts.reconciler.run(confirm_unknown=False)
        assert (await one.row(first.sandbox_id)).observed is Observed.GONE
        assert (await one.parts.store.orphans(None))[0] == 0
        assert await one.parts.store.slots_used() == {"local": 0}
        assert members(first.sandbox_id) == []
    await clear(root)


async def test_a_provider_that_does_not_answer_proves_nothing_gone(one: Replica, root: Path) -> None:
    answer = await one.acquire("s", holder=holder())
    next(root.glob("hearth-*")).rename(root / "moved-away")
    one.switches.always = {"get": BROKEN}
    await one.parts.reconciler.run(confirm_unknown=False)
    assert (await one.row(answer.sandbox_id)).observed is Observed.RUNNING
    (root / "moved-away").rename(root / f"hearth-{answer.sandbox_id}")


async def test_an_instance_whose_directory_was_removed_is_still_ended(one: Replica, root: Path) -> None:
    answer = await one.acquire("s", 1, holder=holder())
    next(root.glob("hearth-*")).rename(root / "moved-away")
    await one.parts.reconciler.run(confirm_unknown=False)
    assert (await one.row(answer.sandbox_id)).observed is Observed.RUNNING
    assert await one.release("s", 1, reason="KILLED") is Disposition.DELETED
    assert members(answer.sandbox_id) == []
    (root / "moved-away").rename(root / f"hearth-{answer.sandbox_id}")


async def test_instances_that_change_by_themselves_are_noticed(one: Replica) -> None:
    me = holder()
    stopped = await one.acquire("stopped", 1, holder=me)
    deleted = await one.acquire("deleted", 1, holder=me)
    started = await one.acquire("started", 1, holder=me)
    await one.release("stopped", 1)
    await one.release("started", 1, reason="IDLE_EXPIRED")
    reference = {row.sandbox_id: row.reference for row in await one.rows()}
    await one.provider.stop(reference[stopped.sandbox_id])
    await one.provider.delete(reference[deleted.sandbox_id])
    await one.provider.start(reference[started.sandbox_id])

    report = await one.parts.reconciler.run(confirm_unknown=False)
    assert (report.checked, report.mended, report.unknown) == (3, 3, 0)
    rows = {found: await one.row(found) for found in reference}
    assert (rows[stopped.sandbox_id].observed, rows[stopped.sandbox_id].tenure) == (Observed.STOPPED, Tenure.FREE)
    assert rows[deleted.sandbox_id].observed is Observed.GONE
    assert rows[started.sandbox_id].observed is Observed.STOPPED
    assert (await one.provider.get(reference[started.sandbox_id])).state.name == "STOPPED"
    assert await one.parts.store.slots_used() == {"local": 0}
    assert (await one.parts.reconciler.run(confirm_unknown=False)).mended == 0


async def test_a_list_that_was_slow_mends_nothing_by_what_was(one: Replica) -> None:
    """The sandbox stopped by itself; the rows are read, the provider lists, a turn starts it, the list arrives."""
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    await one.release("s", 1)
    await one.provider.stop((await one.row(answer.sandbox_id)).reference)
    slow = one.switches.pause("list", after=True)
    passing = asyncio.create_task(one.parts.reconciler.run(confirm_unknown=False))
    await one.switches.entered["list"].wait()
    assert (await one.acquire("s", 2, holder=me)).how is How.RESTARTED
    slow.set()
    assert (await passing).mended == 0
    row = await one.row(answer.sandbox_id)
    assert (row.observed, row.tenure) == (Observed.RUNNING, Tenure.ACTIVE)


async def test_unknown_instances_are_deleted_when_old_and_few(migrated_dsn: str, root: Path) -> None:
    async with replica(migrated_dsn, root, create_deadline=0.5) as one:
        keep = await one.acquire("keep", holder=holder())
        ids = [(await one.acquire(f"s{number}", holder=holder())).sandbox_id for number in range(6)]
        await asyncio.sleep(0.5)
        # Their rows are lost, as after a restore of the database.
        async with one.parts.store._pool.acquire() as connection:
            await connection.execute("DELETE FROM sandbox.sandboxes WHERE session <> 'keep'")
        report = await one.parts.reconciler.run(confirm_unknown=False)
        assert (report.unknown, report.refused_unknown) == (6, True)
        assert all(members(sandbox_id) for sandbox_id in ids)
        report = await one.parts.reconciler.run(confirm_unknown=True)
        assert (report.unknown, report.refused_unknown) == (6, False)
        assert not any(members(sandbox_id) for sandbox_id in ids)
        assert members(keep.sandbox_id)
    await clear(root)


async def test_two_replicas_serve_one_claim_as_one(migrated_dsn: str, root: Path) -> None:
    me = holder()
    async with replica(migrated_dsn, root) as one, replica(migrated_dsn, root) as two:
        for epoch in range(1, 4):
            answers = await asyncio.gather(*(part.acquire("s", epoch, holder=me) for part in (one, two, one, two)))
            assert len({(answer.sandbox_id, answer.token, answer.how) for answer in answers}) == 1
            await asyncio.gather(one.release("s", epoch, reason="KILLED"), two.release("s", epoch, reason="KILLED"))
            assert await one.rows() == []
    await clear(root)


@pytest.mark.parametrize("landed", [True, False])
async def test_a_worker_that_died_in_a_create_is_adopted_after_its_deadline(
    migrated_dsn: str, root: Path, landed: bool
) -> None:
    me = holder()
    async with (
        replica(migrated_dsn, root, create_deadline=1.0, start_deadline=1.0) as dead,
        replica(migrated_dsn, root) as alive,
    ):
        dead.switches.pause("create", after=landed)
        lost = asyncio.create_task(dead.acquire("s", holder=me))
        await dead.switches.entered["create"].wait()
        await dead.die()
        assert (await refusal(lost)).reason == "SHUTTING_DOWN"
        answer = await alive.acquire("s", holder=me)
        assert answer.how is (How.RESTARTED if landed else How.CREATED)
        assert answer.stages[0].name == "wait"
        assert [row.sandbox_id for row in await alive.rows()] == [answer.sandbox_id]
        assert len(list(root.glob("hearth-*"))) == 1
    await clear(root)


async def test_without_a_caller_the_reconciler_ends_what_a_dead_worker_left(migrated_dsn: str, root: Path) -> None:
    async with (
        replica(migrated_dsn, root, create_deadline=0.5, start_deadline=0.5) as dead,
        replica(migrated_dsn, root) as alive,
    ):
        dead.switches.pause("create", after=True)
        lost = asyncio.create_task(dead.acquire("s", holder=holder()))
        await dead.switches.entered["create"].wait()
        await dead.die()
        await refusal(lost)
        await alive.parts.reconciler.run(confirm_unknown=False)
        assert len(await alive.rows()) == 1
        await asyncio.sleep(0.6)
        await alive.parts.reconciler.run(confirm_unknown=False)
        assert await alive.rows() == []
        assert list(root.glob("hearth-*")) == []


async def test_a_frozen_worker_that_thaws_after_its_deadline_undoes_its_create(migrated_dsn: str, root: Path) -> None:
    """It wakes up with an instance in its hands while another one serves the session."""
    me = holder()
    async with replica(migrated_dsn, root, create_deadline=60.0) as frozen, replica(migrated_dsn, root) as awake:
        thaw = frozen.switches.pause("create")
        late = asyncio.create_task(frozen.acquire("s", holder=me))
        await frozen.switches.entered["create"].wait()
        async with awake.parts.store._pool.acquire() as connection:
            await connection.execute("UPDATE sandbox.sandboxes SET deadline = now() - interval '1 second'")
        answer = await awake.acquire("s", holder=me)
        assert answer.how is How.CREATED
        thaw.set()
        # It finds its row gone, deletes what it made, and answers with what its claim has.
        assert (await late).sandbox_id == answer.sandbox_id
        assert [path.name for path in root.glob("hearth-*")] == [f"hearth-{answer.sandbox_id}"]
    await clear(root)


async def test_a_release_during_a_restart_stops_it_again(one: Replica) -> None:
    answer = await one.acquire("s", 1, holder=holder())
    await one.release("s", 1)
    hold = one.switches.pause("restart_daemon", after=True)
    acquiring = asyncio.create_task(one.acquire("s", 2, holder=holder()))
    await one.switches.entered["restart_daemon"].wait()
    releasing = asyncio.create_task(one.release("s", 2, reason="IDLE_EXPIRED"))
    await asyncio.sleep(0.1)
    assert not releasing.done()
    hold.set()
    assert (await refusal(acquiring)).reason == "FENCED"
    assert await releasing is Disposition.STOPPED
    assert members(answer.sandbox_id) == []


async def test_a_provider_that_says_not_found_is_believed(one: Replica) -> None:
    answer = await one.acquire("s", 1, holder=holder())
    one.switches.fail = {"stop": [InstanceNotFound("404")]}
    assert await one.release("s", 1, reason="IDLE_EXPIRED") is Disposition.DELETED
    assert (await one.row(answer.sandbox_id)).observed is Observed.GONE


async def test_a_sandbox_on_its_way_out_still_counts_against_the_warm_cap(migrated_dsn: str, root: Path) -> None:
    me = holder()
    async with replica(migrated_dsn, root, local_warm_cap=1) as one:
        for session in ("first", "second", "third"):
            await one.acquire(session, holder=me)
        assert await one.release("first") is Disposition.PARKED
        slow = one.switches.pause("stop")
        releasing = asyncio.create_task(one.release("second"))
        await one.switches.entered["stop"].wait()
        # The first one is being stopped to make room for the second: there is no room for a third.
        assert await one.parts.store.slots_used() == {"local": 1}
        third = asyncio.create_task(one.release("third"))
        done, _ = await asyncio.wait([third], timeout=0.3)
        assert not done, "it is being stopped itself"
        slow.set()
        assert await releasing is Disposition.PARKED
        assert await third is Disposition.STOPPED
        assert await one.parts.store.slots_used() == {"local": 1}
    await clear(root)


async def test_two_that_take_a_warm_slot_for_one_sandbox_at_once_have_the_same(one: Replica, migrated_dsn: str) -> None:
    answer = await one.acquire("s", holder=holder())
    store = one.parts.store
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid))"
    other = await asyncpg.connect(migrated_dsn)
    try:
        async with other.transaction():
            assert await other.fetchval(store._sql.take_slot, "local", 10, answer.sandbox_id) == 1
            taking = asyncio.create_task(store.take_slot("local", 10, answer.sandbox_id))
            async with asyncio.timeout(10):
                while not await other.fetchval(waiting, other.get_server_pid()):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
        assert await taking
    finally:
        await other.close()
    assert await store.slots_used() == {"local": 1}
    assert await one.release("s") is Disposition.PARKED
    assert await store.slots_used() == {"local": 1}


async def test_a_turn_that_takes_a_sandbox_first_saves_it_from_eviction(migrated_dsn: str, root: Path) -> None:
    me = holder()
    async with replica(migrated_dsn, root, local_warm_cap=1) as one:
        first = await one.acquire("first", 1, holder=me)
        await one.acquire("second", 1, holder=me)
        assert await one.release("first", 1) is Disposition.PARKED
        victim = await one.parts.store.least_recently_parked("local")
        assert victim is not None
        assert (await one.acquire("first", 2, holder=me)).how is How.ATTACHED
        # Whoever chose the victim before that loses the compare-and-set.
        assert await one.parts.reconciler._transitions.stop(victim) is None
        assert await one.release("second", 1) is Disposition.PARKED
        assert members(first.sandbox_id)
    await clear(root)


async def test_a_renewal_that_arrives_last_saves_the_lease(one: Replica) -> None:
    me = holder()
    answer = await one.acquire("s", 1, holder=me)
    seen = await one.row(answer.sandbox_id)
    await one.parts.store.renew(me, [Renewal(Key("p1", "s"), Claim(1, 1), active=True)], refresh_after=240)
    assert await one.parts.releaser.lapse(answer.sandbox_id, seen.claim, seen.renewals) is None
    assert members(answer.sandbox_id)
    now = await one.row(answer.sandbox_id)
    assert await one.parts.releaser.lapse(answer.sandbox_id, Claim(2, 1), now.renewals) is None
    assert await one.parts.releaser.lapse(answer.sandbox_id, now.claim, now.renewals) is not None
    assert members(answer.sandbox_id) == []
