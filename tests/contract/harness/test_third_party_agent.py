"""An agent that is not ours, the example of the ACP SDK for JavaScript, behaves alike behind both daemons."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.acp_http import Message, client_of
from tests.support.harness import agentd, example_agent, real_sandbox_agent


async def one_turn(kind: str, home: Path) -> tuple[str, list[Message]]:
    """A turn with text, tools and a permission → stop reason and all updates."""
    start = agentd if kind == "agentd" else real_sandbox_agent
    async with start({"codex": example_agent()}, home) as daemon, client_of(daemon) as acp:
        session = await acp.open("s", "codex", str(home))
        async with acp.stream("s") as stream:
            turn = asyncio.create_task(acp.prompt("s", session, "hello"))
            await stream.until(lambda s: s.named("session/request_permission"))
            request = stream.named("session/request_permission")[0]
            option = next(o for o in request["params"]["options"] if o["kind"] == "allow_once")
            outcome = {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}
            assert (await acp.post("s", {"jsonrpc": "2.0", "id": request["id"], "result": outcome})).status == 202
            reply = await turn
            await stream.until(lambda s: any(m.get("id") == reply.body["id"] for m in s.messages))
            return reply.result["stopReason"], stream.updates


async def test_a_turn_with_tools_and_permission(tmp_path: Path) -> None:
    example_agent()
    (ours, our_updates), (theirs, their_updates) = await asyncio.gather(
        one_turn("agentd", tmp_path / "agentd"), one_turn("sandbox-agent", tmp_path / "sandbox-agent")
    )
    assert ours == theirs == "end_turn"
    assert our_updates == their_updates
    kinds = [update["sessionUpdate"] for update in our_updates]
    assert {"agent_message_chunk", "tool_call", "tool_call_update"} <= set(kinds)
