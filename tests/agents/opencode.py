"""OpenCode 1.18.33, a native binary. All of its configuration is in one variable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.npm import installed

PACKAGES = ("opencode-linux-x64@1.18.33",)
MODEL, MODEL_WITH_IMAGES = "standin/standin-1", "standin/standin-2"


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`."""
    del folder
    limit = {"limit": {"context": 100_000, "output": 4096}}
    images = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{base_url}/v1", "apiKey": "{env:STANDIN_KEY}"},
        "models": {"standin-1": limit, "standin-2": {**limit, **images}},
    }
    configuration = {
        "model": MODEL,
        "small_model": MODEL,
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "ask", "edit": "ask", "probe_*": "ask"},
        "provider": {"standin": provider},
    }
    binary = installed("opencode", PACKAGES) / "opencode-linux-x64" / "bin" / "opencode"
    binary.chmod(0o755)
    return {
        "command": [str(binary), "acp"],
        "env": {
            "OPENCODE_CONFIG_CONTENT": json.dumps(configuration),
            "STANDIN_KEY": "sk-stand-in",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            # It would fetch 95 MB into each HOME, for plugins that nobody has asked for.
            "npm_config_offline": "true",
        },
        "state_paths": [".local/share/opencode"],
    }
