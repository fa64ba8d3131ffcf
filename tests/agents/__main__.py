"""Gets what `make agents` runs, and says what that is: `AGENTS=codex,pi python -m tests.agents`.

Exits with 1 when something cannot be had, and with 2 when AGENTS names an agent that is not in the suite.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.agents.npm import cache, installed, node, there
from tests.agents.roster import NAMES, ROSTER, UNKNOWN, Agent
from tests.support.harness import sandbox_agent_binary
from tests.support.npm import Unavailable


def get(agent: Agent) -> None:
    """Install what of it is not there yet. Raises `Unavailable` and RuntimeError."""
    if agent.node:
        node(agent.node)
    missing = [(folder, packages) for folder, packages in agent.packages.items() if not there(folder, packages)]
    if not missing:
        print(f"{agent.name}: is there")
        return
    what = " ".join(package for _, packages in missing for package in packages)
    print(f"{agent.name}: getting {what} from npm, up to {agent.megabytes} MB on the disk", flush=True)
    began = time.monotonic()
    for folder, packages in missing:
        installed(folder, packages)
    print(f"{agent.name}: installed in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Get everything; the exit code."""
    if UNKNOWN:
        print(f"no agent is called {', '.join(UNKNOWN)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    print(f"agents are kept in {cache()}", flush=True)
    failed = False
    for agent in ROSTER.values():
        try:
            get(agent)
        except (Unavailable, RuntimeError) as error:
            failed = True
            print(f"{agent.name}: {error}", file=sys.stderr, flush=True)
    try:
        sandbox_agent_binary()
    except pytest.skip.Exception as why:
        failed = True
        print(f"sandbox-agent: {why}", file=sys.stderr)
    if failed:
        print("AGENTS=codex,pi takes only these agents", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
