"""The sandbox service with the provider `daytona` on the stand-in: what it tells Daytona when it parks, and what it
does when Daytona does not stop a sandbox."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from hearth.tracing.layout import Trace, lay_out
from hearth.tracing.store import Span, TraceStore
from tests.support.daytona import Fault, Kind, RunningStandIn, StandIn
from tests.support.processes import ServiceProcess
from tests.support.sandboxes import Sandboxes, connected, disposition, how, new_id, service_environment, state
from tests.support.servers import Servers
from tests.support.waiting import eventually

AGENTD = [
    *(sys.executable, "-P", "-m", "services.sandbox.agentd", "--host", "{host}", "--port", "{port}"),
    *("--agents-file", "{agents}", "--log-dir", "{logs}"),
]
YOUNG_SECONDS = 10
TRACES = "traces"
SPEC = sandbox_pb2.SandboxSpec(provider="daytona", agent="scripted")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand_in(servers: Servers) -> AsyncIterator[RunningStandIn]:
    """One for the module."""
    async with StandIn.running(servers.scratch() / "daytona") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    stand_in: RunningStandIn, servers: Servers, module_postgres_dsn: str
) -> AsyncIterator[ServiceProcess]:
    """The service, which knows no other place."""
    directory = servers.scratch()
    environment = service_environment(
        module_postgres_dsn,
        directory / "local",
        HEARTH_PROVIDERS="daytona",
        HEARTH_DEFAULT_PROVIDER="daytona",
        HEARTH_DAYTONA_API_URL=stand_in.url,
        HEARTH_DAYTONA_API_KEY=stand_in.api_key,
        HEARTH_DAYTONA_DAEMON=json.dumps(AGENTD),
        HEARTH_DAYTONA_MOUNT=str(directory / "mounts"),
        HEARTH_TRACE_FILE=str(directory / TRACES / "sandbox.jsonl"),
        # Older than that, an instance without a row is unknown.
        HEARTH_CREATE_DEADLINE=f"{YOUNG_SECONDS}",
        # Only when it is told: a pass that finds some of the unknown ones old enough, and not yet all, reaps those.
        HEARTH_RECONCILE_INTERVAL="3600",
    )
    process = ServiceProcess("services.sandbox", directory, environment)
    await process.start()
    yield process
    assert await process.terminate() == 0


@pytest_asyncio.fixture(loop_scope="module")
async def sandboxes(service: ServiceProcess, stand_in: RunningStandIn) -> AsyncIterator[Sandboxes]:
    """Calls to the service; what a test leaves is deleted."""
    async with connected(service.address) as calls:
        yield calls
        stand_in.faults.clear()
        await calls.clear()
        assert stand_in.running() == 0


@pytest.fixture
def holder() -> str:
    """A pool process."""
    return new_id()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def activities(stand_in: RunningStandIn, sandbox: str, least: int = 0) -> int:
    """How often Daytona was told that a sandbox is in use, once it was `least` times."""

    def count() -> int:
        return sum(entry.sandbox == sandbox for entry in stand_in.log.of("call", call="activity"))

    await eventually(lambda: count() >= least)
    return count()


async def test_the_spans_of_the_sdk_lie_below_the_stage_that_they_are_part_of(
    sandboxes: Sandboxes, service: ServiceProcess, stand_in: RunningStandIn, holder: str
) -> None:
    acquired = await sandboxes.acquire(f"s-{new_id()}", holder=holder, spec=SPEC)
    store = TraceStore(service.log_file.parent / TRACES)
    created: list[Trace] = []

    def found() -> bool:
        created[:] = [
            trace
            for trace in map(lay_out, by_trace(store).values())
            if trace.rows[0].span.name.endswith("SandboxService/Acquire")
            and any(row.span.name == "AsyncDaytona.create" for row in trace.rows)
        ]
        return bool(created)

    await eventually(found)
    assert acquired.sandbox_id
    names = {row.span.span_id: row.span.name for row in created[-1].rows}
    below = {(names.get(row.span.parent_id), row.span.name) for row in created[-1].rows}
    # The stage, the call of the SDK, and the request that it makes.
    assert {("sandbox.create", "AsyncDaytona.create"), ("AsyncDaytona.create", "POST")} <= below, below
    assert stand_in.api_key not in "".join(path.read_text() for path in (service.log_file.parent / TRACES).iterdir())


def by_trace(store: TraceStore) -> dict[str, list[Span]]:
    """All spans that were written, by trace."""
    traces: dict[str, list[Span]] = {}
    for span in store.all():
        traces.setdefault(span.trace_id, []).append(span)
    return traces


async def test_w_d13_parking_tells_daytona_once_that_the_sandbox_is_in_use(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    session = f"s-{new_id()}"
    acquired = await sandboxes.acquire(session, holder=holder, spec=SPEC)
    instance = (await sandboxes.get(acquired.sandbox_id)).provider_id
    before = await activities(stand_in, instance)
    assert disposition(await sandboxes.release(session)) == "PARKED"
    assert await activities(stand_in, instance, before + 1) == before + 1
    # Nothing keeps it alive from there on.
    for _ in range(3):
        await sandboxes.renew(holder, (session, 1, 1), tenure="PARKED")
    assert await activities(stand_in, instance) == before + 1


async def test_w_d13_that_it_cannot_be_told_costs_nothing(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    session = f"s-{new_id()}"
    await sandboxes.acquire(session, holder=holder, spec=SPEC)
    failing = stand_in.faults.add(Fault("activity", Kind.STATUS, status=500))
    assert disposition(await sandboxes.release(session)) == "PARKED"
    await eventually(lambda: failing.fired)
    assert how(await sandboxes.acquire(session, 2, holder=holder, spec=SPEC)) == "ATTACHED"


async def test_w_r08_a_stop_that_fails_becomes_a_delete_and_nothing_is_left_running(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    session = f"s-{new_id()}"
    acquired = await sandboxes.acquire(session, holder=holder, spec=SPEC)
    stand_in.faults.add(Fault("stop", Kind.STATUS, status=400, message="Sandbox is not in a stoppable state"))
    released = await sandboxes.release(session, reason="IDLE_EXPIRED")
    assert disposition(released) == "DELETED"
    assert (await sandboxes.get(acquired.sandbox_id)).observed == sandbox_pb2.SANDBOX_STATE_GONE
    assert stand_in.running() == 0
    stand_in.faults.clear()
    # The session goes on, in another one.
    assert how(await sandboxes.acquire(session, 2, holder=holder, spec=SPEC)) == "CREATED"


async def test_w_r08_what_breaks_after_its_start_is_not_left_running(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    session = f"s-{new_id()}"
    first = await sandboxes.acquire(session, holder=holder, spec=SPEC)
    assert disposition(await sandboxes.release(session, reason="IDLE_EXPIRED")) == "STOPPED"
    stand_in.faults.add(Fault("start", Kind.BREAK, times=1))
    second = await sandboxes.acquire(session, 2, holder=holder, spec=SPEC)
    assert how(second) == "CREATED"
    assert second.sandbox_id != first.sandbox_id
    assert stand_in.running() == 1


async def test_w_r07_each_reason_has_its_fate_on_daytona_too(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    for reason, fate in (("CLEAN_TURN", "PARKED"), ("IDLE_EXPIRED", "STOPPED"), ("FAILED_TURN", "DELETED")):
        session = f"s-{new_id()}"
        acquired = await sandboxes.acquire(session, holder=holder, spec=SPEC)
        assert disposition(await sandboxes.release(session, reason=reason)) == fate
        assert stand_in.running() == (fate == "PARKED")
        await sandboxes.delete(acquired.sandbox_id)


async def test_unknown_instances_are_named_and_too_many_wait_for_a_person(
    sandboxes: Sandboxes, stand_in: RunningStandIn, module_postgres_dsn: str
) -> None:
    connection = await asyncpg.connect(module_postgres_dsn)
    deployment = await connection.fetchval("SELECT deployment_id::text FROM sandbox.deployment")
    await connection.close()
    names = {f"hearth-{new_id()}" for _ in range(6)}
    headers = {"Authorization": f"Bearer {stand_in.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for name in names:
            labels = {"hearth-deployment": deployment, "code-toolbox-language": "python"}
            async with session.post(f"{stand_in.url}/sandbox", json={"name": name, "labels": labels}) as answer:
                assert answer.status == 200, await answer.text()
    # While they are young they may be on their way into a row; what is waited for is their age.
    await asyncio.sleep(YOUNG_SECONDS + 0.5)
    report = await sandboxes.reconcile()
    assert set(report.unknown_names) == names
    assert report.refused_unknown
    assert stand_in.running() == len(names)
    report = await sandboxes.reconcile(confirm_unknown=True)
    assert not report.refused_unknown
    assert set(report.unknown_names) == names
    assert stand_in.running() == 0
    assert (await sandboxes.reconcile()).unknown == 0


async def test_a_provider_that_does_not_list_is_named(sandboxes: Sandboxes, stand_in: RunningStandIn) -> None:
    stand_in.faults.add(Fault("list", Kind.STATUS, status=403, message="the key was revoked"))
    report = await sandboxes.reconcile()
    assert list(report.unanswered) == ["daytona"]
    stand_in.faults.clear()
    assert list((await sandboxes.reconcile()).unanswered) == []


@pytest.mark.parametrize(("listed", "wanted"), [("stopped", "stopped"), ("error", "started")])
async def test_a_list_that_is_behind_ends_no_turn(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str, listed: str, wanted: str
) -> None:
    session = f"s-{new_id()}"
    acquired = await sandboxes.acquire(session, holder=holder, spec=SPEC)
    behind = stand_in.faults.add(Fault("list", Kind.LIE, times=1, state=listed, desired=wanted))
    report = await sandboxes.reconcile()
    assert (behind.fired, report.mended) == (1, 0)
    assert state(await sandboxes.get(acquired.sandbox_id)) == "RUNNING/ACTIVE"
    assert [renewal.outcome for renewal in await sandboxes.renew(holder, (session, 1, 1))] == [
        sandbox_pb2.RENEWAL_OUTCOME_OK
    ]
    assert stand_in.running() == 1


async def test_what_breaks_during_a_turn_is_mended_once_the_instance_itself_says_so(
    sandboxes: Sandboxes, stand_in: RunningStandIn, holder: str
) -> None:
    acquired = await sandboxes.acquire(f"s-{new_id()}", holder=holder, spec=SPEC)
    instance = (await sandboxes.get(acquired.sandbox_id)).provider_id
    stand_in.kill(instance)
    await eventually(lambda: stand_in.sandbox(instance).state == "error")
    assert (await sandboxes.reconcile()).mended == 1
    assert (await sandboxes.get(acquired.sandbox_id)).observed == sandbox_pb2.SANDBOX_STATE_GONE


async def test_what_it_costs_now_and_at_worst(sandboxes: Sandboxes, holder: str) -> None:
    session = f"s-{new_id()}"
    await sandboxes.acquire(session, holder=holder, spec=SPEC)
    use = await sandboxes.usage()
    assert {tier.tier: tier.micro_usd_per_hour for tier in use.tiers if tier.count} == {"active": 170_000}
    assert [(slot.cap, slot.worst_micro_usd_per_hour) for slot in use.slots] == [(20, 3_400_000)]
    await sandboxes.release(session, reason="IDLE_EXPIRED")
    use = await sandboxes.usage()
    assert {tier.tier: tier.micro_usd_per_hour for tier in use.tiers if tier.count} == {"stopped": 900}
    assert [warning.partition(":")[0] for warning in use.warnings] == [
        "HEARTH_LEASE=90 and HEARTH_RECONCILE_INTERVAL=3600"
    ]
