"""Claude Code behind claude-agent-acp 0.49.0, which runs on Node 20."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agents.npm import installed
from tests.agents.ready import ready

PACKAGES = ("@agentclientprotocol/claude-agent-acp@0.49.0",)


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`."""
    del folder
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    programs = f"{installed('claude', PACKAGES) / '.bin'}:{Path(node).parent}"
    return ready("claude", programs=programs, ANTHROPIC_BASE_URL=base_url, ANTHROPIC_API_KEY="sk-ant-stand-in")
