"""Codex behind codex-acp 0.16.0: one native binary, with its configuration on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.npm import installed

PACKAGES = ("@zed-industries/codex-acp-linux-x64@0.16.0",)


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`."""
    del folder
    provider = {
        "name": "standin",
        "base_url": f"{base_url}/v1",
        "env_key": "STANDIN_KEY",
        "wire_api": "responses",
        "request_max_retries": 1,
        "stream_max_retries": 1,
    }
    configuration: dict[str, Any] = {
        # One that it knows: it warns of any other in front of every answer.
        "model": "gpt-5.4",
        "model_provider": "standin",
        "approval_policy": "untrusted",
        "sandbox_mode": "workspace-write",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        **{f"model_providers.standin.{name}": value for name, value in provider.items()},
    }
    binary = installed("codex", PACKAGES) / "@zed-industries" / "codex-acp-linux-x64" / "bin" / "codex-acp"
    binary.chmod(0o755)
    # JSON of strings, numbers and booleans is TOML too.
    options = [part for name, value in configuration.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return {
        "command": [str(binary), *options],
        "env": {"STANDIN_KEY": "sk-stand-in", "NO_BROWSER": "1"},
        "state_paths": [".codex/sessions"],
    }
