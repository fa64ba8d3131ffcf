"""`up`, `status` and `down` as a user meets them: twice in a row, after a crash, with nothing there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from hearth.embedded.postgres import EmbeddedPostgres
from tests.support.cli import PROGRAM, Hearth
from tests.support.waiting import eventually


def processes_of(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HEARTH_STACK_ROOT") == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_up_twice_crash_up_and_down(scratch: Path) -> None:
    hearth = Hearth(scratch / ".hearth")
    try:
        first = (await hearth.up()).json()
        assert first["started"]
        assert {part["name"]: part["state"] for part in first["components"]} == {
            "postgres": "running",
            "valkey": "running",
            "pool": "serving",
            "history": "serving",
            "relay": "serving",
            "sandbox": "serving",
        }
        second = (await hearth.up()).json()
        assert not second["started"]
        assert second["components"] == first["components"]
        text = await hearth.run("up")
        assert "runs already" in text.stdout
        assert text.stdout.count("grpcurl -plaintext") == 3

        pids = hearth.pids()
        assert (await hearth.run("send", "crash", "remember my name is Ada", "--wait")).code == 0
        for name in ("history", "postgres"):
            psutil.Process(pids[name]).send_signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pids["history"]).wait(10)
        assert (await hearth.run("status")).code == 3
        recovered = await hearth.up()
        assert recovered.json()["started"]
        assert "recovering from a crash" in recovered.stderr
        assert hearth.pids()["pool"] == pids["pool"]
        assert (await hearth.run("send", "crash", "what is my name?", "--wait")).code == 0
        log = (await hearth.run("history", "crash", "--json")).lines()
        assert [int(item["cursor"]["sequence"]) for item in log] == list(range(1, len(log) + 1))
    finally:
        down = await hearth.run("down", "--json")
    assert down.json() == {"stopped": True}
    assert processes_of(hearth.root) == []
    assert (await hearth.run("down", "--json")).json() == {"stopped": False}
    assert (await hearth.run("status")).code == 3


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_a_stack_killed_as_a_whole_leaves_nothing_for_the_next_one(scratch: Path) -> None:
    hearth = Hearth(scratch / ".hearth")
    try:
        assert (await hearth.up()).code == 0
        assert (await hearth.run("send", "s", "hello", "--wait")).code == 0
        agents = processes_of(hearth.root)
        assert len(agents) >= 6
        (hearth.root / "stack.json").unlink()
        for process in agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(agents, 10)
        assert (await hearth.up()).json()["started"]
        assert (await hearth.run("send", "s", "hello again", "--wait")).code == 0
    finally:
        assert (await hearth.run("down")).code == 0
    assert processes_of(hearth.root) == []


async def test_what_up_has_started_when_it_is_interrupted_is_stopped(scratch: Path) -> None:
    hearth = Hearth(scratch / ".hearth")
    postgres = EmbeddedPostgres(hearth.root / "postgres")
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "up", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env=hearth.environment
    )
    # It is being started, and does not answer yet.
    await eventually(postgres.directory.exists, timeout=60)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await process.wait() == 130
    assert postgres.find() is None
    assert (await hearth.run("down", "--json")).json() == {"stopped": False}


@pytest.mark.timeout(240)
async def test_packages_of_the_directory_that_up_is_called_in_are_left_alone(scratch: Path) -> None:
    (scratch / "services").mkdir()
    (scratch / "services" / "__init__.py").write_text("raise AssertionError('somebody else imports this')\n")
    hearth = Hearth(scratch / ".hearth", directory=scratch)
    try:
        assert (await hearth.up()).json()["started"]
    finally:
        assert (await hearth.run("down")).code == 0


async def test_a_call_without_a_stack_says_what_to_do(tmp_path: Path) -> None:
    hearth = Hearth(tmp_path, {"HEARTH_POOL_ADDRESS": "127.0.0.1:9", "HEARTH_HISTORY_ADDRESS": "127.0.0.1:9"})
    refused = await hearth.run("send", "s", "hello")
    assert refused.code == 3
    assert "hearth up" in refused.stderr


async def test_wrong_usage_has_its_own_exit_code(tmp_path: Path) -> None:
    hearth = Hearth(tmp_path)
    assert (await hearth.run("send")).code == 2
    assert (await hearth.run("send", "s", "x", "--on-busy", "sometimes")).code == 2
    assert (await hearth.run("nonsense")).code == 2
