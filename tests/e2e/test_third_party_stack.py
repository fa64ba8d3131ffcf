"""A turn of a third-party agent behind the third-party daemon: tool calls, permission and text reach the history.

sandbox-agent 0.4.2 takes the place of agentd, the example agent of the ACP SDK for JavaScript that of an agent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import running
from tests.support.harness import ROOT, example_agent, sandbox_agent_binary


def tools(log: list[dict[str, Any]]) -> dict[str, str]:
    found = [item["event"]["tool_completed"] for item in log if "tool_completed" in item["event"]]
    return {tool["name"]: tool["status"] for tool in found}


@pytest.mark.timeout(300)
async def test_a_turn_through_third_party_daemon_and_agent(scratch: Path) -> None:
    daemon = [sys.executable, str(ROOT / "tests/support/sandbox_agent_daemon.py"), str(sandbox_agent_binary())]
    environment = {
        "HEARTH_LOCAL_DAEMON": json.dumps(daemon),
        "HEARTH_AGENTS": json.dumps({"claude": {"command": example_agent()}}),
    }
    async with running(scratch / ".hearth", environment) as hearth:
        for turn in (1, 2):
            options = ("--agent", "claude", "--permissions", "allow", "--wait")
            sent = await hearth.run("send", "third", "hello", *options, seconds=120)
            assert sent.code == 0, sent.stderr + sent.stdout
            log = (await hearth.run("history", "third", "--json")).lines()
            endings = [item["event"]["execution_completed"] for item in log if "execution_completed" in item["event"]]
            assert len(endings) == turn
            assert endings[-1]["finish_reason"] == "end_turn"
            assert endings[-1]["summary"]["how"] == ("cold" if turn == 1 else "warm")
        statuses = tools(log)
        assert len(statuses) >= 2, statuses
        assert set(statuses.values()) == {"TOOL_STATUS_SUCCEEDED"}
        texts = [
            part["text"]["text"]
            for item in log
            if item["event"].get("message_completed", {}).get("role") == "ROLE_AGENT"
            for part in item["event"]["message_completed"]["content"]
        ]
        assert any("Perfect" in text or "successfully" in text for text in texts), texts
