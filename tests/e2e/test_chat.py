"""`hearth chat` as a person uses it: text appears, how a turn started is told, Ctrl-C stops the agent, not the chat."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid

import pytest

from tests.support.cli import PROGRAM, Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_conversation_in_the_terminal(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    said = await hearth.run("chat", name, stdin="remember my name is Ada\nwhat is my name?\nerror broken\n\n")
    assert said.code == 0, said.stderr
    assert "Your name is Ada." in said.stdout
    assert "cold" in said.stdout
    assert "warm" in said.stdout
    assert "AGENT_ERROR" in said.stdout


async def test_items_as_received_with_json(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    lines = (await hearth.run("chat", name, "--json", stdin="hello\n")).lines()
    assert "started" in lines[0]
    kinds = {kind for line in lines[1:] for kind in line}
    assert {"event", "frame", "ready"} <= kinds
    assert lines[-1]["event"]["event"]["type"] == "execution.completed"


async def test_an_interrupt_stops_the_agent_and_the_chat_goes_on(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *("chat", name, "--json"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=hearth.environment,
        limit=8 * 1024 * 1024,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    endings: list[str] = []
    frames = 0
    try:
        async with asyncio.timeout(60):
            process.stdin.write(b"stream 3000 words at 50/s\n")
            async for line in process.stdout:
                item = json.loads(line)
                frames += "frame" in item
                if frames == 5:
                    frames += 1
                    process.send_signal(signal.SIGINT)
                event = item.get("event", {}).get("event", {})
                if event.get("type") in ("execution.stopped", "execution.completed"):
                    endings.append(event["type"])
                    if len(endings) == 2:
                        break
                    process.stdin.write(b"hello\n")
            process.stdin.write(b"\n")
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert endings == ["execution.stopped", "execution.completed"]
