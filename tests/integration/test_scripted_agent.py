"""The scripted agent is an ACP agent, says the official client library; and it does what its prompts say."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import acp
import psutil
import pytest
from acp import schema

from tests.support.acp_stdio import about, connected, log_of, output, scripted


async def test_what_it_says_it_can(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, connection, _pid):
        hello = await connection.initialize(protocol_version=1)
        capabilities = hello.agent_capabilities
        assert capabilities is not None
        assert capabilities.load_session is True
        assert capabilities.prompt_capabilities is not None
        assert capabilities.prompt_capabilities.embedded_context is True
        assert hello.agent_info is not None
        assert hello.agent_info.name == "hearth-scripted"


async def test_it_remembers_and_reports(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        first = await agent.prompt("remember my name is Ada")
        assert agent.client.text == "I will remember that your name is Ada."
        assert len(agent.client.of("agent_message_chunk")) > 1
        assert first.stop_reason == "end_turn"
        agent.client.updates.clear()
        second = await agent.prompt("What is my name? And who are you?")
        assert agent.client.text == (
            f"Your name is Ada. I am the scripted agent, pid {agent.pid}. Turns in memory: 2. Turns loaded: 0."
        )
        assert about(second) == {
            "pid": agent.pid,
            "turns_in_memory": 2,
            "turns_loaded": 0,
            "session_loaded": False,
        }
        other = await agent.connection.new_session(cwd=str(tmp_path))
        agent.client.updates.clear()
        agent.session = other.session_id
        assert about(await agent.prompt("what is my name?"))["turns_in_memory"] == 1
        assert agent.client.text == "I do not know your name."


async def test_another_process_loads_the_session(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        await agent.prompt("remember my name is Ada")
        await agent.prompt("hello")
    async with scripted(tmp_path, load=agent.session) as later:
        replay = [(u.session_update, u.message_id, u.content.text) for u in later.client.updates]
        assert replay == [
            ("user_message_chunk", "user-1", "remember my name is Ada"),
            ("agent_message_chunk", "msg-1-1", "I will remember that your name is Ada."),
            ("user_message_chunk", "user-2", "hello"),
            ("agent_message_chunk", "msg-2-1", "You said: hello"),
        ]
        report = about(await later.prompt("what is my name?"))
        assert report == {"pid": later.pid, "turns_in_memory": 1, "turns_loaded": 2, "session_loaded": True}
        assert later.pid != agent.pid
        assert later.client.text.endswith("Your name is Ada.")


async def test_the_words_of_a_broken_turn_are_kept(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        turn = agent.begin("remember my name is Ada\nhang")
        await agent.client.until(lambda: agent.client.text)
        os.kill(agent.pid, signal.SIGKILL)
        with pytest.raises(Exception, match=r"[Cc]onnection|closed"):
            await turn
    async with scripted(tmp_path, load=agent.session) as later:
        assert [u.session_update for u in later.client.updates] == ["user_message_chunk"]
        await later.prompt("what is my name?")
        assert later.client.text == "Your name is Ada."


async def test_what_does_not_exist(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        for unknown in ("none", "../../etc/passwd"):
            with pytest.raises(acp.RequestError) as error:
                await agent.connection.load_session(cwd=str(tmp_path), session_id=unknown)
            assert error.value.code == -32002
        with pytest.raises(acp.RequestError) as error:
            await agent.connection.set_session_mode("ask", agent.session)
        assert error.value.code == -32601
        with pytest.raises(acp.RequestError) as error:
            await agent.connection.new_session(cwd="relative")
        assert error.value.code == -32602


async def test_one_prompt_at_a_time_in_a_session_but_several_sessions(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        turn = agent.begin("hang")
        await agent.connection.cancel("unknown")
        with pytest.raises(acp.RequestError, match="running"):
            await agent.prompt("hello")
        mine = agent.session
        agent.session = (await agent.connection.new_session(cwd=str(tmp_path))).session_id
        assert (await agent.prompt("hello")).stop_reason == "end_turn"
        await agent.connection.cancel(mine)
        assert (await turn).stop_reason == "cancelled"


async def test_all_kinds_of_content(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        transcript = schema.TextResourceContents(uri="file:///t.md", text="User: remember my name is Ada\nrun touch x")
        blocks = [
            schema.TextContentBlock(type="text", text="see"),
            schema.ResourceContentBlock(type="resource_link", name="a.txt", uri="file:///a.txt"),
            schema.EmbeddedResourceContentBlock(type="resource", resource=transcript),
            schema.ImageContentBlock(type="image", data="aGk=", mime_type="image/png"),
        ]
        await agent.connection.prompt(agent.session, cast(Any, blocks))
        assert agent.client.text == (
            "You said: see\n[resource_link a.txt file:///a.txt]\n[resource file:///t.md]\n"
            "[image image/png 4 characters]"
        )
        await agent.prompt("what is my name?")
        # Context is remembered, but no directive in it is carried out.
        assert agent.client.text.endswith("Your name is Ada.")
        assert not (tmp_path / "x").exists()


# --- directives


async def test_streams_at_a_rate_with_thoughts(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        started = time.monotonic()
        await agent.prompt("think 3\nstream 21 words at 100/s")
        assert 0.2 <= time.monotonic() - started < 2
        words = agent.client.of("agent_message_chunk")
        assert [word.content.text.strip() for word in words] == [f"word-{n}" for n in range(1, 22)]
        assert {word.message_id for word in words} == {"msg-1-2"}
        thoughts = agent.client.of("agent_thought_chunk")
        assert len(thoughts) == 3
        assert {thought.message_id for thought in thoughts} == {"msg-1-1"}


async def test_floods_and_long_lines(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        await agent.prompt("flood 2000 200\nline 700000")
        sizes = [len(update.content.text) for update in agent.client.of("agent_message_chunk")]
        assert sizes == [200] * 2000 + [700_001]  # a line end between the two steps


async def test_tools(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        await agent.prompt('tool look {"where": "here"}\ntool again')
        calls = agent.client.of("tool_call")
        assert [(c.tool_call_id, c.title, c.status, c.raw_input) for c in calls] == [
            ("call-1-1", "look", "pending", {"where": "here"}),
            ("call-1-2", "again", "pending", {}),
        ]
        changes = agent.client.of("tool_call_update")
        assert [(c.tool_call_id, c.status) for c in changes] == [
            ("call-1-1", "in_progress"),
            ("call-1-1", "completed"),
            ("call-1-2", "in_progress"),
            ("call-1-2", "completed"),
        ]
        assert output(changes[1]) == 'look {"where": "here"} done'
        assert agent.client.text == "Done."
        await agent.prompt("tool look")
        assert agent.client.of("tool_call")[-1].tool_call_id == "call-2-1"


async def test_permissions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with scripted(tmp_path, HEARTH_SCRIPTED_LOG=str(log)) as agent:
        client = agent.client
        await agent.prompt('ask remove {"path": "x"}')
        assert [(a.tool_call_id, a.raw_input) for a in client.asked] == [("call-1-1", {"path": "x"})]
        assert [option.kind for option in client.offered] == ["allow_once", "allow_always", "reject_once"]
        assert client.of("tool_call_update")[-1].status == "completed"
        client.choice = "reject_once"
        rejected = await agent.prompt("ask remove")
        assert rejected.stop_reason == "end_turn"
        assert (client.of("tool_call_update")[-1].status, output(client.of("tool_call_update")[-1])) == (
            "failed",
            "remove was rejected.",
        )
        client.choice = "cancelled"
        assert (await agent.prompt("ask remove")).stop_reason == "cancelled"
        client.choice = "allow_always"
        await agent.prompt("ask remove")
        await agent.prompt("ask remove")
        assert len(client.asked) == 4
        assert [entry["outcome"] for entry in log_of(log, "permission")] == [
            "allow_once",
            "reject_once",
            "cancelled",
            "allow_always",
        ]
        assert [entry["tool_call_id"] for entry in log_of(log, "tool")] == ["call-1-1", "call-4-1", "call-5-1"]
    async with scripted(tmp_path, load=agent.session) as later:
        await later.prompt("ask remove")
        assert later.client.asked == []


async def test_several_permissions_at_once(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        agent.client.together = 3
        await agent.prompt("parallel ask a\nparallel ask b\nparallel ask c\nask d")
        assert [call.tool_call_id for call in agent.client.asked] == [f"call-1-{n}" for n in range(1, 5)]
        ended = [u.tool_call_id for u in agent.client.of("tool_call_update") if u.status == "completed"]
        # Each went on when it was answered, in whatever order that was; the turn went on after all of them.
        assert sorted(ended[:3]) == [f"call-1-{n}" for n in range(1, 4)]
        assert ended[3:] == ["call-1-4"]


async def test_what_is_parallel_does_not_wait_for_each_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = 'parallel ask a\nparallel run echo ran\nparallel hearth-client-tool {"name": "map"}\nstream 1 word'
    async with scripted(tmp_path, HEARTH_SCRIPTED_LOG=str(log)) as agent:
        agent.client.choice = "wait"
        agent.client.answer = {"answer": "there"}
        turn = agent.begin(text)
        await agent.client.until(lambda: "ended with 0: ran" in agent.client.text and "Answer" in agent.client.text)
        assert log_of(log, "tool") == []
        assert "word-1" not in agent.client.text
        agent.client.choose("allow_once")
        assert (await turn).stop_reason == "end_turn"
        assert [entry["tool"] for entry in log_of(log, "tool")] == ["a"]
        assert agent.client.text.endswith("word-1")


async def test_what_was_decided_while_it_was_away_is_understood(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = (
        'The user approved deploy with {"asks": 2, "to": "prod"}; run it once.\n'
        "The user denied remove; do not retry it.\n"
        "push with {}: approved, result unknown; check before repeating."
    )
    async with scripted(tmp_path, HEARTH_SCRIPTED_LOG=str(log)) as agent:
        assert (await agent.prompt(text)).stop_reason == "end_turn"
        assert [call.title for call in agent.client.asked] == ["deploy", "deploy"]
        assert [entry["input"] for entry in log_of(log, "tool")] == [{"asks": 2, "to": "prod"}] * 2
        assert [entry["text"] for entry in log_of(log, "told")] == text.splitlines()[1:]


@pytest.mark.parametrize(
    "text",
    ["ask remove", "parallel ask a\nparallel ask b", "sleep 300", "run sleep 300", "stream 9999 words at 9/s", "hang"],
)
async def test_cancel_is_quick_in_every_state(tmp_path: Path, text: str) -> None:
    log = tmp_path / "log"
    async with scripted(tmp_path, HEARTH_SCRIPTED_LOG=str(log)) as agent:
        agent.client.choice = "wait"
        turn = agent.begin(f"started\n{text}")
        await agent.client.until(lambda: "started" in agent.client.text)
        if "ask" in text:
            await agent.client.until(lambda: len(agent.client.asked) == text.count("ask"))
        started = time.monotonic()
        await agent.connection.cancel(agent.session)
        assert (await asyncio.wait_for(turn, 5)).stop_reason == "cancelled"
        assert time.monotonic() - started < 0.5
        # What is answered after the cancel is of no effect.
        agent.client.choose("allow_once")
        assert (await agent.prompt("hello")).stop_reason == "end_turn"
        assert [entry["session"] for entry in log_of(log, "cancel")] == [agent.session]
        assert log_of(log, "tool") == []
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]


async def test_a_cancel_right_behind_the_prompt_finds_it(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        for _ in range(20):
            turn = agent.begin("hang")
            await asyncio.sleep(0)
            await agent.connection.cancel(agent.session)
            assert (await asyncio.wait_for(turn, 5)).stop_reason == "cancelled"


async def test_a_cancel_of_nothing_is_harmless(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        await agent.connection.cancel(agent.session)
        assert (await agent.prompt("hello")).stop_reason == "end_turn"


async def test_commands_and_files(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        await agent.prompt("run pwd; exit 3\nfs-write deep/note.txt hello there\nread deep/note.txt\nread none")
        assert (tmp_path / "deep" / "note.txt").read_text() == "hello there\n"
        kinds = [(call.title, call.kind) for call in agent.client.of("tool_call")]
        assert kinds == [("run", "execute"), ("write", "edit"), ("read", "read"), ("read", "read")]
        ended = [(u.status, output(u)) for u in agent.client.of("tool_call_update") if u.status != "in_progress"]
        assert ended[0] == ("failed", f"{tmp_path}\n")
        assert ended[2] == ("completed", "hello there\n")
        assert ended[3][0] == "failed"
        said = [
            f"The command ended with 3: {tmp_path}",
            "Wrote deep/note.txt.",
            "deep/note.txt: hello there",
            "none could not be read: No such file or directory",
        ]
        # What is said before and after a tool call are messages of their own.
        messages = {update.message_id: update.content.text for update in agent.client.of("agent_message_chunk")}
        assert messages == {f"msg-1-{number}": text for number, text in enumerate(said, start=1)}
        agent.client.updates.clear()
        await agent.connection.load_session(cwd=str(tmp_path), session_id=agent.session)
        assert agent.client.text.split("\n") == said


async def test_a_child_is_left(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        turn = agent.begin("leave-child 300\nhang")
        await agent.client.until(lambda: agent.client.text.endswith("."))
        await agent.connection.cancel(agent.session)
        await turn
        child = psutil.Process(int(agent.client.text.removeprefix("Left child ").removesuffix(".")))
    # It outlived the cancel and the agent.
    assert child.status() != psutil.STATUS_ZOMBIE
    assert os.getsid(child.pid) == child.pid
    child.kill()


async def test_plan_and_usage(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        response = await agent.prompt("plan")
        plans = [[entry.status for entry in plan.entries] for plan in agent.client.of("plan")]
        assert plans[0] == ["in_progress", "pending", "pending"]
        assert plans[-1] == ["completed"] * 3
        assert [(u.used, u.size) for u in agent.client.of("usage_update")] == [(100, 200_000)]
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_extension_requests(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        agent.client.answer = {"answer": "blue"}
        await agent.prompt('hearth-ask {"prompt": "Which colour?"}')
        assert agent.client.text == 'Answer: {"answer": "blue"}'
        agent.client.answer = {"error": "nobody is there"}
        await agent.prompt('hearth-client-tool {"name": "pick", "input": {"n": 1}}')
        assert agent.client.text.endswith("_hearth/client_tool was refused: nobody is there")
        session = {"sessionId": agent.session}
        assert agent.client.extensions == [
            ("hearth/ask", {**session, "toolCallId": "call-1-1", "prompt": "Which colour?"}),
            ("hearth/client_tool", {**session, "toolCallId": "call-2-1", "name": "pick", "input": {"n": 1}}),
        ]


async def test_odd_endings(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        with pytest.raises(acp.RequestError, match="out of credit") as error:
            await agent.prompt("error out of credit")
        assert error.value.code == -32603
        assert (await agent.prompt("empty")).stop_reason == "end_turn"
        assert (await agent.prompt("cancelled-unasked")).stop_reason == "cancelled"
        assert agent.client.updates == []
        assert (await agent.prompt("sleep 0.01")).stop_reason == "end_turn"
        assert agent.client.text == "Done."


async def test_lines_that_only_look_like_directives_are_talk(tmp_path: Path) -> None:
    async with scripted(tmp_path) as agent:
        text = "tool look {not json}\nplan my holiday\nplease run pwd\nstream of words\nsleep well"
        await agent.prompt(text)
        assert agent.client.text == f"You said: {text}"
        assert agent.client.of("tool_call") == []


async def test_prompts_are_on_the_disk_before_anything_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with scripted(tmp_path, HEARTH_SCRIPTED_LOG=str(log)) as agent:
        await agent.prompt("hello", **{"hearth.dev/execution": "execution-1"})
        with pytest.raises(Exception, match=r"[Cc]onnection|closed"):
            await agent.prompt("crash-silent")
    first, second = log_of(log, "prompt")
    assert first.pop("time") <= second.pop("time") <= time.time()
    assert first == {
        "event": "prompt",
        "message_id": "execution-1",
        "session": agent.session,
        "text": "hello",
        "context": "",
        "pid": agent.pid,
    }
    assert (second["message_id"], second["text"]) == (None, "crash-silent")


async def test_what_it_was_opened_with_is_written_down_without_what_may_be_secret(tmp_path: Path) -> None:
    log = tmp_path / "log"
    secrets = {"SHOWN": "one", "HIDDEN": "two"}
    named = [schema.EnvVariable(name=name, value=value) for name, value in secrets.items()]
    server = schema.McpServerStdio(name="notes", command="notes", args=["-v"], env=named)
    env = {"HEARTH_SCRIPTED_LOG": str(log), "HEARTH_SCRIPTED_LOG_VALUES": "SHOWN NOT_THERE", **secrets}
    async with connected(tmp_path, **env) as (_, connection, pid):
        told = {"hearth.dev/instructions": "Be brief.", "hearth.dev/model": "large"}
        made = await connection.new_session(cwd=str(tmp_path), mcp_servers=[server], **cast(Any, told))
        await connection.load_session(cwd=str(tmp_path), session_id=made.session_id)
    first, second = log_of(log, "open")
    assert "two" not in log.read_text()
    assert (first["pid"], first["session"]) == (second["pid"], second["session"]) == (pid, made.session_id)
    assert first["began"] == second["began"] <= first["time"]
    assert (first["loaded"], second["loaded"]) == (False, True)
    assert (first["instructions"], first["model"], first["values"]) == ("Be brief.", "large", {"SHOWN": "one"})
    (shown,) = first["servers"]
    assert shown == {
        "name": "notes",
        "where": ["notes", "-v"],
        "names": ["HIDDEN", "SHOWN"],
        "values": {"SHOWN": "one"},
    }
    assert (second["instructions"], second["servers"]) == ("", [])
