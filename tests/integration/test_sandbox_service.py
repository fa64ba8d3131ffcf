"""The sandbox service as a process that is killed, frozen and stopped, with leases that run out quickly.

S1 and S2: sandboxes outlive the service and are found again, what nobody renews is ended, a create that a kill cut in
two leaves one sandbox or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from tests.conftest import StartService
from tests.support.exhaustive import sampled
from tests.support.processes import ServiceProcess
from tests.support.sandboxes import (
    FAST,
    Daemon,
    Sandboxes,
    agents_with_stubborn,
    alive,
    connected,
    disposition,
    how,
    left_below,
    members,
    new_id,
    refused,
    service_environment,
    start_stubborn,
    state,
    until,
)

ME = new_id()
LEASE = float(FAST["HEARTH_LEASE"])


@pytest.fixture
def root(scratch: Path) -> Path:
    return scratch / "sandboxes"


@pytest_asyncio.fixture
async def service(start_service: StartService, migrated_dsn: str, root: Path) -> AsyncIterator[ServiceProcess]:
    """A service with fast leases; at the end of the test nothing of its sandboxes may be left."""
    environment = service_environment(migrated_dsn, root, HEARTH_AGENTS=agents_with_stubborn(), **FAST)
    started = await start_service("services.sandbox", **environment)
    yield started
    if not started.running:
        await started.start()
    async with connected(started.address) as calls:
        await calls.clear()
    assert left_below(root) == []


@pytest_asyncio.fixture
async def sandboxes(service: ServiceProcess) -> AsyncIterator[Sandboxes]:
    async with connected(service.address) as calls:
        yield calls


async def is_state(sandboxes: Sandboxes, sandbox_id: str, wanted: str) -> bool:
    return state(await sandboxes.get(sandbox_id)) == wanted


async def test_a_sandbox_of_which_nothing_can_be_read_ends_no_service_and_can_be_deleted(
    service: ServiceProcess, sandboxes: Sandboxes, root: Path
) -> None:
    broken = await sandboxes.acquire("broken", holder=ME)
    whole = await sandboxes.acquire("whole", holder=ME)
    directory = root / f"hearth-{broken.sandbox_id}"
    (directory / "state.json").write_bytes(b"")
    await sandboxes.renew(ME, ("broken", 1, 1), ("whole", 1, 1))
    report = await sandboxes.reconcile()
    assert (report.checked, report.mended, list(report.unanswered)) == (2, 0, [])
    assert await is_state(sandboxes, whole.sandbox_id, "RUNNING/ACTIVE")
    assert await sandboxes.delete(broken.sandbox_id) == "DELETED"
    assert (await sandboxes.get(broken.sandbox_id)).observed == sandbox_pb2.SANDBOX_STATE_GONE
    assert members(broken.sandbox_id) == []
    assert not directory.exists()
    assert service.running


async def test_what_nobody_renews_is_ended_and_what_is_renewed_stays(sandboxes: Sandboxes) -> None:
    other = new_id()
    parked, active, kept, warm = await asyncio.gather(
        sandboxes.acquire("parked", holder=ME),
        sandboxes.acquire("active", holder=ME),
        sandboxes.acquire("kept", holder=other),
        sandboxes.acquire("warm", holder=other),
    )
    await sandboxes.renew(other, ("kept", 1, 1), ("warm", 1, 1))
    assert disposition(await sandboxes.release("parked")) == "PARKED"
    assert disposition(await sandboxes.release("warm")) == "PARKED"

    async def renew() -> bool:
        await sandboxes.renew(other, ("kept", 1, 1))
        await sandboxes.renew(other, ("warm", 1, 1), tenure="PARKED")
        return await is_state(sandboxes, parked.sandbox_id, "STOPPED/FREE") and await is_state(
            sandboxes, active.sandbox_id, "GONE/FREE"
        )

    await until(renew)
    assert members(parked.sandbox_id) == members(active.sandbox_id) == []
    assert await is_state(sandboxes, kept.sandbox_id, "RUNNING/ACTIVE")
    assert await is_state(sandboxes, warm.sandbox_id, "RUNNING/PARKED")
    outcomes = await sandboxes.renew(ME, ("parked", 1, 1), ("active", 1, 1))
    assert [outcome.outcome for outcome in outcomes] == [sandbox_pb2.RENEWAL_OUTCOME_GONE] * 2
    # Its claim ended with its lease; the next one finds the disk.
    assert (await refused(sandboxes.acquire("active", 1, holder=ME))).reason == "FENCED"
    assert how(await sandboxes.acquire("parked", 2, holder=ME)) == "RESTARTED"
    (slots,) = (await sandboxes.usage()).slots
    assert slots.used == 1


@pytest.mark.exhaustive
async def test_a_lapse_ends_an_agent_that_does_everything_to_stay(sandboxes: Sandboxes) -> None:
    answer = await sandboxes.acquire("s", holder=ME)
    async with aiohttp.ClientSession() as http:
        pids = await start_stubborn(Daemon(http, answer.endpoint), answer.workspace)
    await until(lambda: is_state(sandboxes, answer.sandbox_id, "GONE/FREE"))
    assert [pid for pid in pids if alive(pid)] == []


async def test_sandboxes_live_on_when_the_service_is_killed(service: ServiceProcess, sandboxes: Sandboxes) -> None:
    active = await sandboxes.acquire("active", holder=ME)
    parked = await sandboxes.acquire("parked", holder=ME)
    await sandboxes.release("parked")
    before = {process.pid for answer in (active, parked) for process in members(answer.sandbox_id)}
    service.kill9()
    async with aiohttp.ClientSession() as http:
        assert await Daemon(http, active.endpoint).health() == 200
    await service.start()
    # The same claim gets the same answer from the new process; so does the next turn's.
    again = await sandboxes.acquire("active", holder=ME)
    assert (again.sandbox_id, again.endpoint) == (active.sandbox_id, active.endpoint)
    warm = await sandboxes.acquire("parked", 2, holder=ME)
    assert how(warm) == "ATTACHED"
    assert (warm.sandbox_id, warm.endpoint) == (parked.sandbox_id, parked.endpoint)
    assert {process.pid for answer in (active, parked) for process in members(answer.sandbox_id)} == before


@pytest.mark.exhaustive
async def test_a_service_that_comes_back_ends_what_lost_its_holder_meanwhile(
    service: ServiceProcess, sandboxes: Sandboxes
) -> None:
    answer = await sandboxes.acquire("s", holder=ME)
    await sandboxes.release("s")
    service.kill9()
    await service.start()
    await until(lambda: is_state(sandboxes, answer.sandbox_id, "STOPPED/FREE"))
    assert members(answer.sandbox_id) == []


async def killed_in_a_create(service: ServiceProcess, sandboxes: Sandboxes) -> str:
    """Kill the service while it creates; the id of the row that it left."""
    acquiring = asyncio.create_task(sandboxes.acquire("s", holder=ME))
    while not (rows := await sandboxes.list()):
        assert not acquiring.done()
    service.kill9()
    assert (await refused(acquiring)).code.name == "UNAVAILABLE"
    return rows[0].sandbox_id


@pytest.mark.parametrize("turn", sampled(range(3), every=3))
async def test_killed_in_a_create_then_asked_again_there_is_one_sandbox(
    start_service: StartService, migrated_dsn: str, root: Path, turn: int
) -> None:
    environment = service_environment(
        migrated_dsn,
        root,
        **{**FAST, "HEARTH_LEASE": "60", "HEARTH_CREATE_DEADLINE": "5", "HEARTH_START_DEADLINE": "5"},
    )
    service = await start_service("services.sandbox", **environment)
    async with connected(service.address) as sandboxes:
        await sandboxes.acquire("warm-up", holder=ME)
        await sandboxes.release("warm-up", reason="KILLED")
        # At another point of the create each time.
        acquiring = asyncio.create_task(sandboxes.acquire("s", holder=ME))
        while not await sandboxes.list():
            assert not acquiring.done()
        await asyncio.sleep(0.05 * turn)
        service.kill9()
        await asyncio.wait([acquiring])
        acquiring.exception()
        await service.start()
        answer = await sandboxes.acquire("s", holder=ME)
        assert [row.sandbox_id for row in await sandboxes.list()] == [answer.sandbox_id]
        async with aiohttp.ClientSession() as http:
            assert await Daemon(http, answer.endpoint).health() == 200
        # The daemon, and no second one of the process that was killed.
        assert len(members(answer.sandbox_id)) == 1
        assert [path.name for path in root.glob("hearth-*")] == [f"hearth-{answer.sandbox_id}"]
        await sandboxes.clear()
    assert left_below(root) == []


async def test_killed_in_a_create_and_never_asked_again_nothing_is_left(
    start_service: StartService, migrated_dsn: str, root: Path
) -> None:
    environment = service_environment(
        migrated_dsn, root, **{**FAST, "HEARTH_CREATE_DEADLINE": "3", "HEARTH_START_DEADLINE": "3"}
    )
    service = await start_service("services.sandbox", **environment)
    async with connected(service.address) as sandboxes:
        sandbox_id = await killed_in_a_create(service, sandboxes)
        await service.start()
        await until(lambda: is_state(sandboxes, sandbox_id, "GONE/FREE"))
    assert left_below(root) == []


@pytest.mark.exhaustive
async def test_a_service_that_was_frozen_ends_nothing_by_what_it_saw_before(
    service: ServiceProcess, sandboxes: Sandboxes
) -> None:
    answer = await sandboxes.acquire("s", holder=ME)
    await sandboxes.renew(ME, ("s", 1, 1))
    # It has seen this renewal, so nothing but the gap tells it that it knows nothing of the time in between.
    await asyncio.sleep(3 * float(FAST["HEARTH_LEASE_READ_INTERVAL"]))
    service.freeze()
    await asyncio.sleep(LEASE + 0.5)
    service.thaw()
    # The holder was out of reach too and renews when it gets to it; the service has read the lease again by then.
    await asyncio.sleep(3 * float(FAST["HEARTH_LEASE_READ_INTERVAL"]))
    for _ in range(5):
        (outcome,) = await sandboxes.renew(ME, ("s", 1, 1))
        assert outcome.outcome == sandbox_pb2.RENEWAL_OUTCOME_OK
        await asyncio.sleep(0.2)
    assert await is_state(sandboxes, answer.sandbox_id, "RUNNING/ACTIVE")


async def test_a_stop_of_the_service_lets_work_end_and_sandboxes_run(
    service: ServiceProcess, sandboxes: Sandboxes, root: Path
) -> None:
    acquiring = asyncio.create_task(sandboxes.acquire("s", holder=ME))
    while not await sandboxes.list():
        assert not acquiring.done()
    assert await service.terminate() == 0
    answer = await acquiring
    async with aiohttp.ClientSession() as http:
        assert await Daemon(http, answer.endpoint).health() == 200


async def test_at_start_it_says_what_is_kept_and_what_it_costs(service: ServiceProcess) -> None:
    (line,) = [line for line in service.log().splitlines() if "provider is on" in line]
    for words in ('"warm_cap": 8', '"warm_window_seconds": 60.0', '"parked_stopped": true', '"worst_usd_per_hour"'):
        assert words in line


@pytest.mark.parametrize(
    ("settings", "clean", "idle"),
    [
        # Each of the two is off without the other, whichever way the first is switched off.
        ({"HEARTH_LOCAL_WARM_WINDOW": "0"}, "STOPPED", "STOPPED"),
        ({"HEARTH_LOCAL_WARM_CAP": "0"}, "STOPPED", "STOPPED"),
        ({"HEARTH_LOCAL_PARK_STOPPED": "off"}, "PARKED", "DELETED"),
        ({"HEARTH_LOCAL_WARM_WINDOW": "0", "HEARTH_LOCAL_PARK_STOPPED": "off"}, "DELETED", "DELETED"),
    ],
)
async def test_w_r09_tiers_can_be_switched_off_apart(
    start_service: StartService, migrated_dsn: str, root: Path, settings: dict[str, str], clean: str, idle: str
) -> None:
    service = await start_service("services.sandbox", **service_environment(migrated_dsn, root, **settings))
    async with connected(service.address) as sandboxes:
        for session, reason, expected in (("clean", "CLEAN_TURN", clean), ("idle", "IDLE_EXPIRED", idle)):
            answer = await sandboxes.acquire(session, holder=ME)
            assert disposition(await sandboxes.release(session, reason=reason)) == expected
            assert bool(members(answer.sandbox_id)) is (expected == "PARKED")
        await sandboxes.clear()
    assert left_below(root) == []


async def test_no_secret_is_on_disk_in_rows_or_in_the_log(
    service: ServiceProcess, sandboxes: Sandboxes, root: Path, migrated_dsn: str
) -> None:
    secret = sandbox_pb2.SecretSlot(env_name="KEY", value="very-secret-value", generation=1)
    answer = await sandboxes.acquire("s", holder=ME, spec=sandbox_pb2.SandboxSpec(agent="scripted", secrets=[secret]))
    async with aiohttp.ClientSession() as http:
        seen = await Daemon(http, answer.endpoint).run("sh", "-c", "echo $KEY")
    assert seen["stdout"] == "very-secret-value\n"
    for path in root.rglob("*"):
        assert not path.is_file() or b"very-secret-value" not in path.read_bytes(), path
    assert "very-secret-value" not in service.log()
    assert answer.endpoint.token not in service.log()
    import asyncpg

    connection = await asyncpg.connect(migrated_dsn)
    try:
        rows = await connection.fetch("SELECT * FROM sandbox.sandboxes")
    finally:
        await connection.close()
    assert "very-secret-value" not in str(rows)
    private = [path for path in root.glob("hearth-*/*") if path.name in ("token", "agents.json", "state.json")]
    assert {path.stat().st_mode & 0o077 for path in private} == {0}
