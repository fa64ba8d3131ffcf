"""Codex behind codex-acp 0.16.0: one native binary, with its configuration on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.agents.npm import installed
from tests.agents.ready import ready

PACKAGES = {"codex": ("@zed-industries/codex-acp-linux-x64@0.16.0",)}


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
    return _entry(
        {"model_provider": "standin", **{f"model_providers.standin.{name}": provider[name] for name in provider}}
    )


def with_its_own_provider(base_url: str) -> dict[str, Any]:
    """The same, which wants the key of that provider, and then finds it at `base_url`."""
    return _entry({"openai_base_url": f"{base_url}/v1"})


def _entry(configuration: dict[str, Any]) -> dict[str, Any]:
    # A model that it knows: it warns of any other in front of every answer.
    configuration = {"model": "gpt-5.4", **configuration}
    binary = installed("codex", PACKAGES["codex"]) / "@zed-industries" / "codex-acp-linux-x64" / "bin" / "codex-acp"
    binary.chmod(0o755)
    # JSON of strings and numbers is TOML too.
    options = [part for name, value in configuration.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    # A program of its own that panics takes its time with this. What ends at once Codex takes for a command that its
    # sandbox kept from running, and runs again without it: whether a command runs must not hang on that.
    return ready("codex", programs=binary.parent, arguments=tuple(options), RUST_BACKTRACE="1")
