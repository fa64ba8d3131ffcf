"""Every state of a sandbox at Daytona, and every way in which the API may fail while one state becomes another."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from daytona import AsyncDaytona, AsyncSandbox, DaytonaConfig
from daytona._utils import otel_decorator
from daytona_api_client_async import SandboxState
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.sandbox.providers import daytona_sdk
from services.sandbox.providers.daytona_values import Seen
from services.sandbox.providers.port import InstanceNotFound, InstanceState, ProviderError, ProviderUnavailable
from tests.contract.provider.places import Place, connect, results
from tests.support.daytona import Delays, Fault, Kind, RunningStandIn, StandIn
from tests.support.daytona.limits import RateLimits
from tests.support.exhaustive import sampled
from tests.support.waiting import eventually

# Each leaves the call undone, or done without telling, or tells something else than what is.
TROUBLES = {
    "429": (Kind.STATUS, {"status": 429, "retry_after": 0.2}),
    "500": (Kind.STATUS, {"status": 500}),
    "503": (Kind.STATUS, {"status": 503}),
    "drop": (Kind.DROP, {}),
    "lost": (Kind.LOSE_REPLY, {}),
    "502-after": (Kind.FAIL_AFTER, {"status": 502}),
    "slow": (Kind.DELAY, {"seconds": 1.0}),
    "lie": (Kind.LIE, {"state": "unknown"}),
}


def trouble(call: str, name: str, times: int = 2) -> Fault:
    """One of TROUBLES, at so many calls."""
    kind, settings = TROUBLES[name]
    return Fault(call, kind, times=times, **settings)  # type: ignore[arg-type]


async def with_sdk(stand_in: RunningStandIn, work: Callable[[AsyncDaytona], Awaitable[None]]) -> None:
    """Do something at the stand-in beside the provider."""
    async with AsyncDaytona(DaytonaConfig(api_key=stand_in.api_key, api_url=stand_in.url)) as client:
        await work(client)


@pytest.mark.parametrize("name", sampled(TROUBLES, every=3))
async def test_w_r01_a_stop_gets_through_any_trouble_of_the_api(
    at_daytona: Place, stand_in: RunningStandIn, name: str
) -> None:
    instance = await at_daytona.create()
    stand_in.faults.add(trouble("stop", name, times=1))
    stand_in.faults.add(trouble("get", name, times=3))
    await at_daytona.provider.stop(instance.provider_id)
    assert stand_in.sandbox(instance.provider_id).state == "stopped"
    assert stand_in.faults.counts()[TROUBLES[name][0].value] >= 1


@pytest.mark.parametrize("name", sampled(TROUBLES, every=3))
async def test_w_r02_a_start_gets_through_any_trouble_of_the_api(
    at_daytona: Place, stand_in: RunningStandIn, name: str
) -> None:
    instance = await at_daytona.create()
    await at_daytona.provider.stop(instance.provider_id)
    stand_in.faults.add(trouble("start", name, times=1))
    stand_in.faults.add(trouble("get", name, times=3))
    await at_daytona.provider.start(instance.provider_id)
    assert stand_in.sandbox(instance.provider_id).state == "started"


@pytest.mark.parametrize("name", sampled(TROUBLES, every=3))
async def test_w_r03_a_delete_gets_through_any_trouble_of_the_api(
    at_daytona: Place, stand_in: RunningStandIn, name: str
) -> None:
    instance = await at_daytona.create()
    stand_in.faults.add(trouble("delete", name, times=1))
    stand_in.faults.add(trouble("get", name, times=3))
    await at_daytona.provider.delete(instance.name)
    assert stand_in.sandboxes() == []


@pytest.mark.parametrize("name", sampled(TROUBLES, every=3))
async def test_a_listing_gets_through_trouble_and_has_every_page(
    at_daytona: Place, stand_in: RunningStandIn, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daytona_sdk, "_PAGE", 2)
    made = [await at_daytona.create() for _ in range(5)]
    stand_in.faults.add(trouble("list", name))
    listed = await at_daytona.provider.list(at_daytona.labels)
    assert sorted(instance.provider_id for instance in listed) == sorted(instance.provider_id for instance in made)
    if name != "lie":
        assert {instance.state for instance in listed} == {InstanceState.RUNNING}


async def test_one_failure_of_an_api_with_rate_limits_is_not_waited_for_as_one_of_them(
    scratch: Path, http: aiohttp.ClientSession
) -> None:
    # Longer than anything here may take.
    limits = RateLimits(authenticated=1000, create=1000, lifecycle=1000, window=3600.0)
    async with StandIn.running(scratch / "daytona", rate_limits=limits) as stand_in:
        provider = await connect(stand_in, scratch)
        place = Place(provider, http)
        stand_in.faults.add(Fault("create", Kind.FAIL_AFTER, status=502, times=1))
        instance = await place.create()
        for call in ("stop", "start", "get", "delete"):
            stand_in.faults.add(Fault(call, Kind.STATUS, status=500, times=1))
        await provider.stop(instance.provider_id)
        assert stand_in.sandbox(instance.provider_id).state == "stopped"
        await provider.start(instance.provider_id)
        assert stand_in.sandbox(instance.provider_id).state == "started"
        await provider.delete(instance.provider_id)
        assert stand_in.sandboxes() == []
        assert stand_in.faults.counts()["status"] == 4
        await provider.close()


async def test_w_r01_what_is_said_to_be_stopped_once_is_not_taken_for_stopped(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    instance = await at_daytona.create()
    stand_in.faults.add(Fault("get", Kind.LIE, state="stopped", times=1))
    await at_daytona.provider.stop(instance.provider_id)
    assert stand_in.sandbox(instance.provider_id).state == "stopped"
    await at_daytona.provider.start(instance.provider_id)
    # While it is wanted running, an answer that says stopped is about a moment on the way.
    stand_in.faults.add(Fault("get", Kind.LIE, state="stopped", times=1))
    assert await at_daytona.state(instance) is InstanceState.STARTING


async def test_w_r01_one_look_from_before_is_not_taken_for_stopped(
    at_daytona: Place, stand_in: RunningStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await at_daytona.create()
    sdk = at_daytona.provider._sdk  # type: ignore[attr-defined]
    get: Callable[[str], Awaitable[Seen]] = sdk.get
    looks = [dataclasses.replace(await get(instance.provider_id), state="stopped", desired="stopped")]

    async def once_from_before(reference: str) -> Seen:
        return looks.pop() if looks else await get(reference)

    monkeypatch.setattr(sdk, "get", once_from_before)
    await at_daytona.provider.stop(instance.provider_id)
    assert stand_in.sandbox(instance.provider_id).state == "stopped"


@pytest.mark.parametrize("state", ["brand_new_state", "unknown", "resizing", "snapshotting"])
async def test_a_state_that_is_not_known_is_unknown_and_not_stopped(
    at_daytona: Place, stand_in: RunningStandIn, state: str
) -> None:
    instance = await at_daytona.create()
    switches = [stand_in.faults.add(Fault(call, Kind.LIE, state=state)) for call in ("get", "list")]
    assert await at_daytona.state(instance) is InstanceState.UNKNOWN
    assert [found.state for found in await at_daytona.provider.list(at_daytona.labels)] == [InstanceState.UNKNOWN]
    for switch in switches:
        stand_in.faults.remove(switch)


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("creating", InstanceState.CREATING),
        ("pulling_snapshot", InstanceState.CREATING),
        ("restoring", InstanceState.STARTING),
        ("starting", InstanceState.STARTING),
        ("stopping", InstanceState.STOPPING),
        ("destroying", InstanceState.DELETING),
        ("error", InstanceState.ERROR),
        ("build_failed", InstanceState.ERROR),
    ],
)
async def test_each_state_is_told_in_our_words(
    at_daytona: Place, stand_in: RunningStandIn, shown: str, state: InstanceState
) -> None:
    instance = await at_daytona.create()
    stand_in.faults.add(Fault("get", Kind.LIE, state=shown, times=1))
    assert await at_daytona.state(instance) is state
    stand_in.faults.add(Fault("get", Kind.LIE, state="destroyed", times=2))
    assert await at_daytona.state(instance) is None


async def test_w_r02_archived_and_one_on_its_way_there_are_stopped_and_can_be_started(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    instance = await at_daytona.create()
    await at_daytona.provider.stop(instance.provider_id)

    async def archive(client: AsyncDaytona) -> None:
        await (await client.get(instance.provider_id)).archive()

    await with_sdk(stand_in, archive)
    await eventually(lambda: stand_in.sandbox(instance.provider_id).state == "archived")
    found = await at_daytona.provider.get(instance.provider_id)
    assert (found.state, found.detail) == (InstanceState.STOPPED, "archived")
    await at_daytona.provider.stop(instance.provider_id)
    await at_daytona.provider.start(instance.provider_id)
    assert await at_daytona.state(instance) is InstanceState.RUNNING


async def test_w_r01_an_error_is_seen_at_once_and_told_with_its_reason(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    instance = await at_daytona.create()
    stand_in.kill(instance.provider_id)
    await at_daytona.until(InstanceState.ERROR, instance)
    assert "exited" in (await at_daytona.provider.get(instance.provider_id)).detail
    calls = len(stand_in.log.of("call"))
    for work in (at_daytona.provider.stop, at_daytona.provider.start):
        with pytest.raises(ProviderError, match="in error"):
            await work(instance.provider_id)
    made = [entry.data["call"] for entry in list(stand_in.log.of("call"))[calls:]]
    assert made == ["get", "get"], "it was waited for although it was in error"
    await at_daytona.provider.delete(instance.provider_id)


@pytest.mark.parametrize("call", ["stop", "start"])
async def test_one_that_breaks_on_the_way_is_told_and_can_be_deleted(
    at_daytona: Place, stand_in: RunningStandIn, call: str
) -> None:
    instance = await at_daytona.create()
    if call == "start":
        await at_daytona.provider.stop(instance.provider_id)
    stand_in.faults.add(Fault(call, Kind.BREAK, message="the runner is gone", times=1))
    with pytest.raises(ProviderError, match="the runner is gone"):
        await getattr(at_daytona.provider, call)(instance.provider_id)
    await at_daytona.provider.delete(instance.provider_id)


@pytest.mark.parametrize("call", ["stop", "start", "delete"])
async def test_w_r01_one_that_is_stuck_is_told_in_time_and_done_once_it_goes_on(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path, call: str
) -> None:
    instance = await at_daytona.create()
    if call == "start":
        await at_daytona.provider.stop(instance.provider_id)
    stand_in.faults.add(Fault(call, Kind.STUCK, times=1))
    limits = {f"{name}_seconds": 1.5 for name in ("start", "stop", "delete")}
    hasty = await connect(stand_in, scratch, slice_seconds=1.0, **limits)
    with pytest.raises(ProviderUnavailable, match=r"stays|not seen gone"):
        await asyncio.wait_for(getattr(hasty, call)(instance.provider_id), 20)
    await hasty.close()
    stand_in.release()
    await getattr(at_daytona.provider, call)(instance.provider_id)
    wanted = {"stop": InstanceState.STOPPED, "start": InstanceState.RUNNING, "delete": None}[call]
    assert await at_daytona.state(instance) is wanted


async def test_a_delete_waits_for_a_change_that_is_under_way(at_daytona: Place, stand_in: RunningStandIn) -> None:
    instance = await at_daytona.create()
    stand_in.faults.add(Fault("stop", Kind.STUCK, seconds=1.0, times=1))
    stop = asyncio.create_task(at_daytona.provider.stop(instance.provider_id))
    await eventually(lambda: stand_in.sandbox(instance.provider_id).state == "stopping")
    await at_daytona.provider.delete(instance.provider_id)
    assert any(entry.data["status"] == 409 for entry in stand_in.log.of("call", call="delete"))
    (ended,) = await asyncio.gather(stop, return_exceptions=True)
    assert ended is None or isinstance(ended, InstanceNotFound)
    assert stand_in.sandboxes() == []


async def test_a_delete_by_name_is_over_only_when_the_sandbox_is_gone(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    # Its name is free, and not found, as soon as the deletion begins.
    instance = await at_daytona.create()
    stand_in.faults.add(Fault("delete", Kind.STUCK, seconds=0.7, times=1))
    await at_daytona.provider.delete(instance.name)
    assert stand_in.log.of("state", new="destroyed")


async def test_one_404_is_not_believed(at_daytona: Place, stand_in: RunningStandIn) -> None:
    instance = await at_daytona.create()
    message = f"Sandbox with ID or name {instance.provider_id} not found"
    stand_in.faults.add(Fault("get", Kind.STATUS, status=404, message=message, times=1))
    assert await at_daytona.state(instance) is InstanceState.RUNNING


async def test_w_r04_a_network_policy_is_changed_only_where_it_differs_and_stays_over_a_restart(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    instance = await at_daytona.create()
    found = stand_in.sandbox(instance.provider_id)
    steps: list[tuple[str, tuple[str, ...], bool, str | None, int]] = [
        ("OPEN", (), False, None, 0),
        ("ALLOW_LIST", ("10.0.0.0/8", "1.2.3.4/32"), False, "1.2.3.4/32,10.0.0.0/8", 1),
        ("ALLOW_LIST", (" 1.2.3.4/32", "10.0.0.0/8 ", "10.0.0.0/8"), False, "1.2.3.4/32,10.0.0.0/8", 1),
        ("ALLOW_LIST", (), True, None, 2),
        ("BLOCKED", (), True, None, 2),
        ("OPEN", (), False, None, 3),
    ]
    for mode, allow, blocked, listed, calls in steps:
        await at_daytona.provider.set_network(instance.provider_id, mode, allow)
        assert found.network_block_all is blocked
        if not blocked:
            assert (found.network_allow_list or None) == listed
        assert len(stand_in.log.of("call", call="network")) == calls
    await at_daytona.provider.stop(instance.provider_id)
    await at_daytona.provider.start(instance.provider_id)
    stand_in.faults.add(Fault("network", Kind.STATUS, status=429, retry_after=0.1, times=1))
    stand_in.faults.add(Fault("network", Kind.LOSE_REPLY, skip=1, times=1))
    await at_daytona.provider.set_network(instance.provider_id, "BLOCKED", ())
    assert found.network_block_all


async def test_w_r03_activity_costs_one_call_and_sets_back_the_idle_clock(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    instance = await at_daytona.create()
    before, calls = stand_in.sandbox(instance.provider_id).active, len(stand_in.log.of("call"))
    await at_daytona.provider.refresh_activity(instance.provider_id)
    assert stand_in.sandbox(instance.provider_id).active > before
    assert [entry.data["call"] for entry in list(stand_in.log.of("call"))[calls:]] == ["activity"]


async def test_two_processes_that_do_opposite_things_end_in_one_state(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    other = await connect(stand_in, scratch)
    for _ in range(3):
        instance = await at_daytona.create()
        await asyncio.gather(
            at_daytona.provider.stop(instance.provider_id), other.start(instance.provider_id), return_exceptions=True
        )
        assert await at_daytona.state(instance) in (InstanceState.RUNNING, InstanceState.STOPPED)
        deletes = (at_daytona.provider.delete(instance.provider_id), other.delete(instance.name))
        assert await results(*deletes) == ["NoneType", "NoneType"]
        assert await at_daytona.state(instance) is None
    await other.close()


async def test_without_events_it_is_only_slower(scratch: Path, http: aiohttp.ClientSession) -> None:
    delays = Delays(create=(0.3, 0.3), start=(0.3, 0.3), stop=(0.3, 0.3), delete=(0.3, 0.3))
    async with StandIn.running(scratch / "silent", events=False, delays=delays) as silent:
        place = Place(await connect(silent, scratch), http)
        instance = await place.create()
        daemon, _, _ = await place.daemon(instance)
        assert await daemon.health() == 200
        await place.provider.stop(instance.provider_id)
        assert silent.sandbox(instance.provider_id).state == "stopped"
        await place.provider.start(instance.provider_id)
        daemon, _, _ = await place.daemon(instance)
        assert await daemon.health() == 200
        await place.clear()
        await place.provider.close()


async def test_what_was_last_heard_may_be_wrong(at_daytona: Place, stand_in: RunningStandIn, scratch: Path) -> None:
    other = await connect(stand_in, scratch)
    instance = await at_daytona.create()
    await at_daytona.provider.stop(instance.provider_id)
    await other.start(instance.provider_id)
    handle = at_daytona.provider._sdk._handles[instance.provider_id]  # type: ignore[attr-defined]
    for state, desired in (("stopped", "stopped"), ("started", "started")):
        handle.state, handle.desired_state = SandboxState(state), desired
        await at_daytona.provider.start(instance.provider_id)
        assert stand_in.sandbox(instance.provider_id).state == "started"
    await other.stop(instance.provider_id)
    handle.state, handle.desired_state = SandboxState.STARTED, "started"
    with pytest.raises(ProviderError, match=r"stopped, not started"):
        await at_daytona.daemon(instance)
    handle.state, handle.desired_state = SandboxState.STARTED, "started"
    await at_daytona.provider.stop(instance.provider_id)
    await other.delete(instance.provider_id)
    handle.state, handle.desired_state = SandboxState.STOPPED, "stopped"
    with pytest.raises(InstanceNotFound):
        await at_daytona.provider.start(instance.provider_id)
    await other.close()


async def test_nothing_is_opened_again_after_the_end(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    instance = await at_daytona.create()
    other = await connect(stand_in, scratch)
    await other.get(instance.provider_id)
    await other.close()
    await other.close()
    calls = len(stand_in.log.of("call"))
    for work in (other.get(instance.provider_id), other.get(instance.name), other.list({})):
        with pytest.raises(ProviderError, match="closed"):
            await work
    assert len(stand_in.log.of("call")) == calls


async def test_a_file_in_the_working_directory_changes_nothing(
    stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / ".env").write_text("DAYTONA_API_KEY=theirs\nDAYTONA_TARGET=theirs\n")
    monkeypatch.setenv("DAYTONA_TARGET", "theirs")
    monkeypatch.setenv("DAYTONA_API_KEY", "theirs")
    monkeypatch.chdir(scratch)
    place = Place(await connect(stand_in, scratch, call_seconds=5.0), http)
    made = await place.create()
    assert stand_in.sandbox(made.provider_id).wanted.target == "us"
    await place.clear()
    await place.provider.close()


async def test_spans_of_the_sdk_lie_below_ours(at_daytona: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = tracing.get_tracer("test")
    monkeypatch.setattr(otel_decorator, "_tracer", tracer)
    with tracer.start_as_current_span("ours") as ours:
        await at_daytona.create()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    created = spans["AsyncDaytona.create"]
    assert created.parent is not None
    assert created.parent.span_id == ours.get_span_context().span_id
    assert {span.context.trace_id for span in spans.values() if span.context} == {ours.get_span_context().trace_id}


async def test_a_cancelled_call_is_cancelled_also_where_the_sdk_would_answer(
    at_daytona: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await at_daytona.create()
    entered = asyncio.Event()

    async def swallows(self: AsyncSandbox, **_: object) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    monkeypatch.setattr(AsyncSandbox, "refresh_data", swallows)
    task = asyncio.create_task(at_daytona.provider.get(instance.provider_id))
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    monkeypatch.undo()
    assert task.cancelled()
