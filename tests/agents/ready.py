"""The entries that docs/agents.md gives, as they are run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.harness import ROOT

PAGE = ROOT / "docs" / "agents.md"


def ready(name: str, *, programs: Path | str, arguments: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
    """The page's entry of an agent. `programs` is the PATH on which its program lies, as far as that is not the
    machine's; `arguments` and `env` come on top."""
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    entry: dict[str, Any] = next(block[name] for block in blocks if name in block)
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    return {
        **entry,
        "command": [*entry["command"], *arguments],
        "env": {**entry["env"], "PATH": path, "STANDIN_KEY": "sk-stand-in", **env},
    }
