"""Claude Code behind claude-agent-acp 0.49.0, which runs on Node 20."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agents.npm import installed, node
from tests.agents.ready import ready

PACKAGES = {"claude": ("@agentclientprotocol/claude-agent-acp@0.49.0",)}
NODE = 20


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`."""
    del folder
    programs = f"{installed('claude', PACKAGES['claude']) / '.bin'}:{node(NODE)}"
    return ready("claude", programs=programs, ANTHROPIC_BASE_URL=base_url, ANTHROPIC_API_KEY="sk-ant-stand-in")
