"""Claude Code behind claude-agent-acp 0.49.0, which runs on Node 20."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agents.npm import installed

PACKAGES = ("@agentclientprotocol/claude-agent-acp@0.49.0",)


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`."""
    del folder
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    adapter = installed("claude", PACKAGES) / "@agentclientprotocol" / "claude-agent-acp" / "dist" / "index.js"
    return {
        "command": [node, str(adapter)],
        "env": {
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": "sk-ant-stand-in",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            # It refuses to run as root where it is not told that this is a sandbox.
            "IS_SANDBOX": "1",
        },
        "state_paths": [".claude/projects"],
    }
