"""A newcomer's path: a fresh clone, no environment of its own yet, and README and the quickstart from top to bottom."""

from __future__ import annotations

import os

import pytest

from tests.docs import shell
from tests.docs.pages import ROOT, steps
from tests.support.servers import Servers

SECONDS = 900


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * SECONDS + 60)
async def test_from_a_fresh_clone(servers: Servers) -> None:
    scratch = servers.scratch()
    tree = shell.cloned_tree(scratch)
    root = tree / ".hearth"
    # Nothing of this run but pip's cache: what they use is what the clone installs.
    env = shell.environment(root, PATH=shell.path_without(shell.VENV_BIN))
    env.pop("VIRTUAL_ENV", None)
    for name in ("README.md", "docs/quickstart.md"):
        page = steps((tree / name).read_text())
        # In the quickstart they go on in the shell in which they read README.
        setting = (
            []
            if name == "README.md"
            else [step for step in steps((tree / "README.md").read_text()) if "activate" in step.command]
        )
        try:
            problems = await shell.run(
                [*setting, *page], tree=tree, outputs=scratch / "outputs" / name, env=env, seconds=SECONDS
            )
        finally:
            await shell.stop_stack(root, env)
        assert not problems, "\n".join((name, *problems))
    assert (tree / ".venv" / "bin" / "hearth").is_file()
    assert os.path.realpath(tree) != os.path.realpath(ROOT)
