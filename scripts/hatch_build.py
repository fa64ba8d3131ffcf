"""Wheel build hook: the generated stubs belong into the wheel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface[Any]):
    """Generates the stubs before a wheel is packed; an editable install has them from `make setup`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            sys.path.insert(0, str(Path(self.root) / "scripts"))
            from generate_stubs import generate

            generate()
