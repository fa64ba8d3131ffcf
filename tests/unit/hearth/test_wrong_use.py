"""Commands that are used wrongly say so before they call anybody, with exit code 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hearth.cli.main import app

# Where nobody answers: whoever called all the same would get exit code 3.
NOBODY = {f"HEARTH_{name}_ADDRESS": "127.0.0.1:1" for name in ("POOL", "HISTORY", "RELAY", "SANDBOX")}


@pytest.mark.parametrize(
    "command",
    [
        ("answer", "s"),
        ("answer", "s", "--allow", "--deny"),
        ("answer", "s", "--allow", "--text", "x"),
        ("answer", "s", "x", "--allow", "--all"),
        ("send", "s", "x", "--permissions", "maybe"),
        ("send", "s", "x", "--on-busy", "wait"),
        ("queue", "edit", "s", "x"),
        ("queue",),
        ("kill",),
        ("bench", "control", "--part", "all"),
        ("bench", "warm", "--part", "stops"),
    ],
    ids=" ".join,
)
def test_wrong_use(command: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, command, env=NOBODY).exit_code == 2
