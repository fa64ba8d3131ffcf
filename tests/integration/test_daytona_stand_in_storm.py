"""Every fault switch at 5 % while many callers use the stand-in at once: it keeps its books, and nothing is left."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromSnapshotParams, DaytonaError, DaytonaNotFoundError

from tests.support.daytona import Delays, Kind, RunningStandIn, StandIn, checks
from tests.support.daytona.client import connected
from tests.support.daytona.processes import marked
from tests.support.waiting import eventually

_CALLERS = 12
_ROUNDS = 12


async def use(client: AsyncDaytona, http: aiohttp.ClientSession, caller: int) -> None:
    """Use sandboxes as somebody does who takes every error for a reason to go on with something else."""
    chance = random.Random(caller)
    for number in range(_ROUNDS):
        name = f"s-{caller}-{number}"
        with suppress(DaytonaError):
            await client.create(CreateSandboxFromSnapshotParams(name=name), timeout=5)
        with suppress(DaytonaError):
            sandbox = await client.get(name, request_timeout=5)
            for _ in range(4):
                with suppress(DaytonaError, aiohttp.ClientError):
                    await step(sandbox, http, chance)


async def step(sandbox: AsyncSandbox, http: aiohttp.ClientSession, chance: random.Random) -> None:
    """Do one thing with a sandbox."""
    match chance.choices(["run", "upload", "stop", "start", "activity", "delete", "ask"], [3, 1, 2, 2, 1, 1, 3])[0]:
        case "run":
            await sandbox.process.exec("setsid sleep 1000 >/dev/null 2>&1 &", timeout=5)
        case "upload":
            await sandbox.fs.upload_file(b"x", "file")
        case "stop":
            await sandbox.stop(timeout=5)
        case "start":
            await sandbox.start(timeout=5)
        case "activity":
            await sandbox.refresh_activity()
        case "delete":
            await sandbox.delete(timeout=5, wait=True)
        case _:
            link = await sandbox.get_preview_link(3000)
            await http.post(link.url, headers={"X-Daytona-Preview-Token": link.token})


async def clear(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    """Delete everything, as a reconciler does: until nothing is seen."""
    while found := [sandbox async for sandbox in client.list()]:
        for sandbox in found:
            try:
                await sandbox.delete(timeout=5)
            except DaytonaNotFoundError:
                continue
            except DaytonaError:
                stand_in.release()
        await asyncio.sleep(0.05)


@pytest.mark.exhaustive
async def test_every_fault_at_five_percent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    delays = Delays(create=(0.0, 0.02), start=(0.0, 0.02), stop=(0.0, 0.02))
    async with (
        StandIn.running(tmp_path, delays=delays, patience=1.0) as stand_in,
        connected(stand_in) as client,
        aiohttp.ClientSession() as http,
    ):
        stand_in.faults.everything(0.05, seed=11, seconds=0.05)
        await asyncio.gather(*(use(client, http, caller) for caller in range(_CALLERS)))
        counts = stand_in.faults.counts()
        assert all(counts.get(kind.value) for kind in Kind), counts
        stand_in.faults.clear()
        await clear(client, stand_in)
        await eventually(lambda: not stand_in.sandboxes())

        ids = {entry.sandbox for entry in stand_in.log.of("state")}
        assert stand_in.running() == 0
        assert stand_in.counts() == {"destroyed": len(ids)}
        assert not any(marked(one) for one in ids)
        usage, now = stand_in.usage(), asyncio.get_running_loop().time()
        assert usage.running > 0
        assert checks.most_at_once(checks.charged(stand_in.log, now)) >= 1
        assert not any((tmp_path / "sandboxes").iterdir())
    # A handler of ours that fails is a fault that nobody switched on.
    own = [record for record in caplog.records if record.name.startswith(("aiohttp.server", "asyncio", "tests."))]
    assert not own, [record.getMessage() for record in own]
