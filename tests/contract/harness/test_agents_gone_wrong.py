"""What both daemons do with agents that die, write garbage or a great deal; where they differ, it says so."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from tests.support.acp_http import AcpHttp, client_of
from tests.support.harness import SCRIPTED_AGENT, agentd, real_sandbox_agent


async def test_an_agent_that_dies(acp: AcpHttp, kind: str, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        turn = asyncio.create_task(acp.prompt("s", session, "stream 2 words\ncrash 7"))
        await stream.until(lambda s: s.named("_adapter/agent_exited"))
        exited = stream.messages[-1]
        assert exited["method"] == "_adapter/agent_exited"
        assert exited["params"] == {"code": 7, "success": False}
        assert stream.text == "word-1 word-2"
        if kind == "agentd":
            reply = await asyncio.wait_for(turn, 5)
            assert (reply.status, reply.slug) == (502, "stream_error")
            assert "exited with code 7" in reply.body["detail"]
        else:
            # The real daemon never answers the request that the agent died over.
            done, _ = await asyncio.wait([turn], timeout=1)
            assert not done
            turn.cancel()
        later = await acp.prompt("s", session, "anyone?")
        assert (later.status, later.slug) == (502, "stream_error")
        note = await acp.notify("s", "session/cancel", {"sessionId": session})
        assert (note.status, note.slug) == (502, "stream_error")
        assert list(await acp.servers()) == ["s"]
    await acp.delete_for_good("s")
    assert await acp.servers() == {}
    await acp.open("s", "codex", str(tmp_path))


async def test_an_agent_that_is_killed_has_no_code(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        turn = asyncio.create_task(acp.prompt("s", session, "crash-silent"))
        await stream.until(lambda s: s.named("_adapter/agent_exited"))
        params = stream.named("_adapter/agent_exited")[0]["params"]
        assert (params["code"], params["success"]) == (None, False)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)


async def test_delete_ends_agent_and_stream(acp: AcpHttp, kind: str, tmp_path: Path) -> None:
    await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        if kind == "agentd":
            assert (await asyncio.wait_for(acp.delete("s"), 5)).status == 204
        else:
            # The real daemon's first DELETE never ends, but the server is gone once the client gives up.
            done, _ = await asyncio.wait([call := asyncio.create_task(acp.delete("s"))], timeout=0.5)
            assert not done
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert (await acp.delete("s")).status == 204
        await stream.until_end()
    assert await acp.servers() == {}
    gone = await acp.call("GET", "/v1/acp/s")
    assert (gone.status, gone.slug) == (404, "session_not_found")
    again = await acp.request("s", "session/new", {"cwd": str(tmp_path), "mcpServers": []})
    assert (again.status, again.slug) == (400, "invalid_request")


async def test_garbage_is_shown_and_survived(acp: AcpHttp, kind: str, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        turn = await acp.prompt("s", session, "garbage\nstill here")
        assert turn.result["stopReason"] == "end_turn"
        await stream.until(lambda s: s.text == "You said: still here")
        shown = [m["params"]["raw"] for m in stream.named("_adapter/invalid_stdout")]
        passed_on = [data for _, data in stream.events if not isinstance(data, dict)]
        assert shown[:2] == ["this is not JSON", '{"jsonrpc":"2.0","method":']
        # The real daemon passes on whatever is JSON, agentd only objects.
        if kind == "agentd":
            assert (shown[2:], passed_on) == (['"a string"', "[1,2]"], [])
        else:
            assert (shown[2:], passed_on) == ([], ["a string", [1, 2]])


async def test_a_line_of_600_kilobytes_passes(acp: AcpHttp, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    async with acp.stream("s") as stream:
        assert (await acp.prompt("s", session, "line 600000")).result["stopReason"] == "end_turn"
        await stream.until(lambda s: len(s.text) == 600_000)


async def test_a_late_reader_sees_where_the_ring_begins(acp: AcpHttp, kind: str, tmp_path: Path) -> None:
    session = await acp.open("s", "codex", str(tmp_path))
    await acp.prompt("s", session, "flood 1500 100")
    async with acp.stream("s") as stream:
        await stream.until(lambda s: any(m.get("result", {}).get("stopReason") for m in s.messages))
        assert stream.ids == list(range(stream.ids[0], stream.ids[-1] + 1))
        # The real daemon keeps the last 1024 messages, agentd the last 16 MiB.
        assert stream.ids[0] == (1 if kind == "agentd" else stream.ids[-1] - 1023)


async def test_a_line_that_is_no_utf_8(kind: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f"printf '\\377\\n'; exec {shlex.join(SCRIPTED_AGENT)}"]
    start = agentd if kind == "agentd" else real_sandbox_agent
    async with start({"codex": command}, tmp_path / "home") as daemon, client_of(daemon) as acp:
        hello = asyncio.create_task(acp.request("s", "initialize", {"protocolVersion": 1}, agent="codex"))
        if kind == "agentd":
            assert (await hello).result["protocolVersion"] == 1
        else:
            # The real daemon stops listening to the agent for good.
            done, _ = await asyncio.wait([hello], timeout=1)
            assert not done
            hello.cancel()
            await asyncio.gather(hello, return_exceptions=True)
