"""The scripted agent as a process: how it starts, ends, crashes, and what it does with lines that are no messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import processes
from tests.support.acp_stdio import scripted
from tests.support.harness import ROOT, SCRIPTED_AGENT
from tests.support.waiting import ended, eventually, pid_in


def start(tmp_path: Path, **env: str) -> subprocess.Popen[bytes]:
    """An agent process, spoken to by hand."""
    own = {"HEARTH_AGENT_STATE": str(tmp_path / "state"), processes.MARKER: processes.marker()}
    return subprocess.Popen(
        SCRIPTED_AGENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **own, **env},
    )


def say(process: subprocess.Popen[bytes], *messages: object) -> None:
    """Write messages, or raw lines."""
    assert process.stdin is not None
    for message in messages:
        process.stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read a message."""
    assert process.stdout is not None
    message: dict[str, Any] = json.loads(process.stdout.readline())
    return message


def begin(process: subprocess.Popen[bytes], tmp_path: Path, text: str) -> None:
    """Open a session and send a prompt."""
    say(process, {"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": str(tmp_path)}})
    session = hear(process)["result"]["sessionId"]
    prompt = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
    say(process, {"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": prompt})


def end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes, int]:
    """Close the input and wait → output, errors, exit code."""
    output, errors = process.communicate(timeout=10)
    return output, errors, process.returncode


def test_it_imports_nothing_that_would_slow_its_start(tmp_path: Path) -> None:
    script = "import hearth.agents.scripted.__main__, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {name.split(".")[0] for name in result.stdout.split()}
    assert packages - set(sys.stdlib_module_names) - {"sitecustomize"} <= {"hearth"} | {
        name for name in packages if name.startswith("_")
    }


async def test_the_end_of_the_input_ends_it_and_its_commands(tmp_path: Path) -> None:
    process = start(tmp_path)
    begin(process, tmp_path, f"run echo $$ > {tmp_path}/pid; sleep 300")
    shell = psutil.Process(await pid_in(tmp_path / "pid"))
    assert end(process)[2] == 0
    await eventually(lambda: ended(shell.pid))


@pytest.mark.parametrize("text", ["ignore-eof\nsaid", "said\nhang-hard"])
def test_it_can_be_told_to_stay(tmp_path: Path, text: str) -> None:
    process = start(tmp_path)
    begin(process, tmp_path, text)
    assert hear(process)["method"] == "session/update"
    assert process.stdin is not None
    process.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.wait(5) == 0
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()


async def test_hang_hard_ignores_cancel(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        turn = agent.begin("hang-hard")
        await agent.connection.cancel(agent.session)
        done, _ = await asyncio.wait([turn], timeout=0.3)
        assert not done
        os.kill(agent.pid, signal.SIGTERM)
        await asyncio.wait([turn])
        assert turn.exception() is not None


@pytest.mark.parametrize(("text", "code"), [("crash 7", 7), ("crash-silent", -signal.SIGKILL)])
def test_crashes(tmp_path: Path, text: str, code: int) -> None:
    process = start(tmp_path)
    begin(process, tmp_path, f"flood 50 1000\n{text}")
    assert process.stdout is not None
    output = process.stdout.read()
    _, errors, exit_code = end(process)
    assert exit_code == code
    # All that was said before is there, whole.
    assert [json.loads(line)["method"] for line in output.splitlines()] == ["session/update"] * 50
    assert (b"crashes with 7" in errors) == (code == 7)


def test_garbage(tmp_path: Path) -> None:
    process = start(tmp_path)
    begin(process, tmp_path, "garbage")
    assert process.stdout is not None
    assert process.stdout.readline() == b"this is not JSON\n"
    end(process)


def test_what_it_cannot_read_is_answered(tmp_path: Path) -> None:
    process = start(tmp_path)
    say(process, b"{\n", b"\n", [1], {"jsonrpc": "2.0", "id": 5, "method": "session/prompt"}, {"id": 9, "result": {}})
    assert [hear(process)["error"]["code"] for _ in range(3)] == [-32700, -32600, -32602]
    assert end(process)[2] == 0


@pytest.mark.parametrize(("how", "code"), [("exit:4", 4), ("hang", 0), ("garbage", 0), ("nonsense", 1)])
def test_starts_that_fail(tmp_path: Path, how: str, code: int) -> None:
    process = start(tmp_path, HEARTH_SCRIPTED_START=how)
    if how in ("hang", "garbage"):
        say(process, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}})
    output, errors, exit_code = end(process)
    assert exit_code == code
    assert (b"this is not JSON" in output) == (how == "garbage")
    assert (b"HEARTH_SCRIPTED_START" in errors) == (how in ("exit:4", "nonsense"))
