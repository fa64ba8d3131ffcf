"""The pool's harness client against real daemons: our agentd and, where npm is there, the real sandbox-agent 0.4.2.

Behind both runs the scripted agent. What the client promises (updates in order and once, one result, no agent left
behind, every failure typed and in bounded time) holds for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from hearth.secret import Secret
from hearth.types.v1 import content_pb2
from services.chassis.clock import SystemClock
from services.pool.harness.acp import AcpClient, AcpLimits, AcpSession
from services.pool.harness.daemon import Daemon
from services.pool.harness.port import (
    Answer,
    DaemonEndpoint,
    HarnessClient,
    HarnessError,
    McpServer,
    OpenRequest,
    PermissionAsked,
    PromptResult,
    Pulse,
    QuestionAsked,
    TextChunk,
    ToolUpdate,
    Update,
    UsageChanged,
)
from services.pool.harness.rpc import RpcLimits
from services.pool.harness.runs import AcpRun
from services.pool.harness.sse import StreamLimits
from tests.support.cutter import Cutter
from tests.support.harness import SCRIPTED_AGENT, Agent, HarnessDaemon, agentd, real_sandbox_agent

EXECUTION = "5f0c7cf6-3f0a-4c39-9a53-6c1b5d3a5a10"
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
# Short enough for a test; the ratios are those of the defaults.
QUICK = AcpLimits(rpc=RpcLimits(stream=StreamLimits(reconnect=1.0, unreachable=2.0), last_words=1.0))


@dataclasses.dataclass
class House:
    """A daemon with its client."""

    daemon: HarnessDaemon
    client: AcpClient
    workspace: Path
    journal: Path

    @property
    def endpoint(self) -> DaemonEndpoint:
        return DaemonEndpoint(self.daemon.url, Secret(self.daemon.token))

    async def open(self, server_id: str = "s1", agent: str = "codex", **more: object) -> AcpSession:
        values = {"timeout": 30.0, **more}
        request = OpenRequest(server_id=server_id, agent=agent, workspace=str(self.workspace), **values)  # type: ignore[arg-type]
        return await self.client.open(self.endpoint, request)

    async def servers(self) -> list[str]:
        headers = {"Authorization": f"Bearer {self.daemon.token}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{self.daemon.url}/v1/acp") as response:
            return [entry["serverId"] for entry in (await response.json())["servers"]]

    def journaled(self, kind: str) -> list[dict[str, object]]:
        if not self.journal.exists():
            return []
        entries = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [entry for entry in entries if kind in entry.values()]


@pytest.fixture(params=["agentd", "sandbox-agent"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def build(kind: str, home: Path, **env: str) -> AsyncIterator[House]:
    workspace, journal = home / "work", home / "journal.jsonl"
    workspace.mkdir(parents=True)
    start = agentd if kind == "agentd" else real_sandbox_agent
    client = AcpClient(clock=SystemClock())
    agents = {"codex": SCRIPTED_AGENT, "claude": SCRIPTED_AGENT}
    async with start(agents, home, env={"HEARTH_SCRIPTED_LOG": str(journal), **env}) as daemon:
        try:
            yield House(daemon, client, workspace, journal)
        finally:
            await client.close()


@pytest_asyncio.fixture
async def house(kind: str, tmp_path: Path) -> AsyncIterator[House]:
    async with build(kind, tmp_path / "home") as found:
        yield found


@pytest_asyncio.fixture
async def agentd_house(tmp_path: Path) -> AsyncIterator[House]:
    """For what does not depend on the daemon."""
    async with build("agentd", tmp_path / "home") as found:
        yield found


def say(text: str) -> list[content_pb2.ContentPart]:
    return [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]


async def turn(session: AcpSession, text: str, execution_id: str = EXECUTION) -> tuple[list[Update], PromptResult]:
    run = await session.prompt(say(text), execution_id=execution_id, trace_context=TRACE)
    updates = [update async for update in run.updates()]
    return updates, await run.result()


def text_of(updates: Sequence[Update]) -> str:
    return "".join(update.text for update in updates if isinstance(update, TextChunk) and not update.thought)


async def until_it_fails(
    run: AcpRun, *, at: str = "", then: Callable[[], None] | None = None
) -> tuple[list[Update], HarnessError]:
    """Read a turn to its failure; `then` is done once the text `at` has come."""
    updates: list[Update] = []
    try:
        async for update in run.updates():
            updates.append(update)
            if then is not None and isinstance(update, TextChunk) and update.text == at:
                then()
    except HarnessError as error:
        return updates, error
    raise AssertionError("the turn did not fail")


async def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.01)


def agents_of(daemon: HarnessDaemon) -> list[int]:
    found = []
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "scripted" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def test_it_is_a_harness_client() -> None:
    client: HarnessClient = AcpClient(clock=SystemClock())
    assert client


async def test_a_conversation_in_one_warm_session(house: House) -> None:
    session = await house.open()
    assert session.session_id
    assert not session.loaded
    updates, result = await turn(session, "remember my name is Ada")
    assert "Ada" in text_of(updates)
    assert result.stop_reason == "end_turn"
    assert result.usage is not None
    assert result.usage.input_tokens > 0
    assert json.loads(result.report_json)["hearth.dev/agent"]["turns_in_memory"] == 1
    assert any(isinstance(update, UsageChanged) and update.usage.context_tokens for update in updates)
    await session.park()
    updates, result = await turn(session, "what is my name?", "11111111-1111-4111-8111-111111111111")
    assert "Ada" in text_of(updates)
    assert json.loads(result.report_json)["hearth.dev/agent"]["turns_in_memory"] == 2
    prompts = [entry["message_id"] for entry in house.journaled("prompt")]
    assert prompts == [EXECUTION, "11111111-1111-4111-8111-111111111111"]
    await session.close()
    await eventually(lambda: not agents_of(house.daemon))
    assert await house.servers() == []


async def test_w_e02_what_an_agent_tells_between_turns_is_nobodys(house: House) -> None:
    """Nor is it the next turn's; and a question that nobody could answer is cancelled."""
    session = await house.open()
    first, _ = await turn(session, "later 0.2 this is late\nlater-ask 0.2 remove\nstream 3 words")
    await session.park()
    await eventually(lambda: bool(house.journaled("this is late")))
    second, _ = await turn(session, "stream 2 words")
    assert (text_of(first), text_of(second)) == ("word-1 word-2 word-3", "word-1 word-2")
    assert not any(isinstance(update, PermissionAsked) for update in first)
    await eventually(lambda: any(entry.get("outcome") == "cancelled" for entry in house.journaled("later")))
    await session.close()


def connected(session: AcpSession) -> bool:
    """Whether what the agent says would be heard now."""
    return session.silence.connected


async def test_the_way_to_the_agent_is_opened_before_it_is_asked(house: House) -> None:
    session = await house.open()
    await turn(session, "remember my name is Ada")
    await session.park()
    assert not connected(session)
    await session.resume()
    assert connected(session)
    updates, _ = await turn(session, "what is my name?")
    assert "Ada" in text_of(updates)
    await session.close()


async def test_an_agent_that_died_while_parked_is_seen_before_it_is_asked(house: House) -> None:
    session = await house.open()
    await turn(session, "hello")
    await session.park()
    for pid in agents_of(house.daemon):
        os.kill(pid, signal.SIGKILL)

    async def until_it_is_seen() -> None:
        # The daemon may take a moment to see it.
        async with asyncio.timeout(10.0):
            while True:
                await session.resume()
                await session.park()

    with pytest.raises(HarnessError) as error:
        await until_it_is_seen()
    assert error.value.reason == "AGENT_EXITED"
    assert len(house.journaled("prompt")) == 1
    await session.close()


async def test_silence_and_pulse_tell_what_lives(agentd_house: House) -> None:
    session = await agentd_house.open()
    run = await session.prompt(say("stream 5 words\nhang"), execution_id=EXECUTION, trace_context=TRACE)
    async for update in run.updates():
        if isinstance(update, TextChunk) and update.text.startswith("word-5"):
            break
    assert session.silence.connected
    assert session.silence.messages < 5.0
    assert await session.pulse() is Pulse.ALIVE
    session.reach(dataclasses.replace(agentd_house.endpoint, token=Secret("another")))
    assert await session.pulse() is Pulse.FENCED
    session.reach(agentd_house.endpoint)
    agentd_house.daemon.process.send_signal(signal.SIGSTOP)
    assert await session.pulse() is Pulse.SILENT
    agentd_house.daemon.process.kill()
    await asyncio.to_thread(agentd_house.daemon.process.wait)
    assert await session.pulse() is Pulse.REFUSED
    await eventually(lambda: not session.silence.connected)
    await session.close()


async def test_a_daemon_that_moved_is_followed(agentd_house: House) -> None:
    """As behind a proxy whose address or token changed: the stream goes on where it was."""
    async with Cutter(agentd_house.daemon.url) as before, Cutter(agentd_house.daemon.url) as after:
        session = await agentd_house.client.open(
            DaemonEndpoint(before.url, Secret(agentd_house.daemon.token)),
            OpenRequest(server_id="s1", agent="codex", workspace=str(agentd_house.workspace)),
        )
        run = await session.prompt(say("stream 200 words at 200/s"), execution_id=EXECUTION, trace_context=TRACE)
        updates: list[Update] = []
        async for update in run.updates():
            updates.append(update)
            if len(updates) == 50:
                session.reach(DaemonEndpoint(after.url, Secret(agentd_house.daemon.token)))
                before.cut()
        assert text_of(updates) == " ".join(f"word-{number + 1}" for number in range(200))
        assert after.connections
        await session.close()


async def test_every_update_comes_once_and_in_order(house: House) -> None:
    session = await house.open()
    # The real daemon skips messages when an agent floods it with more than its reader takes: that is told as a loss.
    words, pace = (3000, "") if house.daemon.kind == "agentd" else (300, " at 200/s")
    updates, _ = await turn(session, f"stream {words} words{pace}")
    assert text_of(updates) == " ".join(f"word-{number + 1}" for number in range(words))
    await session.close()


async def test_a_slow_turn_holds_the_stream_back_and_loses_nothing(agentd_house: House) -> None:
    session = await agentd_house.open()
    run = await session.prompt(say("flood 3000 4000"), execution_id=EXECUTION, trace_context=TRACE)
    chunks = 0
    async for update in run.updates():
        if isinstance(update, TextChunk):
            chunks += 1
            if chunks % 500 == 0:
                await asyncio.sleep(0.1)
    assert chunks == 3000
    await session.close()


async def test_long_lines_pass(house: House) -> None:
    session = await house.open()
    updates, _ = await turn(session, "line 2000000")
    assert len(text_of(updates)) == 2_000_000
    await session.close()


async def test_tools_plans_and_thoughts(house: House) -> None:
    session = await house.open()
    updates, _ = await turn(session, 'think 2\ntool search {"q":"x"}\nplan')
    tools = [update for update in updates if isinstance(update, ToolUpdate)]
    assert (tools[0].started, tools[0].title, tools[0].input_json) == (True, "search", '{"q":"x"}')
    assert tools[-1].status == "completed"
    assert "search" in (tools[-1].output or "")
    thoughts = [update.text for update in updates if isinstance(update, TextChunk) and update.thought]
    assert thoughts == ["thought-1 ", "thought-2 "]
    await session.close()


@pytest.mark.parametrize(
    ("answer", "outcome", "stop_reason"),
    [
        (Answer.ALLOW, "allow_once", "end_turn"),
        (Answer.DENY, "reject_once", "end_turn"),
        (Answer.CANCELLED, "cancelled", "cancelled"),
    ],
)
async def test_permission_is_answered_by_kind(house: House, answer: Answer, outcome: str, stop_reason: str) -> None:
    session = await house.open()
    run = await session.prompt(say('ask deploy {"to":"prod"}'), execution_id=EXECUTION, trace_context=TRACE)
    asked: list[PermissionAsked] = []
    async for update in run.updates():
        if isinstance(update, PermissionAsked):
            asked.append(update)
            assert not house.journaled("permission")
            await session.answer(update.request_key, answer)
            with pytest.raises(HarnessError) as again:
                await session.answer(update.request_key, Answer.ALLOW)
            assert again.value.reason == "INTERACTION_CLOSED"
    assert [(found.title, found.input_json) for found in asked] == [("deploy", '{"to":"prod"}')]
    assert [entry["outcome"] for entry in house.journaled("permission")] == [outcome]
    assert (await run.result()).stop_reason == stop_reason
    await session.close()


async def test_permissions_asked_together_are_answered_apart(agentd_house: House) -> None:
    session = await agentd_house.open()
    text = "parallel ask one {}\nparallel ask two {}"
    run = await session.prompt(say(text), execution_id=EXECUTION, trace_context=TRACE)
    asked: dict[str, str] = {}
    async for update in run.updates():
        if isinstance(update, PermissionAsked):
            asked[update.title] = update.request_key
            if len(asked) == 2:
                await session.answer(asked["two"], Answer.DENY)
                await session.answer(asked["one"], Answer.ALLOW)
    assert [(entry["tool"], entry["outcome"]) for entry in agentd_house.journaled("permission")] == [
        ("two", "reject_once"),
        ("one", "allow_once"),
    ]
    await session.close()


async def test_questions_of_our_extension_are_answered(house: House) -> None:
    session = await house.open()
    text = (
        'hearth-ask {"prompt":"Which?","schema":{"type":"string"}}\nhearth-client-tool {"name":"map","input":{"a":1}}'
    )
    run = await session.prompt(say(text), execution_id=EXECUTION, trace_context=TRACE)
    asked: list[QuestionAsked] = []
    updates: list[Update] = []
    async for update in run.updates():
        updates.append(update)
        if isinstance(update, QuestionAsked):
            asked.append(update)
            await session.answer_question(update.request_key, '{"chosen":"blue"}' if len(asked) == 1 else None)
    assert [(found.client_tool, found.prompt, found.input_json) for found in asked] == [
        (False, "Which?", "{}"),
        (True, "map", '{"a":1}'),
    ]
    answers = [json.loads(line.removeprefix("Answer: ")) for line in text_of(updates).splitlines()]
    assert answers == [{"outcome": "answered", "answer": {"chosen": "blue"}}, {"outcome": "cancelled"}]
    await session.close()


async def test_cancel_ends_the_turn_and_its_open_requests(house: House) -> None:
    session = await house.open()
    await session.cancel()
    run = await session.prompt(say("ask deploy {}"), execution_id=EXECUTION, trace_context=TRACE)
    async for update in run.updates():
        if isinstance(update, PermissionAsked):
            await session.cancel()
    assert (await run.result()).stop_reason == "cancelled"
    run = await session.prompt(say("stream 100000 words at 50/s"), execution_id=EXECUTION, trace_context=TRACE)
    started = time.monotonic()
    async for update in run.updates():
        if isinstance(update, TextChunk) and update.text.startswith("word-3"):
            await session.cancel()
    assert (await run.result()).stop_reason == "cancelled"
    assert time.monotonic() - started < 3.0
    updates, _ = await turn(session, "hello")
    assert "hello" in text_of(updates)
    await session.close()


async def test_one_prompt_at_a_time(agentd_house: House) -> None:
    session = await agentd_house.open()
    run = await session.prompt(say("hang"), execution_id=EXECUTION, trace_context=TRACE)
    with pytest.raises(HarnessError) as second:
        await session.prompt(say("hello"), execution_id=EXECUTION, trace_context=TRACE)
    assert second.value.reason == "RUN_DEFECT"
    with pytest.raises(HarnessError):
        await session.park()
    await session.cancel()
    assert (await run.result()).stop_reason == "cancelled"
    assert len(agentd_house.journaled("prompt")) == 1
    await session.close()


async def test_an_error_of_the_agent_is_its_answer(agentd_house: House) -> None:
    session = await agentd_house.open()
    with pytest.raises(HarnessError) as error:
        await turn(session, "error the model is overloaded")
    assert error.value.reason == "AGENT_ERROR"
    assert "the model is overloaded" in str(error.value)
    _, result = await turn(session, "empty")
    assert result.stop_reason == "end_turn"
    await session.close()


async def test_an_agent_that_crashes_ends_the_turn_at_once_and_what_it_said_before_is_there(house: House) -> None:
    session = await house.open()
    run = await session.prompt(say("last words\ncrash 3"), execution_id=EXECUTION, trace_context=TRACE)
    updates, error = await until_it_fails(run)
    assert error.reason == "AGENT_EXITED"
    assert not error.fenced
    assert "last words" in text_of(updates)
    with pytest.raises(HarnessError):
        await run.result()
    with pytest.raises(HarnessError) as later:
        await turn(session, "hello")
    assert later.value.reason == "AGENT_EXITED"
    await session.close()
    assert await house.servers() == []


async def test_garbage_between_messages_does_no_harm(house: House) -> None:
    session = await house.open()
    updates, result = await turn(session, "before\ngarbage\nafter")
    assert result.stop_reason == "end_turn"
    assert "before" in text_of(updates)
    assert "after" in text_of(updates)
    await session.close()


async def test_sessions_are_loaded_by_another_process_without_repeating_the_conversation(house: House) -> None:
    first = await house.open("s1")
    await turn(first, "remember my name is Ada")
    await first.close()
    second = await house.open("s2", load_session_id=first.session_id)
    assert second.loaded
    assert second.session_id == first.session_id
    updates, result = await turn(second, "what is my name?")
    assert text_of(updates).count("Ada") == 1
    report = json.loads(result.report_json)["hearth.dev/agent"]
    assert (report["session_loaded"], report["turns_in_memory"]) == (True, 1)
    await second.close()


async def test_an_unknown_session_becomes_a_new_one(agentd_house: House) -> None:
    session = await agentd_house.open(load_session_id="11111111-1111-4111-8111-111111111111")
    assert not session.loaded
    assert session.session_id not in ("", "11111111-1111-4111-8111-111111111111")
    updates, _ = await turn(session, "hello")
    assert "hello" in text_of(updates)
    await session.close()


async def test_processes_and_files_beside_the_agent(house: House) -> None:
    session = await house.open()
    with pytest.raises(HarnessError) as error:
        await session.run_process("/no/such/program", [], timeout=5)
    assert (error.value.reason, error.value.fenced) == ("DAEMON_UNREACHABLE", False)
    with pytest.raises(HarnessError) as error:
        await session.write_file(str(house.workspace), b"not over a directory")
    assert not error.value.fenced
    assert await session.run_process("sh", ["-c", "echo hi; exit 3"], timeout=5) == (3, "hi\n")
    path = house.workspace / "in" / "deep" / "file.bin"
    await session.write_file(str(path), b"\0\xff data")
    assert path.read_bytes() == b"\0\xff data"
    await session.close()


async def test_text_that_is_context_is_not_said_by_the_user(agentd_house: House) -> None:
    session = await agentd_house.open()
    context = content_pb2.InlineMediaPart(media_type="text/markdown", data=b"remember my name is Ada")
    content = [content_pb2.ContentPart(inline_media=context), *say("what is my name?")]
    run = await session.prompt(content, execution_id=EXECUTION, trace_context={})
    updates = [update async for update in run.updates()]
    assert "Ada" in text_of(updates)
    await session.close()


async def test_a_prompt_whose_post_is_never_answered_ends_by_the_stream(tmp_path: Path) -> None:
    async with build("sandbox-agent", tmp_path / "home", SANDBOX_AGENT_ACP_REQUEST_TIMEOUT_MS="500") as house:
        session = await house.open()
        updates, result = await turn(session, "sleep 1.5\nthe end")
        assert text_of(updates).endswith("the end")
        assert result.stop_reason == "end_turn"
        updates, _ = await turn(session, "sleep 1\nagain")
        assert text_of(updates).endswith("again")
        await session.close()


# Agents with habits of their own

HABITS = """
import json, os, sys
def out(**message): sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n"); sys.stdout.flush()
def say(text, session="x"):
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    out(method="session/update", params={"sessionId": session, "update": update})
def ask(number, method, params):
    out(id=number, method=method, params=params)
    while True:
        message = json.loads(sys.stdin.readline())
        if message.get("id") == number and "method" not in message: return message
models = {"availableModels": [{"modelId": "small"}, {"modelId": "large"}], "currentModelId": "small"}
values = [{"value": "small"}, {"value": "large"}]
option = {"id": "model", "category": "model", "currentValue": "small", "options": values}
logged_in = False
for line in sys.stdin:
    message = json.loads(line)
    method, params, number = message.get("method"), message.get("params"), message.get("id")
    if method == "initialize":
        meta = json.loads(os.environ.get("ODD_META", "{}"))
        capabilities = {"loadSession": True, "_meta": meta}
        version = int(os.environ.get("ODD_VERSION", "1"))
        logins = [{"id": name, "type": "env_var", "vars": [{"name": name}]} for name in ("FIRST_KEY", "SECOND_KEY")]
        logins = [{"id": "browser", "name": "Log in", "description": "opens a browser"}, *logins]
        out(id=number, result={"protocolVersion": version, "agentCapabilities": capabilities, "authMethods": logins})
    elif method == "authenticate":
        logged_in = params["methodId"] in os.environ
        out(id=number, **({"result": {}} if logged_in else {"error": {"code": -32603, "message": "no key"}}))
    elif method in ("session/load", "session/new") and "ODD_LOCK" in os.environ and not logged_in:
        out(id=number, error={"code": -32000, "message": "Authentication required"})
    elif method == "session/load" and "ODD_LOCK" in os.environ:
        out(id=number, result={})
    elif method == "session/load":
        say("an old story")
        out(id=number, result={"sessionId": "another"})
    elif method == "session/new":
        offered = {"configOptions": [option]} if "ODD_MODELS" in os.environ else {}
        out(id=number, result={"sessionId": "x", "models": models, **offered})
        opened = params
    elif method == os.environ.get("ODD_MODELS", "session/set_model"):
        chosen = params.get("modelId") or params["value"]
        out(id=number, result={})
    elif method in ("session/set_model", "session/set_config_option"):
        out(id=number, error={"code": -32601, "message": "Method not found"})
    elif method == "session/prompt":
        habit = params["prompt"][-1]["text"]
        if habit == "told": say(json.dumps(params["prompt"]))
        if habit == "meta": say(json.dumps(params["_meta"]))
        if habit == "opened": say(json.dumps({"opened": opened, "chosen": chosen}))
        if habit == "fs": say(json.dumps(ask(7, "fs/write_text_file", {"path": "/x"})["error"]))
        if habit == "foreign": say("not yours", "y"); say("yours")
        if habit == "nothing to ask": say(json.dumps(ask(8, "session/request_permission", {})["error"]))
        if habit == "no reason": out(id=number, result={}); continue
        out(id=number, result={"stopReason": "end_turn"})
        if habit == "late":
            late = ask(9, "session/request_permission", {"toolCall": {"toolCallId": "c"}, "options": []})
            open(os.environ["HOME"] + "/late", "w").write(json.dumps(late["result"]) + "\\n")
"""


@pytest_asyncio.fixture
async def odd(tmp_path: Path) -> AsyncIterator[House]:
    home, program = tmp_path / "home", tmp_path / "habits.py"
    program.write_text(HABITS)
    client = AcpClient(clock=SystemClock())
    agents = {
        "odd": Agent([sys.executable, str(program)]),
        "future": Agent([sys.executable, str(program)], env={"ODD_VERSION": "9"}),
        "optional": Agent([sys.executable, str(program)], env={"ODD_MODELS": "session/set_config_option"}),
        "obedient": Agent([sys.executable, str(program)], env={"ODD_META": '{"hearth.dev/instructions":true}'}),
        "older": Agent([sys.executable, str(program)], env={"ODD_MODELS": "session/set_model"}),
        "locked": Agent([sys.executable, str(program)], env={"ODD_LOCK": "", "SECOND_KEY": "k"}),
        "keyless": Agent([sys.executable, str(program)], env={"ODD_LOCK": ""}),
    }
    async with agentd(agents, home) as daemon:
        yield House(daemon, client, home, home / "journal")
        await client.close()


async def test_the_trace_goes_on_in_header_and_message(odd: House) -> None:
    async with Cutter(odd.daemon.url) as cutter:
        request = OpenRequest(server_id="s", agent="odd", workspace="/tmp", trace_context=TRACE)
        session = await odd.client.open(
            DaemonEndpoint(cutter.url, Secret(odd.daemon.token), {"X-Preview": "p"}), request
        )
        updates, _ = await turn(session, "meta")
        assert json.loads(text_of(updates)) == {"hearth.dev/execution": EXECUTION, **TRACE}
        # A head may come in more than one piece.
        requests = re.split(rb"(?=POST /|GET /)", b"".join(cutter.heads))
        posts = [head.lower() for head in requests if head.startswith(b"POST")]
        assert len(posts) == 3
        # Where this process records spans, that of the call is the nearest one.
        traced = f"traceparent: {TRACE['traceparent'][:36]}".encode()
        assert all(traced in head and b"x-preview: p" in head for head in posts)
        await session.close()


@pytest.mark.parametrize("agent", ["odd", "optional", "older"])
async def test_instructions_servers_and_model_reach_the_agent(odd: House, agent: str) -> None:
    server = McpServer("probe", command=["/bin/probe", "-v"], values={"KEY": Secret("of the probe")})
    session = await odd.open(agent=agent, instructions="Be brief.", model="large", mcp_servers=[server])
    updates, _ = await turn(session, "opened")
    seen = json.loads(text_of(updates))
    assert seen["chosen"] == "large"
    assert seen["opened"]["cwd"] == str(odd.workspace)
    env = [{"name": "KEY", "value": "of the probe"}]
    assert seen["opened"]["mcpServers"] == [{"name": "probe", "command": "/bin/probe", "args": ["-v"], "env": env}]
    assert seen["opened"]["_meta"] == {
        "hearth.dev/instructions": "Be brief.",
        "systemPrompt": {"append": "Be brief."},
        "hearth.dev/model": "large",
    }
    await session.close()


@pytest.mark.parametrize(("agent", "first"), [("odd", ["Be brief.\n\n", "told"]), ("obedient", ["told"])])
async def test_instructions_are_told_once_to_an_agent_that_does_not_take_them(
    odd: House, agent: str, first: list[str]
) -> None:
    session = await odd.open(agent=agent, instructions="Be brief.")
    for expected in (first, ["told"]):
        updates, _ = await turn(session, "told")
        assert [block["text"] for block in json.loads(text_of(updates))] == expected
    await session.close()


@pytest.mark.parametrize("agent", ["odd", "optional"])
async def test_a_model_that_the_agent_does_not_offer_is_told(odd: House, agent: str) -> None:
    with pytest.raises(HarnessError) as error:
        await odd.open(agent=agent, model="huge")
    assert error.value.reason == "AGENT_START_FAILED"
    assert "huge" in str(error.value)
    assert await odd.servers() == []


async def test_a_server_that_the_agent_cannot_reach_is_told(odd: House) -> None:
    server = McpServer("issues", url="https://issues.example")
    with pytest.raises(HarnessError) as error:
        await odd.open(agent="odd", mcp_servers=[server])
    assert error.value.reason == "AGENT_START_FAILED"
    assert "issues" in str(error.value)
    assert await odd.servers() == []


async def test_another_version_of_the_protocol_is_told(odd: House) -> None:
    with pytest.raises(HarnessError) as error:
        await odd.open(agent="future")
    assert error.value.reason == "AGENT_PROTOCOL"
    assert await odd.servers() == []


async def test_a_load_that_gives_another_session_does_not_count(odd: House) -> None:
    session = await odd.open(agent="odd", load_session_id="asked")
    assert (session.loaded, session.session_id) == (False, "x")
    await session.close()


async def test_an_agent_that_wants_to_be_told_takes_its_key_from_a_variable(odd: House) -> None:
    session = await odd.open(agent="locked")
    assert (session.loaded, session.session_id) == (False, "x")
    await session.close()


async def test_a_session_is_loaded_once_its_agent_has_its_key(odd: House) -> None:
    session = await odd.open(agent="locked", load_session_id="asked")
    assert (session.loaded, session.session_id) == (True, "asked")
    await session.close()


async def test_an_agent_without_a_key_says_which_variable_it_wants(odd: House) -> None:
    for asked in (None, "asked"):
        with pytest.raises(HarnessError) as error:
            await odd.open(agent="keyless", load_session_id=asked)
        assert error.value.reason == "AGENT_START_FAILED"
        assert "FIRST_KEY, SECOND_KEY" in str(error.value)
        assert await odd.servers() == []


async def test_what_is_not_offered_is_refused_and_what_is_not_ours_is_left_alone(odd: House) -> None:
    session = await odd.open(agent="odd")
    updates, _ = await turn(session, "fs")
    assert json.loads(text_of(updates))["code"] == -32601
    updates, _ = await turn(session, "nothing to ask")
    assert json.loads(text_of(updates))["code"] == -32602
    updates, _ = await turn(session, "foreign")
    assert text_of(updates) == "yours"
    with pytest.raises(HarnessError) as error:
        await turn(session, "no reason")
    assert error.value.reason == "AGENT_PROTOCOL"
    await session.close()


async def test_a_question_after_the_turn_is_cancelled(odd: House) -> None:
    session = await odd.open(agent="odd")
    await turn(session, "late")
    late = odd.daemon.home / "late"
    await eventually(lambda: late.exists() and late.read_text().endswith("\n"))
    assert json.loads(late.read_text()) == {"outcome": {"outcome": "cancelled"}}
    await session.close()


# Opening that fails


async def test_an_unknown_agent_cannot_be_started(house: House) -> None:
    with pytest.raises(HarnessError) as error:
        await house.open(agent="nobody")
    assert error.value.reason == "AGENT_START_FAILED"
    assert not error.value.fenced
    assert await house.servers() == []


@pytest.mark.parametrize(
    ("start", "reason"),
    [("exit:3", "AGENT_EXITED"), ("hang", "AGENT_OPEN_TIMEOUT"), ("garbage", "AGENT_PROTOCOL")],
)
async def test_an_agent_that_does_not_start_is_told_in_time_and_nothing_is_left(
    kind: str, tmp_path: Path, start: str, reason: str
) -> None:
    async with build(kind, tmp_path / "home", HEARTH_SCRIPTED_START=start) as house:
        began = time.monotonic()
        with pytest.raises(HarnessError) as error:
            await house.open(timeout=1.5)
        assert error.value.reason == reason
        assert time.monotonic() - began < 10.0
        await eventually(lambda: not agents_of(house.daemon))
        assert await house.servers() == []


@pytest.mark.parametrize("after", [0.0, 0.02, 0.3])
async def test_a_cancelled_open_leaves_no_agent(kind: str, tmp_path: Path, after: float) -> None:
    async with build(kind, tmp_path / "home", HEARTH_SCRIPTED_START="hang") as house:
        opening = asyncio.create_task(house.open())
        await asyncio.sleep(after)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await house.client.close()
        assert await house.servers() == []
        await eventually(lambda: not agents_of(house.daemon))


async def test_no_daemon() -> None:
    client = AcpClient(clock=SystemClock())
    request = OpenRequest(server_id="s", agent="codex", workspace="/tmp")
    with pytest.raises(HarnessError) as error:
        await client.open(DaemonEndpoint("http://127.0.0.1:9", Secret("t")), request)
    assert error.value.reason == "DAEMON_UNREACHABLE"
    await client.close()


# Other holders


async def test_a_wrong_token_is_a_fence(house: House) -> None:
    endpoint = DaemonEndpoint(house.daemon.url, Secret("wrong"))
    request = OpenRequest(server_id="s", agent="codex", workspace=str(house.workspace))
    with pytest.raises(HarnessError) as error:
        await house.client.open(endpoint, request)
    assert error.value.fenced
    assert "wrong" not in repr(endpoint)


async def test_a_server_that_is_gone_is_a_fence(house: House) -> None:
    session = await house.open()
    await turn(session, "hello")
    await session.park()
    other = await house.open("s2")
    async with aiohttp.ClientSession() as http:
        await Daemon(http, house.endpoint, "s1").delete()
    with pytest.raises(HarnessError) as error:
        await turn(session, "hello")
    assert error.value.fenced
    assert len(house.journaled("prompt")) == 1
    await session.close()
    await turn(other, "hello")
    await other.close()


async def test_a_daemon_that_dies_in_the_middle_is_unreachable_in_time(tmp_path: Path) -> None:
    home = tmp_path / "home"
    client = AcpClient(clock=SystemClock(), limits=QUICK)
    async with agentd({"codex": SCRIPTED_AGENT}, home) as daemon:
        request = OpenRequest(server_id="s", agent="codex", workspace=str(home))
        session = await client.open(DaemonEndpoint(daemon.url, Secret(daemon.token)), request)
        run = await session.prompt(say("stream 100000 words at 50/s"), execution_id=EXECUTION, trace_context=TRACE)
        _, error = await until_it_fails(run, at="word-5 ", then=daemon.process.kill)
        assert error.reason == "HARNESS_UNREACHABLE"
        began = time.monotonic()
        await session.close()
        assert time.monotonic() - began < 3.0
    await client.close()


# Streams that break


async def test_a_stream_that_is_cut_again_and_again_loses_and_doubles_nothing(house: House) -> None:
    async with Cutter(house.daemon.url) as cutter:
        endpoint = DaemonEndpoint(cutter.url, Secret(house.daemon.token))
        request = OpenRequest(server_id="s1", agent="codex", workspace=str(house.workspace))
        session = await house.client.open(endpoint, request)
        run = await session.prompt(say("stream 600 words at 400/s"), execution_id=EXECUTION, trace_context=TRACE)
        updates: list[Update] = []
        async for update in run.updates():
            updates.append(update)
            if len(updates) % 100 == 50:
                cutter.cut()
            elif len(updates) % 100 == 0:
                cutter.cut_after = 3000
        assert text_of(updates) == " ".join(f"word-{number + 1}" for number in range(600))
        assert (await run.result()).stop_reason == "end_turn"
        await session.close()


async def test_permission_is_asked_once_though_the_stream_was_cut(house: House) -> None:
    async with Cutter(house.daemon.url) as cutter:
        endpoint = DaemonEndpoint(cutter.url, Secret(house.daemon.token))
        request = OpenRequest(server_id="s1", agent="codex", workspace=str(house.workspace))
        session = await house.client.open(endpoint, request)
        run = await session.prompt(say("ask deploy {}"), execution_id=EXECUTION, trace_context=TRACE)
        asked = 0
        async for update in run.updates():
            if isinstance(update, PermissionAsked):
                asked += 1
                before = cutter.connections
                cutter.cut()
                await eventually(lambda before=before: cutter.connections > before)  # type: ignore[misc]
                await session.answer(update.request_key, Answer.ALLOW)
        assert asked == 1
        assert len(house.journaled("tool")) == 1
        await session.close()


async def test_silence_is_noticed_first_by_a_new_connection_then_by_giving_up(agentd_house: House) -> None:
    client = AcpClient(clock=SystemClock(), limits=QUICK)
    async with Cutter(agentd_house.daemon.url) as cutter:
        endpoint = DaemonEndpoint(cutter.url, Secret(agentd_house.daemon.token))
        request = OpenRequest(server_id="s1", agent="codex", workspace=str(agentd_house.workspace))
        session = await client.open(endpoint, request)
        run = await session.prompt(say("stream 100000 words at 50/s"), execution_id=EXECUTION, trace_context=TRACE)
        began = time.monotonic()
        connections = cutter.connections
        _, error = await until_it_fails(run, at="word-5 ", then=cutter.fall_silent)
        assert error.reason == "HARNESS_UNREACHABLE"
        assert 1.5 < time.monotonic() - began < 6.0
        assert cutter.connections > connections
        cutter.silent = False
        await session.close()
    await client.close()


async def test_a_dead_connection_costs_no_output_at_the_end_of_a_turn(agentd_house: House) -> None:
    """The answer comes by POST while the stream is silently dead: the rest is fetched over a new connection."""
    async with Cutter(agentd_house.daemon.url) as cutter:
        session = await agentd_house.client.open(
            DaemonEndpoint(cutter.url, Secret(agentd_house.daemon.token)),
            OpenRequest(server_id="s1", agent="codex", workspace=str(agentd_house.workspace)),
        )
        run = await session.prompt(say("sleep 0.5\nthe last word"), execution_id=EXECUTION, trace_context=TRACE)
        cutter.silence_stream()
        began = time.monotonic()
        updates = [update async for update in run.updates()]
        assert text_of(updates) == "You said: the last word"
        assert time.monotonic() - began < 5.0, "long before the silence itself would be noticed"
        await session.close()


async def test_a_parked_session_resumes_where_it_was_and_notices_what_is_gone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # After each prompt this agent goes on talking: more than the daemon keeps.
    program = tmp_path / "talker.py"
    program.write_text(
        "import json, sys\n"
        "def out(m): sys.stdout.write(json.dumps({'jsonrpc': '2.0', **m}) + '\\n'); sys.stdout.flush()\n"
        "for line in sys.stdin:\n"
        "    m = json.loads(line)\n"
        "    if m['method'] == 'initialize': out({'id': m['id'], 'result': {'protocolVersion': 1}})\n"
        "    elif m['method'] == 'session/new': out({'id': m['id'], 'result': {'sessionId': 'x'}})\n"
        "    elif m['method'] == 'session/prompt':\n"
        "        out({'id': m['id'], 'result': {'stopReason': 'end_turn'}})\n"
        "        for _ in range(20): out({'method': 'noise', 'params': {'x': 'x' * 1_000_000}})\n"
        f"        open({str(tmp_path / 'said')!r}, 'w').close()\n"
    )
    client = AcpClient(clock=SystemClock())
    async with agentd({"codex": Agent([sys.executable, str(program)])}, home) as daemon:
        session = await client.open(
            DaemonEndpoint(daemon.url, Secret(daemon.token)),
            OpenRequest(server_id="s", agent="codex", workspace=str(home)),
        )
        run = await session.prompt(say("hello"), execution_id=EXECUTION, trace_context=TRACE)
        await run.result()
        await session.park()
        # What is not read yet of it fits in a pipe.
        await eventually((tmp_path / "said").exists)
        with pytest.raises(HarnessError) as error:
            await turn(session, "hello")
        assert error.value.reason == "HARNESS_STREAM_LOST"
        await session.close()
    await client.close()
