"""Metrics of a stack that runs: every family is there, and what people do moves those that are about it."""

from __future__ import annotations

import asyncio
import uuid

import grpc.aio
import pytest

from hearth.client import Addresses, Client, session_key
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.session.v1 import session_pb2 as sessions
from services.chassis.metrics import CALLS, CERTIFICATE_ENDS, catalogue
from services.history import metrics as _history  # noqa: F401 - to be in the catalogue
from services.pool import metrics as pool
from services.relay import metrics as _relay  # noqa: F401
from services.sandbox import metrics as _sandbox  # noqa: F401
from tests.contract.pool.house import eventually
from tests.support.cli import SERVICES, Hearth
from tests.support.events import Run, append_set
from tests.support.metrics import Page, read

pytestmark = pytest.mark.asyncio(loop_scope="session")
# The first failed turn is what one begins with, and a call that is no stream another, of which the relay has none.
# Certificates are there with TLS only: see tests/e2e/test_tls.py.
RARE = {("pool", pool.FAILED), ("relay", CALLS)} | {(service, CERTIFICATE_ENDS) for service in SERVICES}


async def pages(hearth: Hearth) -> dict[str, Page]:
    """What every service tells."""
    parts = (await hearth.run("status", "--json")).json()["components"]
    where = {part["name"]: part["metrics"] for part in parts if part["metrics"]}
    assert set(where) == set(SERVICES)
    return dict(zip(where, await asyncio.gather(*(read(address) for address in where.values())), strict=True))


async def one_of_each(hearth: Hearth, session: str) -> str:
    """A cold turn, a warm one, and one that a reader sees the begin of and that is stopped; its execution."""
    for text in ("hello", "hello again"):
        assert (await hearth.run("send", session, text, "--wait")).code == 0
    async with hearth.watching(session) as watching:
        sent = (await hearth.run("send", session, "stream 3000 words at 40/s", "--json")).json()
        await watching.until(lambda items: sum("frame" in item for item in items) > 3)
        assert (await hearth.run("stop", session, "--json")).code == 0
        await watching.until(lambda items: any("execution.stopped" in str(item) for item in items))
    execution: str = sent["started"]["execution"]["execution_id"]
    return execution


async def write_late(hearth: Hearth, session: str, execution: str) -> None:
    """What a runner says that does not know that its execution has ended."""
    late = append_set(session_key("demo", session), Run(1, execution).message())
    request = history_service_pb2.AppendEventsRequest(sets=[late])
    async with grpc.aio.insecure_channel(hearth.addresses()["history"]) as channel:
        answer = await history_service_pb2_grpc.HistoryServiceStub(channel).AppendEvents(request, timeout=10)
    assert answer.sets[0].results[0].outcome == history_pb2.APPEND_OUTCOME_QUARANTINED


async def test_what_is_done_is_counted(hearth: Hearth) -> None:
    session = f"metrics-{uuid.uuid4().hex[:8]}"
    before = await pages(hearth)
    execution = await one_of_each(hearth, session)
    await write_late(hearth, session, execution)
    where = hearth.addresses()
    async with Client(Addresses(**{name: where[name] for name in SERVICES})) as client:

        async def over() -> bool:
            state = (await client.get_execution(session_key("demo", session), execution)).state
            return state == sessions.EXECUTION_STATE_TERMINAL

        await eventually(over)

    async def parked() -> bool:
        page = (await pages(hearth))["pool"]
        return page.value("hearth_pool_entries", state="idle") > 0 and page.value("hearth_pool_driving") == 0

    await eventually(parked)
    after = await pages(hearth)

    def moved(service: str, series: str, **labels: str) -> float:
        return after[service].value(series, **labels) - before[service].value(series, **labels)

    assert moved("pool", "hearth_pool_turns_total", how="cold", outcome="completed") == 1
    assert moved("pool", "hearth_pool_turns_total", how="warm", outcome="completed") == 1
    assert moved("pool", "hearth_pool_turns_total", how="warm", outcome="stopped") == 1
    assert moved("pool", "hearth_pool_executions_settled_total", outcome="stopped") == 1
    assert moved("pool", "hearth_pool_misses_total", reason="first-turn") == 1
    assert moved("pool", "hearth_pool_commands_total", kind="stop", outcome="stopped") == 1
    assert moved("pool", "hearth_pool_stop_duration_seconds_count", kind="stop", outcome="stopped") == 1
    for stage, how in (("acquire", "created"), ("open", "new")):
        assert moved("pool", "hearth_pool_stage_duration_seconds_count", stage=stage, how=how) == 1
    for stage, how in (("acquire", "attached"), ("open", "continue"), ("first_output", ""), ("settle", "")):
        assert moved("pool", "hearth_pool_stage_duration_seconds_count", stage=stage, how=how) >= 2
    send = "hearth.session.v1.SessionService/SendInput"
    assert moved("pool", "rpc_server_call_duration_seconds_count", rpc_method=send, rpc_response_status_code="OK") == 3

    assert moved("sandbox", "hearth_sandbox_acquires_total", how="created") == 1
    assert moved("sandbox", "hearth_sandbox_acquires_total", how="attached") == 2
    assert moved("sandbox", "hearth_sandbox_acquire_duration_seconds_count") == 3
    assert moved("sandbox", "hearth_sandbox_releases_total", disposition="parked") >= 2
    assert moved("sandbox", "hearth_sandbox_provider_calls_total", provider="local", outcome="ok") > 0
    used = after["sandbox"].value("hearth_sandbox_slots", provider="local", state="used")
    assert used >= 1
    assert used + after["sandbox"].value("hearth_sandbox_slots", provider="local", state="free") == 8
    assert after["sandbox"].value("hearth_sandbox_tier_sandboxes", provider="local", tier="parked") == used
    assert after["sandbox"].value("hearth_sandbox_sandboxes", provider="local", state="running") >= used

    assert moved("history", "hearth_history_events_total", outcome="appended") >= 8
    assert moved("history", "hearth_history_events_total", outcome="quarantined") == 1
    assert moved("history", "hearth_history_quarantined_total", reason="EXECUTION_ENDED") == 1
    commits = moved("history", "hearth_history_commit_duration_seconds_count")
    assert 0 < commits == moved("history", "hearth_history_commit_events_count")
    assert moved("history", "hearth_history_commit_events_sum") >= 9
    assert after["history"].value("hearth_history_queue") == 0

    assert moved("relay", "hearth_relay_frames_total") > 3
    assert moved("relay", "hearth_relay_batches_total", outcome="accepted") > 0
    assert moved("relay", "hearth_relay_fanout_lag_seconds_count") > 0
    assert after["relay"].value("hearth_relay_degraded") == 0

    for service in SERVICES:
        assert after[service].value("hearth_dependency_up") >= 1
        assert after[service].value("hearth_metrics_reading_failures_total") == 0
    # Last, when each has had its occasion.
    for family in catalogue():
        part = family.name.split(".")[1]
        for service in (part,) if part in SERVICES else SERVICES:
            missing = set(family.series) - after[service].series
            assert not missing or (service, family) in RARE, f"{service} does not tell {missing}"


async def test_numbers_of_the_tables_are_those_of_the_rows(hearth: Hearth) -> None:
    session = f"metrics-{uuid.uuid4().hex[:8]}"
    first = (await hearth.run("send", session, "stream 3000 words at 40/s", "--json")).json()
    await hearth.run("send", session, "and then this", "--json")

    async def shown() -> bool:
        page = (await pages(hearth))["pool"]
        running = page.value("hearth_pool_executions", state="running") >= 1
        return running and page.value("hearth_pool_inputs_waiting") >= 1 and page.value("hearth_pool_driving") >= 1

    await eventually(shown)
    page = (await pages(hearth))["pool"]
    assert page.value("hearth_pool_executions_age_seconds", state="running") > 0
    assert page.value("hearth_pool_entries", state="busy") >= 1
    assert page.value("hearth_pool_replicas") == 1
    assert first["started"]["execution"]["execution_id"]
    assert (await hearth.run("kill", session, "--json")).code == 0

    async def over() -> bool:
        page = (await pages(hearth))["pool"]
        return page.value("hearth_pool_inputs_waiting") == 0 and page.value("hearth_pool_commands_open") == 0

    await eventually(over)
