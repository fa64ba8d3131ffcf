"""`hearth demo --provider daytona`: the ladder on a stand-in of Daytona with the real SDK; nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from hearth.cli import stand_in
from tests.e2e.test_demo import demo_leftovers, own_temporary_directory
from tests.support.cli import Hearth
from tests.support.harness import sandbox_agent_binary

SECONDS = 150.0


def sandboxes_here(own: Path) -> set[int]:
    """Processes that run in a sandbox of the stand-in of a demo whose temporary directory is `own`."""
    found = set()
    for process in psutil.process_iter():
        try:
            inside = process.environ()
            if "DAYTONA_SANDBOX_ID" in inside and inside.get("TMPDIR", "").startswith(str(own)):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def check(result: dict[str, Any]) -> None:
    """All that the demo promises, seen from outside."""
    cold, warm, restarted, asked = result["turns"]
    assert [turn["how"] for turn in result["turns"]] == ["cold", "warm", "restarted", "warm"]
    assert {turn["outcome"] for turn in result["turns"]} == {"completed"}
    assert warm["agent_pid"] == cold["agent_pid"]
    assert restarted["agent_pid"] != cold["agent_pid"]
    assert restarted["sandbox_id"] == cold["sandbox_id"]
    assert restarted["agent_session_loaded"]
    assert "Ada" in warm["text"]
    assert "Ada" in restarted["text"]
    assert asked["permissions"] == [["allowed", "policy"], ["denied", "policy"]]
    assert sorted(asked["tools"]) == [["remove", "denied"], ["search", "succeeded"]]
    assert result["replay"]["contiguous"]
    assert result["replay"]["equal"]
    # The stand-in takes its time as the real service does, and each way of getting a turn shows it.
    assert cold["stages_ms"]["acquire"] > 1000
    assert warm["stages_ms"]["acquire"] < restarted["stages_ms"]["acquire"]
    assert warm["total_ms"] < restarted["total_ms"] < cold["total_ms"]


@pytest.mark.timeout(180)
async def test_the_ladder_on_daytona_holds_and_leaves_nothing(tmp_path: Path) -> None:
    with own_temporary_directory() as own:
        hearth = Hearth(tmp_path, {"TMPDIR": str(own)})
        demo = asyncio.create_task(hearth.run("demo", "--provider", "daytona", "--json", seconds=SECONDS))
        seen: set[int] = set()
        while not demo.done():
            seen |= sandboxes_here(own)
            await asyncio.sleep(1)
        check((await demo).json())
        assert seen
        assert demo_leftovers(own) == set()
        assert sandboxes_here(own) == set()


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_it_holds_with_the_real_sandbox_agent(tmp_path: Path) -> None:
    binary = str(sandbox_agent_binary())
    arguments = ("demo", "--provider", "daytona", "--daemon", binary)
    result = await Hearth(tmp_path).run(*arguments, "--json", seconds=SECONDS)
    check(result.json())


async def test_wrong_use_says_what_to_do(tmp_path: Path) -> None:
    hearth = Hearth(tmp_path)
    wrong = await hearth.run("demo", "--provider", "moon")
    assert wrong.code == 2
    assert "local, daytona" in wrong.stderr
    wrong = await hearth.run("demo", "--daytona-url", "http://127.0.0.1:1/api")
    assert wrong.code == 2
    keyless = Hearth(tmp_path, {"HEARTH_DAYTONA_API_KEY": "", "DAYTONA_API_KEY": ""})
    wrong = await keyless.run("demo", "--provider", "daytona", "--daytona-url", "http://127.0.0.1:1/api")
    assert wrong.code == 1
    assert "HEARTH_DAYTONA_API_KEY" in wrong.stderr
    with pytest.raises(stand_in.Unusable, match="from a clone of the repository"):
        stand_in.clone(tmp_path / "site-packages" / "hearth" / "cli" / "stand_in.py")
