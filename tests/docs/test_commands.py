"""Every command of README and docs runs, and shows what its page shows; docs/api.md has a test of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import shell
from tests.docs.pages import ROOT, all_pages, name_of, steps
from tests.support.servers import Servers

RUN_ELSEWHERE = {"docs/api.md": "tests/clients/test_api_page.py"}
# Those that every change runs; the others with the long cases.
ALWAYS = {"README.md", "docs/security.md", "docs/operating.md", "docs/credentials.md"}
PAGES = [
    pytest.param(page, id=name_of(page), marks=() if name_of(page) in ALWAYS else pytest.mark.exhaustive)
    for page in all_pages()
    if steps(page.read_text()) and name_of(page) not in RUN_ELSEWHERE
]
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("page", PAGES)
async def test_the_page_runs_from_top_to_bottom(servers: Servers, page: Path) -> None:
    scratch = servers.scratch()
    tree = shell.copied_tree(scratch)
    root = scratch / ".hearth"
    env = shell.environment(root, PATH=shell.path_with(shell.VENV_BIN))
    try:
        problems = await shell.run(
            steps(page.read_text()), tree=tree, outputs=scratch / "outputs", env=env, seconds=SECONDS
        )
    finally:
        await shell.stop_stack(root, env)
    assert not problems, "\n".join((name_of(page), *problems))


def test_pages_that_run_elsewhere_are_run_there() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()
    assert {name_of(page) for page in all_pages()} >= ALWAYS
