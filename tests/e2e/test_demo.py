"""`hearth demo` as a stranger runs it: all promises hold, one JSON object, and nothing is left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.cli import Hearth


def demo_leftovers() -> set[str]:
    found = {str(path) for path in Path(tempfile.gettempdir()).glob("hearth-demo-*")}
    for process in psutil.process_iter():
        try:
            if "hearth-demo-" in process.environ().get("HEARTH_STACK_ROOT", ""):
                found.add(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(180)
async def test_the_demo_keeps_its_promises_and_leaves_nothing(tmp_path: Path) -> None:
    before = demo_leftovers()
    result = (await Hearth(tmp_path).run("demo", "--json", seconds=150)).json()
    cold, warm, restarted, shared, stopped = result["turns"]

    assert [turn["n"] for turn in result["turns"]] == [1, 2, 3, 4, 5]
    assert cold["how"] == "cold"
    assert (warm["how"], warm["agent_pid"], warm["agent_turns_in_memory"]) == ("warm", cold["agent_pid"], 2)
    assert "Ada" in warm["text"]
    assert restarted["how"] == "restarted"
    assert restarted["agent_pid"] != warm["agent_pid"]
    assert restarted["sandbox_id"] == warm["sandbox_id"]
    assert restarted["agent_session_loaded"]
    assert "Ada" in restarted["text"]
    assert shared["outcome"] == "completed"
    assert stopped["outcome"] == "stopped"
    for turn in result["turns"]:
        assert {"admit", "acquire", "open", "settle"} <= set(turn["stages_ms"]) | {"settle"}
        assert turn["first_output_ms"] is not None
        assert turn["events"] > 0
        assert turn["frames"] > 0
    assert result["late_reader"] == {"complete": True}
    assert result["replay"]["contiguous"]
    assert result["replay"]["equal"]
    assert demo_leftovers() <= before
