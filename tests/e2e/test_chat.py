"""`hearth chat` as a person uses it: text appears, how a turn started is told, what the agent asks is answered,
messages wait or steer, Ctrl-C stops the agent and not the chat."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid

import pytest

from tests.support.cli import PROGRAM, Hearth
from tests.support.terminal import Terminal, terminal

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
    kinds = {kind for line in lines for kind in line}
    assert {"started", "event", "frame", "ready"} <= kinds
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


async def test_lines_of_a_pipe_answer_what_the_agent_asks(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    lines = 'ask search {"for": "hearths"}\ny\nask remove {}\nn\nhearth-ask {"prompt": "which colour?"}\nblue\nhello\n'
    said = await hearth.run("chat", name, "--permissions", "ask", stdin=lines)
    assert said.code == 0, said.stderr
    assert 'may it run search {"for":"hearths"}? y or n' in said.stdout.replace(": ", ":")
    assert "allowed" in said.stdout
    assert "denied" in said.stdout
    assert "which colour?" in said.stdout
    assert said.stdout.count("completed") == 4
    log = [item["event"] for item in (await hearth.run("history", name, "--json")).lines()]
    ran = {
        event["tool_completed"]["name"]: event["tool_completed"]["status"]
        for event in log
        if event["type"] == "tool.completed"
    }
    assert ran["search"] == "TOOL_STATUS_SUCCEEDED"
    assert ran["remove"] == "TOOL_STATUS_DENIED"


async def test_a_steer_of_a_pipe_runs_instead(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    said = await hearth.run("chat", name, stdin="stream 3000 words at 50/s\n/steer hello\n/nonsense\nand then\n")
    assert said.code == 0, said.stderr
    assert "/nonsense is no command" in said.stderr
    log = [item["event"] for item in (await hearth.run("history", name, "--json")).lines()]
    texts = [
        event["message_completed"]["content"][0]["text"]["text"]
        for event in log
        if event["type"] == "message.completed" and event["message_completed"]["role"] == "ROLE_USER"
    ]
    assert texts == ["stream 3000 words at 50/s", "hello", "and then"]
    endings = [event["type"] for event in log if event["type"].startswith("execution.") and "summary" in str(event)]
    assert endings == ["execution.stopped", "execution.completed", "execution.completed"]


def chatting(hearth: Hearth, *arguments: str) -> contextlib.AbstractAsyncContextManager[Terminal]:
    return terminal([PROGRAM, "chat", *arguments], {**hearth.environment, "COLUMNS": "200"})


async def test_somebody_types_while_the_agent_works(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    async with chatting(hearth, name) as chat:
        at = await chat.sees("you")
        chat.type("stream 3000 words at 40/s\n")
        at = await chat.sees("agent", after=at)
        chat.type("one\n")
        at = await chat.sees("waits at place 1", after=at)
        chat.type("two\n")
        at = await chat.sees("waits at place 2", after=at)
        chat.type("/edit 2 zwei\n")
        at = await chat.sees("place 2 now says: zwei", after=at)
        chat.type("/queue\n")
        at = await chat.sees("1 one", after=at)
        at = await chat.sees("2 zwei", after=at)
        chat.type("/remove 1\n")
        at = await chat.sees("removed: one", after=at)
        chat.type("/remove 7\n")
        at = await chat.sees("nothing waits at place 7", after=at)
        # Ctrl-C stops the agent, and what waits goes on when it is told to.
        chat.process.send_signal(signal.SIGINT)
        at = await chat.sees("stopping", after=at)
        at = await chat.sees("stopped", after=at)
        at = await chat.sees("1 waiting", after=at)
        chat.type("/resume\n")
        at = await chat.sees("zwei", after=at)
        at = await chat.sees("completed", after=at)
        at = await chat.sees("you", after=at)
        chat.type("\n")
        assert await chat.ends() == 0


async def test_whoever_comes_later_sees_what_is_asked_and_answers_it(hearth: Hearth) -> None:
    name = f"chat-{uuid.uuid4().hex[:8]}"
    asking = 'parallel ask search {"n": 1}\nparallel ask search {"n": 2}'
    assert (await hearth.run("send", name, asking, "--permissions", "ask")).code == 0
    async with chatting(hearth, name) as chat:
        at = await chat.sees('{"n":2}', after=await chat.sees('{"n":1}'))
        chat.type("/gates\n")
        at = await chat.sees("search", after=at)
        chat.type("y all\n")
        at = await chat.sees("completed", after=at)
        # At the end of what is typed the chat is over at once.
        chat.type("\x04")
        assert await chat.ends() == 0
    shown = (await hearth.run("gates", name, "--all")).stdout
    assert shown.count("allowed, consumed") == 2
