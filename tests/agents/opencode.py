"""OpenCode 1.18.33, a native binary. All of its configuration is in one variable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.npm import installed
from tests.agents.ready import ready

PACKAGES = {"opencode": ("opencode-linux-x64@1.18.33",)}
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
    binary = installed("opencode", PACKAGES["opencode"]) / "opencode-linux-x64" / "bin" / "opencode"
    binary.chmod(0o755)
    # It would fetch 95 MB into each HOME, for plugins that nobody has asked for.
    entry = ready("opencode", programs=binary.parent, npm_config_offline="true")
    configuration = json.loads(entry["env"]["OPENCODE_CONFIG_CONTENT"])
    configuration |= {"model": MODEL, "small_model": MODEL, "provider": {"standin": provider}}
    entry["env"]["OPENCODE_CONFIG_CONTENT"] = json.dumps(configuration)
    return entry
