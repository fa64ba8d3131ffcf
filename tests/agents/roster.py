"""The agents of the suite, and what is known of each that a test has to go by."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents import claude, codex, opencode, pi

Entry = Callable[[str, Path], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Agent:
    """`entry(base_url, folder)` is its entry of HEARTH_AGENTS. It installs `packages`, by the name of their folder, of
    so many `megabytes`; `node` is the Node that the machine must have. `goes_on_after_a_denial`: the model hears of it
    in the same turn. `images` is the model of the stand-in that takes them, empty where every one does; `refused`
    the code of a turn whose model refuses to answer."""

    name: str
    entry: Entry
    packages: Mapping[str, Sequence[str]]
    megabytes: int
    node: int = 0
    goes_on_after_a_denial: bool = True
    images: str = ""
    refused: str = "AGENT_ERROR"


_ALL = (
    Agent("codex", codex.entry, codex.PACKAGES, 223, goes_on_after_a_denial=False),
    Agent("claude", claude.entry, claude.PACKAGES, 292, node=claude.NODE),
    Agent("pi", pi.entry, pi.PACKAGES, 360, images=pi.MODEL_WITH_IMAGES, refused="EMPTY_TURN"),
    Agent(
        "opencode",
        opencode.entry,
        opencode.PACKAGES,
        177,
        goes_on_after_a_denial=False,
        images=opencode.MODEL_WITH_IMAGES,
    ),
)
# `AGENTS=pi,opencode` runs some of them.
_WANTED = [name for name in os.environ.get("AGENTS", "").split(",") if name]
NAMES = tuple(agent.name for agent in _ALL)
UNKNOWN = sorted(set(_WANTED) - set(NAMES))
# The one that needs no Node and starts in 50 ms.
FIRST = NAMES[0]
ROSTER = {agent.name: agent for agent in _ALL if not _WANTED or agent.name in _WANTED}
