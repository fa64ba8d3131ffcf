"""`hearth doctor --live-daytona` as it runs against the real service, here against the stand-in: what it makes goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.cli import PROGRAM, Finished, Hearth
from tests.support.daytona import Fault, Kind, RunningStandIn, StandIn
from tests.support.exhaustive import sampled

AGENTD = [
    *(sys.executable, "-P", "-m", "services.sandbox.agentd", "--host", "{host}", "--port", "{port}"),
    *("--agents-file", "{agents}", "--log-dir", "{logs}"),
]
STAGES = ["create", "daemon", "authorization", "stop", "start", "daemon again", "old token", "delete"]


@contextlib.asynccontextmanager
async def daytona(directory: Path) -> AsyncIterator[tuple[RunningStandIn, Hearth]]:
    """A stand-in, and the program with the settings that point at it."""
    async with StandIn.running(directory / "daytona") as stand_in:
        environment = {
            "HEARTH_DAYTONA_API_URL": stand_in.url,
            "HEARTH_DAYTONA_API_KEY": stand_in.api_key,
            "HEARTH_DAYTONA_DAEMON": json.dumps(AGENTD),
            "HEARTH_DAYTONA_MOUNT": str(directory / "mounts"),
            processes.MARKER: processes.marker(),
        }
        yield stand_in, Hearth(directory / ".hearth", environment)


async def check(hearth: Hearth, *arguments: str) -> Finished:
    return await hearth.run("doctor", "--live-daytona", "--max-minutes", "1", *arguments, seconds=70)


async def test_one_sandbox_lives_through_all_stages_and_is_deleted(tmp_path: Path) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        done = await check(hearth, "--json")
        told = done.json()
        assert [stage["name"] for stage in told["stages"]] == STAGES
        assert {stage["outcome"] for stage in told["stages"]} == {"ok"}
        assert told["authorization_passes"] is True
        assert (told["before"], told["after"], told["left"]) == (0, 0, 0)
        assert told["problems"] == []
        assert told["cost_micro_usd"] > 0
        assert stand_in.running() == 0
        text = await check(hearth)
        assert text.code == 0, text.stderr
        assert "instances before 0, after 0" in text.stdout
        assert "all is good" in text.stdout


async def test_a_daemon_that_does_not_start_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        hearth.environment["HEARTH_DAYTONA_DAEMON"] = json.dumps(["/bin/false"])
        done = await check(hearth, "--json")
        assert done.code == 1, done.stdout
        told = json.loads(done.stdout)
        assert [stage["name"] for stage in told["stages"]] == ["create", "daemon", "delete"]
        assert told["left"] == 0
        assert any(problem.startswith("daemon:") for problem in told["problems"])
        assert stand_in.running() == 0


@pytest.mark.exhaustive
async def test_a_daemon_that_does_not_see_its_token_is_told_apart(tmp_path: Path) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        # As when the proxy in front of it keeps the header for itself: the daemon answers, and refuses us.
        deaf = ["env", "HEARTH_AGENTD_TOKEN=another", *AGENTD]
        hearth.environment["HEARTH_DAYTONA_DAEMON"] = json.dumps(deaf)
        done = await check(hearth, "--json")
        assert done.code == 1, done.stdout
        told = json.loads(done.stdout)
        assert told["authorization_passes"] is False
        assert any("Authorization does not pass" in problem for problem in told["problems"])
        assert told["left"] == 0
        assert stand_in.running() == 0


@pytest.mark.exhaustive
async def test_the_limit_holds_and_what_could_not_be_deleted_is_told(tmp_path: Path) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        stand_in.faults.add(Fault("create", Kind.STUCK))
        done = await hearth.run("doctor", "--live-daytona", "--max-minutes", "0.5", "--json", seconds=60)
        assert done.code == 1, done.stdout
        told = json.loads(done.stdout)
        assert [stage["name"] for stage in told["stages"]] == ["create", "limit", "delete"]
        # Daytona deletes nothing that is on its way: it has to be looked after by hand, and can be found by its label.
        assert told["left"] == 1
        assert any(f"hearth-doctor={told['run']}" in problem for problem in told["problems"])
        stand_in.release()


async def test_a_wrong_key_is_no_answer(tmp_path: Path) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        hearth.environment["HEARTH_DAYTONA_API_KEY"] = "wrong"
        done = await check(hearth)
        assert done.code == 2
        assert stand_in.running() == 0
        hearth.environment["HEARTH_DAYTONA_API_KEY"] = ""
        hearth.environment.pop("DAYTONA_API_KEY", None)
        done = await check(hearth)
        assert done.code == 2
        assert "HEARTH_DAYTONA_API_KEY" in done.stdout + done.stderr


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], every=2))
async def test_interrupted_it_deletes_first(tmp_path: Path, number: signal.Signals) -> None:
    async with daytona(tmp_path) as (stand_in, hearth):
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("doctor", "--live-daytona", "--json"),
            env=hearth.environment,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                while stand_in.running() == 0:
                    assert process.returncode is None
                    await asyncio.sleep(0.01)
                process.send_signal(number)
                stdout, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert json.loads(stdout)["left"] == 0
        assert stand_in.running() == 0
