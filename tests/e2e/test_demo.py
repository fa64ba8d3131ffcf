"""`hearth demo` as a stranger runs it: all promises hold, one JSON object, and nothing is left behind."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.cli import Hearth


@contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """A directory for what one demo leaves for a while: others may run at the same time. A socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="hearth-own-") as made:
        yield Path(made)


def demo_leftovers(own: Path) -> set[str]:
    """Files of a demo whose temporary directory is `own`, and processes of its stack."""
    found = {str(path) for path in own.glob("hearth-demo-*")}
    for process in psutil.process_iter():
        try:
            if str(own) in process.environ().get("HEARTH_STACK_ROOT", ""):
                found.add(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(180)
async def test_the_demo_keeps_its_promises_and_leaves_nothing(tmp_path: Path) -> None:
    with own_temporary_directory() as own:
        demo = asyncio.create_task(Hearth(tmp_path, {"TMPDIR": str(own)}).run("demo", "--json", seconds=150))
        seen: set[str] = set()
        while not demo.done():
            seen |= demo_leftovers(own)
            await asyncio.sleep(0.5)
        result = (await demo).json()
        assert seen
        assert demo_leftovers(own) == set()
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
