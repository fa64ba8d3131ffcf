"""Both daemons carry a conversation alike: answers, streams that resume, permissions, cancel, load."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.support.acp_http import AcpHttp, Message, Stream


def answers(stream: Stream, identifier: object) -> list[Message]:
    """The responses to a request of the client's."""
    return [m for m in stream.messages if m.get("id") == identifier and "method" not in m]


def selected(request: Message, kind: str) -> Message:
    """The answer that chooses the option of this kind."""
    option = next(option for option in request["params"]["options"] if option["kind"] == kind)
    outcome = {"outcome": "selected", "optionId": option["optionId"]}
    return {"jsonrpc": "2.0", "id": request["id"], "result": {"outcome": outcome}}


def turns_ended(stream: Stream) -> int:
    """How many answers to prompts came."""
    return sum("stopReason" in message.get("result", {}) for message in stream.messages)


async def test_a_turn_comes_as_answer_and_as_stream(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        message = {
            "jsonrpc": "2.0",
            "id": "prompt-1",
            "method": "session/prompt",
            "params": {"sessionId": session, "prompt": [{"type": "text", "text": "remember my name is Ada"}]},
        }
        reply = await acp.post("s", message)
        assert (reply.result["stopReason"], reply.body["id"]) == ("end_turn", "prompt-1")
        await stream.until(lambda s: answers(s, "prompt-1"))
        assert answers(stream, "prompt-1")[0]["result"] == reply.result
        assert stream.text == "I will remember that your name is Ada."
        # Its answers to initialize and session/new are there as well: without a number the stream starts at the first.
        assert stream.ids == list(range(1, len(stream.ids) + 1))
        assert stream.messages[0]["result"]["protocolVersion"] == 1
    assert (await acp.prompt("s", session, "what is my name?")).result["_meta"]["hearth.dev/agent"][
        "turns_in_memory"
    ] == 2


async def test_meta_goes_through_untouched(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    text = f"hearth-ask {json.dumps({'_meta': {'traceparent': trace, 'é': 1.5}})}"
    content = [{"type": "text", "text": text}]
    async with acp.stream("s") as stream:
        turn = asyncio.create_task(acp.request("s", "session/prompt", {"sessionId": session, "prompt": content}))
        await stream.until(lambda s: s.named("_hearth/ask"))
        asked = stream.named("_hearth/ask")[0]
        assert asked["params"]["_meta"] == {"traceparent": trace, "é": 1.5}
        answer = {"answer": "häh", "n": 12345678901234567890, "deep": [None, True, 0.1]}
        assert (await acp.post("s", {"jsonrpc": "2.0", "id": asked["id"], "result": answer})).status == 202
        assert (await turn).result["stopReason"] == "end_turn"
        await stream.until(lambda s: s.text.endswith("}"))
        assert json.loads(stream.text.removeprefix("Answer: ")) == answer


async def test_a_stream_resumes_behind_a_number(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    await acp.prompt("s", session, "stream 20 words")
    async with acp.stream("s") as whole, acp.stream("s", last=7) as later:
        for stream in (whole, later):
            await stream.until(lambda s: turns_ended(s) == 1)
        assert later.events == whole.events[7:]
        await acp.prompt("s", session, "more")
        for stream in (whole, later):
            await stream.until(lambda s: turns_ended(s) == 2)
        assert later.events == whole.events[7:]
    async with acp.stream("s", last=whole.ids[-1]) as tail:
        await acp.prompt("s", session, "last")
        await tail.until(lambda s: s.text == "You said: last")
        assert tail.ids[0] > whole.ids[-1]


@pytest.mark.parametrize(("kind_of_answer", "status"), [("allow_once", "completed"), ("reject_once", "failed")])
async def test_permission_is_asked_and_answered(acp: AcpHttp, tmp_path: Path, kind_of_answer: str, status: str) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        turn = asyncio.create_task(acp.prompt("s", session, 'ask delete {"path": "x"}'))
        await stream.until(lambda s: s.named("session/request_permission"))
        request = stream.named("session/request_permission")[0]
        assert request["params"]["toolCall"]["rawInput"] == {"path": "x"}
        assert not turn.done()
        reply = await acp.post("s", selected(request, kind_of_answer))
        assert (reply.status, reply.body) == (202, None)
        assert (await turn).result["stopReason"] == "end_turn"
        await stream.until(lambda s: any(u["sessionUpdate"] == "usage_update" for u in s.updates))
        last = [u for u in stream.updates if u.get("toolCallId") == "call-1-1"][-1]
        assert last["status"] == status


async def test_cancel_ends_a_turn(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        turn = asyncio.create_task(acp.prompt("s", session, "stream 1000 words at 50/s"))
        await stream.until(lambda s: "word-3" in s.text)
        reply = await acp.notify("s", "session/cancel", {"sessionId": session})
        assert (reply.status, reply.body) == (202, None)
        assert (await asyncio.wait_for(turn, 5)).result["stopReason"] == "cancelled"
        assert "word-900" not in stream.text
    assert (await acp.prompt("s", session, "still there?")).result["stopReason"] == "end_turn"


async def test_a_client_that_hangs_up_cancels_nothing(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {acp.daemon.token}"}) as other:
            hasty = AcpHttp(acp.daemon, other)
            turn = asyncio.create_task(hasty.prompt("s", session, "stream 30 words at 100/s"))
            await stream.until(lambda s: "word-2" in s.text)
            turn.cancel()
            with suppress(asyncio.CancelledError):
                await turn
        await stream.until(lambda s: s.text.endswith("word-30"))
        await stream.until(turns_ended)
    assert (await acp.prompt("s", session, "and?")).result["stopReason"] == "end_turn"


async def test_a_session_is_loaded_by_the_next_agent(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s1", "codex", str(tmp_path))
    await acp.prompt("s1", session, "remember my name is Ada")
    await acp.delete_for_good("s1")
    assert await acp.servers() == {}
    await acp.request("s2", "initialize", {"protocolVersion": 1}, agent="codex")
    async with acp.stream("s2") as stream:
        loaded = await acp.request("s2", "session/load", {"sessionId": session, "cwd": str(tmp_path), "mcpServers": []})
        assert loaded.status == 200
        await stream.until(lambda s: any(m.get("id") == loaded.body["id"] for m in s.messages))
        # The replay stands before the answer.
        assert [u["sessionUpdate"] for u in stream.updates] == ["user_message_chunk", "agent_message_chunk"]
        assert stream.messages[-1]["id"] == loaded.body["id"]
        about = (await acp.prompt("s2", session, "what is my name?")).result["_meta"]["hearth.dev/agent"]
        assert about.items() >= {"turns_in_memory": 1, "turns_loaded": 1, "session_loaded": True}.items()
        await stream.until(lambda s: s.text.endswith("Your name is Ada."))
    unknown = await acp.request("s2", "session/load", {"sessionId": "none", "cwd": str(tmp_path), "mcpServers": []})
    assert (unknown.status, unknown.body["error"]["code"]) == (200, -32002)


async def test_servers_have_agents_of_their_own(acp: AcpHttp, tmp_path: Path) -> None:
    sessions = {server: await acp.open(server, "codex", str(tmp_path)) for server in ("a", "b")}
    turns = await asyncio.gather(*(acp.prompt(server, session, "sleep 0.1") for server, session in sessions.items()))
    assert len({turn.result["_meta"]["hearth.dev/agent"]["pid"] for turn in turns}) == 2
    async with acp.stream("a") as stream:
        await stream.until(lambda s: s.text == "Done.")
        assert {m["params"]["sessionId"] for m in stream.named("session/update")} == {sessions["a"]}


async def test_an_error_of_the_agent_is_an_answer(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    reply = await acp.prompt("s", session, "error out of credit")
    assert (reply.status, reply.body["error"]) == (200, {"code": -32603, "message": "out of credit"})
