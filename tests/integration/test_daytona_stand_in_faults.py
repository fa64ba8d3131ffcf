"""What can be made to go wrong in the stand-in, as the real SDK feels it; rate limits; the stand-in as a program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    CreateSandboxFromSnapshotParams,
    DaytonaBadGatewayError,
    DaytonaBadRequestError,
    DaytonaConfig,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaInternalServerError,
    DaytonaNotFoundError,
    DaytonaRateLimitError,
    DaytonaTimeoutError,
    VolumeMount,
)

from tests.support.daytona import Delays, Fault, Faults, Kind, RunningStandIn, StandIn, checks
from tests.support.daytona.client import connected
from tests.support.daytona.faults import CALLS, everything
from tests.support.daytona.journal import Entry
from tests.support.daytona.limits import RateLimits
from tests.support.daytona.processes import marked
from tests.support.daytona.remote import started
from tests.support.processes import MARKER, marker
from tests.support.waiting import eventually

_ROOT = Path(__file__).resolve().parents[2]


@pytest_asyncio.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[RunningStandIn]:
    async with StandIn.running(tmp_path / "daytona", patience=0.2) as running:
        yield running


@pytest_asyncio.fixture
async def client(stand_in: RunningStandIn) -> AsyncIterator[AsyncDaytona]:
    async with connected(stand_in) as connection:
        yield connection


def named(name: str) -> CreateSandboxFromSnapshotParams:
    return CreateSandboxFromSnapshotParams(name=name)


async def test_a_status_in_place_of_the_work(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    switch = stand_in.faults.add(Fault("create", Kind.STATUS, times=1, status=429, retry_after=2))
    with pytest.raises(DaytonaRateLimitError) as caught:
        await client.create(named("one"))
    assert caught.value.headers["Retry-After"] == "2"
    assert not stand_in.sandboxes()
    assert (switch.met, switch.fired) == (1, 1)
    await client.create(named("one"))
    assert stand_in.faults.counts() == {"create/status": 1, "status": 1}


async def test_an_orphan_by_a_lost_reply_or_a_late_error(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    stand_in.faults.add(Fault("create", Kind.LOSE_REPLY, times=1))
    with pytest.raises(DaytonaConnectionError):
        await client.create(named("lost"))
    stand_in.faults.add(Fault("create", Kind.FAIL_AFTER, times=1, status=502))
    with pytest.raises(DaytonaBadGatewayError):
        await client.create(named("failed"))
    assert {one.name: one.state for one in stand_in.sandboxes()} == {"lost": "started", "failed": "started"}


async def test_a_cut_connection_did_nothing(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    made = await client.create(named("one"))
    stand_in.faults.add(Fault("stop", Kind.DROP, times=1))
    with pytest.raises(DaytonaConnectionError):
        await made.stop(timeout=20)
    assert stand_in.sandbox("one").state == "started"


async def test_a_delayed_call_outlives_its_caller(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    stand_in.faults.add(Fault("get", Kind.DELAY, times=1, seconds=30))
    made = await client.create(named("one"))
    with pytest.raises(DaytonaTimeoutError):
        await made.refresh_data(request_timeout=0.3)


async def test_a_lie_about_the_state(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    await client.create(named("one"))
    stand_in.faults.add(Fault("get", Kind.LIE, times=1, state="stopped", sandbox="one"))
    stand_in.faults.add(Fault("list", Kind.LIE, times=1, state="nothing known"))
    assert (await client.get("one")).state == "stopped"
    assert (await client.get("one")).state == "started"
    assert [sandbox.state async for sandbox in client.list()] == ["unknown_default_open_api"]
    assert [sandbox.state async for sandbox in client.list()] == ["started"]


async def test_a_stuck_start_goes_on_when_it_is_released(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    stand_in.faults.add(Fault("create", Kind.STUCK, times=1))
    creating = asyncio.create_task(client.create(named("one"), timeout=60))
    # The server does not wait for ever; the SDK goes on looking.
    await eventually(lambda: stand_in.log.of("call", call="get"))
    assert stand_in.sandbox("one").state == "creating"
    assert not creating.done()
    stand_in.release()
    assert (await creating).state == "started"

    stand_in.faults.add(Fault("stop", Kind.STUCK, times=1, seconds=0.3))
    made = await client.get("one")
    await made.stop(timeout=20)
    assert made.state == "stopped"


async def test_a_create_that_breaks_leaves_a_sandbox_in_error(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    stand_in.faults.add(Fault("create", Kind.BREAK, times=1, message="no runner", recoverable=True))
    with pytest.raises(DaytonaBadRequestError, match="Sandbox failed to start: no runner"):
        await client.create(named("one"))
    found = await client.get("one")
    assert (found.state, found.error_reason, found.recoverable) == ("error", "no runner", True)
    assert stand_in.running() == 0
    with pytest.raises(DaytonaBadRequestError, match="errored state"):
        await found.start(timeout=5)


async def test_a_stop_that_breaks_leaves_it_running(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    made = await client.create(named("one"))
    stand_in.faults.add(Fault("stop", Kind.BREAK, times=1))
    with pytest.raises(DaytonaError, match="error state"):
        await made.stop(timeout=20)
    assert (stand_in.sandbox("one").state, stand_in.running()) == ("error", 1)
    await made.delete(timeout=20, wait=True)
    assert stand_in.running() == 0


async def test_a_delete_that_breaks_is_finished_by_the_server(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    made = await client.create(named("one"))
    stand_in.faults.add(Fault("delete", Kind.BREAK, times=1))
    await made.delete(timeout=20)
    await eventually(lambda: stand_in.log.of("state", new="error"))
    # An errored one that was told to go is a 404, so it must not run any more.
    assert not marked(made.id)
    await eventually(lambda: not stand_in.sandboxes())
    with pytest.raises(DaytonaNotFoundError):
        await client.get(made.id)


async def test_faults_of_toolbox_and_proxy_come_from_there(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    made = await client.create(named("one"))
    stand_in.faults.add(Fault("execute", Kind.STATUS, times=1, status=500))
    with pytest.raises(DaytonaInternalServerError) as caught:
        await made.process.exec("true")
    assert caught.value.source == "DAYTONA_DAEMON"
    stand_in.faults.add(Fault("execute", Kind.LOSE_REPLY, times=1))
    with pytest.raises(DaytonaConnectionError):
        await made.process.exec("touch done")
    assert (await made.process.exec("ls")).result == "done\n"
    stand_in.faults.add(Fault("preview", Kind.STATUS, times=1, status=502))
    link = await made.get_preview_link(3000)
    async with aiohttp.ClientSession() as http:
        async with http.get(link.url) as response:
            assert (response.status, (await response.json())["source"]) == (502, "DAYTONA_PROXY")
        stand_in.faults.add(Fault("preview", Kind.DROP, times=1))
        with pytest.raises(aiohttp.ClientError):
            await http.post(link.url)


async def test_a_switch_waits_its_turn_and_keeps_to_its_sandbox(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    await client.create(named("one"))
    await client.create(named("two"))
    switch = stand_in.faults.add(Fault("get", Kind.STATUS, status=503, skip=1, times=1, sandbox="two"))
    results = []
    for name in ("one", "one", "two", "two", "two"):
        try:
            await client.get(name)
            results.append("ok")
        except DaytonaError as error:
            results.append(str(error.status_code))
    assert results == ["ok", "ok", "ok", "503", "ok"]
    stand_in.faults.remove(switch)
    assert stand_in.faults.counts()["get/status"] == 1


def test_the_same_seed_fires_the_same_faults() -> None:
    def series() -> list[Kind | None]:
        faults = Faults()
        faults.everything(0.05, seed=7)
        return [fault.kind if (fault := faults.decide(call)) else None for call in CALLS for _ in range(200)]

    first = series()
    assert first == series()
    assert set(first) >= set(Kind)
    assert {fault.kind for fault in everything(0.05, 1.0)} == set(Kind)


async def test_rate_limits_tell_when_to_come_back(tmp_path: Path) -> None:
    limits = RateLimits(create=1, authenticated=100, window=30.0)
    async with StandIn.running(tmp_path, rate_limits=limits) as stand_in, connected(stand_in) as client:
        await client.create(named("one"))
        with pytest.raises(DaytonaRateLimitError) as caught:
            await client.create(named("two"))
        headers = caught.value.headers
        assert 0 < int(headers["Retry-After"]) <= 30
        assert headers["X-RateLimit-Limit-sandbox-create"] == "1"
        assert headers["X-RateLimit-Remaining-sandbox-create"] == "0"
        await client.get("one")
        # Every answer tells how the limits stand, also one about something else.
        stand_in.faults.add(Fault("get", Kind.STATUS, status=500, times=1))
        with pytest.raises(DaytonaError) as failed:
            await client.get("one")
        assert 0 < int(failed.value.headers["X-RateLimit-Reset-authenticated"]) <= 30
        assert "Retry-After" not in failed.value.headers


async def test_without_events_the_sdk_looks_by_itself(tmp_path: Path) -> None:
    delays = Delays(start=(0.3, 0.3))
    running = StandIn.running(tmp_path, events=False, patience=0.1, delays=delays)
    async with running as stand_in, connected(stand_in) as client:
        made = await client.create(named("one"))
        await made.stop(timeout=20)
        await made.start(timeout=20)
        assert made.state == "started"


async def test_events_end_a_wait_without_a_look(tmp_path: Path) -> None:
    async with StandIn.running(tmp_path, patience=0.0) as stand_in, connected(stand_in) as client:
        made = await client.create(named("one"))
        dispatcher = client._event_dispatcher
        assert dispatcher is not None
        await eventually(lambda: dispatcher.is_connected)
        made.state = None
        stand_in.kill("one")
        await eventually(lambda: made.state == "error")


async def test_measured_delays_are_those_of_the_real_service(tmp_path: Path) -> None:
    measured = Delays.measured()
    assert (measured.create, measured.start, measured.stop) == ((1.05, 2.2), (0.7, 1.7), (1.8, 2.0))
    assert measured.harness == {"session/new": (5.2, 5.2), "session/load": (1.2, 1.2)}
    loop = asyncio.get_running_loop()
    async with StandIn.running(tmp_path, delays=measured) as stand_in, connected(stand_in) as client:
        began = loop.time()
        made = await client.create(named("one"))
        created = loop.time()
        await made.stop(timeout=60)
        stopped = loop.time()
        # Only lower bounds: a busy machine takes longer.
        assert created - began >= 1.05
        assert stopped - created >= 1.8


def test_what_ran_is_added_up_from_the_log() -> None:
    def state(at: float, sandbox: str, old: str, new: str) -> Entry:
        return Entry(1, at, at, "state", sandbox, "s", {"old": old, "new": new, "cause": "test"})

    log = [
        state(0, "a", "", "creating"),
        state(1, "a", "creating", "started"),
        state(5, "b", "", "creating"),
        state(10, "a", "started", "stopping"),
        state(12, "a", "stopping", "stopped"),
        state(20, "a", "stopped", "destroying"),
        state(21, "a", "destroying", "destroyed"),
    ]
    assert checks.usage(log, 30) == checks.Usage(running=12 + 25, stopped=9)
    assert checks.most_at_once(checks.charged(log, 30)) == 2
    assert checks.Usage(3600, 3600).dollars(2, 4, 8) == pytest.approx(2 * 0.0504 + 4 * 0.0162 + 2 * 8 * 0.000108)


def test_idle_is_what_runs_without_traffic() -> None:
    def traffic(sandbox: str, began: float, end: float) -> Entry:
        data = {"harness": True, "accepted": True, "began": began, "ended": end}
        return Entry(1, end, end, "harness", sandbox, sandbox, data)

    log = [
        Entry(1, 0, 0, "state", "a", "", {"old": "", "new": "started", "cause": ""}),
        Entry(2, 0, 0, "state", "b", "", {"old": "", "new": "started", "cause": ""}),
        traffic("a", 10, 20),
        traffic("a", 50, 60),
        traffic("b", 20, 100),
    ]
    spans = sorted(checks.idle(log, 100, 2), key=lambda span: (span.sandbox, span.begin))
    assert [(span.sandbox, span.begin, span.end) for span in spans] == [
        ("a", 2, 8),
        ("a", 22, 48),
        ("a", 62, 98),
        ("b", 2, 18),
    ]
    assert checks.most_at_once(spans) == 2


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    address = tmp_path / "address"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.daytona", "--directory", str(tmp_path / "daytona")),
            *("--address-file", str(address), "--agent-command", '["echo", "agent"]'),
        ],
        cwd=_ROOT,
        env={**os.environ, MARKER: marker()},
    )
    while not address.exists():
        assert process.poll() is None
        time.sleep(0.02)
    yield json.loads(address.read_text()), process
    process.kill()
    process.wait()


async def test_as_a_program_it_is_steered_over_http(program: tuple[dict[str, Any], subprocess.Popen[bytes]]) -> None:
    given, process = program
    admin = given["admin"]
    config = DaytonaConfig(api_key=given["api_key"], api_url=given["url"], target="us")
    async with AsyncDaytona(config) as client, aiohttp.ClientSession() as http:
        fault = {"call": "create", "kind": "status", "status": 503, "times": 1}
        async with http.post(f"{admin}/faults", json=fault) as response:
            assert response.status == 200
        with pytest.raises(DaytonaError):
            await client.create(named("one"))
        made = await client.create(named("one"))
        assert (await made.process.exec("sandbox-agent x")).result == "agent x\n"
        async with http.get(f"{admin}/state") as response:
            state = await response.json()
        assert (state["running"], state["counts"]) == (1, {"started": 1})
        async with http.get(f"{admin}/faults") as response:
            assert (await response.json())["counts"]["status"] == 1
        async with http.get(f"{admin}/log?kind=state") as response:
            assert [entry["data"]["new"] for entry in await response.json()] == ["creating", "started"]
        async with http.post(f"{admin}/faults", json={"everything": 0.05, "seed": 3}) as response:
            assert len((await response.json())["switches"]) > len(CALLS)
        async with http.delete(f"{admin}/faults") as response:
            assert (await response.json())["switches"] == []
        async with http.post(f"{admin}/faults", json={"call": "nothing", "kind": "status"}) as response:
            assert response.status == 400
        await made.process.exec("setsid sleep 1000 >/dev/null 2>&1 &")
        assert marked(made.id)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert not marked(made.id)


async def test_a_remote_one_gives_its_log_and_takes_faults(tmp_path: Path) -> None:
    env = {**os.environ, MARKER: marker()}
    async with started(tmp_path / "daytona", "--patience", "0.1", "--no-events", env=env) as remote:
        async with AsyncDaytona(DaytonaConfig(api_key=remote.api_key, api_url=remote.url, target="us")) as client:
            await remote.add_fault(Fault("create", Kind.STUCK, times=1))
            creating = asyncio.create_task(client.create(named("one"), timeout=60))
            while not await remote.log(kind="call"):  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.02)
            assert await remote.running() == 1
            await remote.release()
            await creating
            await remote.kill("one")
            while await remote.running():  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.02)
        assert (await remote.fault_counts())["stuck"] == 1
        log = await remote.log()
        assert [entry.data["new"] for entry in log if entry.kind == "state"] == ["creating", "started", "error"]
        assert checks.usage(log, log[-1].at).running > 0
        assert await remote.overlaps() == []
        await remote.everything(0.05)
        await remote.clear_faults()


async def test_its_sandboxes_end_also_when_it_is_killed(
    program: tuple[dict[str, Any], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    given, process = program
    mount = tmp_path / "mount"
    async with AsyncDaytona(DaytonaConfig(api_key=given["api_key"], api_url=given["url"], target="us")) as client:
        made = await client.create(mounting((await client.volume.get("v", create=True)).id, mount))
        await made.process.exec("setsid sleep 1000 >/dev/null 2>&1 &")
        assert len(marked(made.id)) == 2
        with pytest.raises(RuntimeError, match="another stand-in"):
            async with StandIn.running(tmp_path / "daytona"):
                pass
        process.kill()
        await eventually(lambda: not marked(made.id))
    # What it left in the way does not stop another one.
    assert mount.is_symlink()
    async with StandIn.running(tmp_path / "other") as stand_in, connected(stand_in) as client:
        volume = await client.volume.get("v", create=True)
        await client.create(mounting(volume.id, mount))
        assert mount.resolve() == stand_in.volumes.path(volume.id)
    assert not mount.is_symlink()


def mounting(volume: str, path: Path) -> CreateSandboxFromSnapshotParams:
    mount = VolumeMount.model_validate({"volume_id": volume, "mount_path": str(path)})
    return CreateSandboxFromSnapshotParams(volumes=[mount])
