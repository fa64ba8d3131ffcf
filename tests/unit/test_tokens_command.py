"""`hearth tokens` keeps the file that services read: hashes only, one token a name, never half a file."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hearth.cli.main import app
from hearth.secret import Secret
from services.chassis.auth import TokenFile
from services.chassis.limits import Quota

_RUNNER = CliRunner()


def _add(file: Path, name: str = "backend") -> str:
    asked = ["--file", str(file), "--project", "shop", "--scope", "read", "--scope", "run"]
    made = _RUNNER.invoke(app, ["tokens", "add", name, *asked])
    assert made.exit_code == 0, made.output
    return made.output.strip()


def test_what_is_added_is_accepted_and_its_text_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = _add(file)
    caller = TokenFile(file).find(Secret(token))
    assert caller is not None
    assert (caller.name, caller.project, caller.scopes) == ("backend", "shop", frozenset({"read", "run"}))
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    listed = _RUNNER.invoke(app, ["tokens", "list", "--file", str(file), "--json"])
    assert [row["name"] for row in json.loads(listed.output)["tokens"]] == ["backend"]


def test_what_is_removed_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    first, second = _add(file), _add(file, "worker")
    tokens = TokenFile(file)
    assert _RUNNER.invoke(app, ["tokens", "remove", "backend", "--file", str(file)]).exit_code == 0
    assert tokens.find(Secret(first)) is None
    assert tokens.find(Secret(second)) is not None


def test_wrong_use_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    _add(file)
    before = file.read_text()
    for arguments in (
        ["add", "backend", "--project", "shop", "--scope", "read"],
        ["add", "other", "--project", "shop", "--scope", "everything"],
        ["add", "other", "--project", "a/b", "--scope", "read"],
        ["add", "other", "--project", "shop", "--scope", "read", "--rate", "-1"],
        ["add", "other", "--project", "shop", "--scope", "read", "--message-bytes", "9999999"],
        ["add", "other", "--project", "*", "--scope", "read", "--streams", "1"],
        ["remove", "nobody"],
    ):
        assert _RUNNER.invoke(app, ["tokens", *arguments, "--file", str(file)]).exit_code == 2
    assert file.read_text() == before


def test_limits_of_a_project_are_kept_and_listed(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    asked = ["--file", str(file), "--project", "shop", "--scope", "read"]
    limits = ["--rate", "2.5", "--message-bytes", "65536"]
    made = _RUNNER.invoke(app, ["tokens", "add", "backend", *asked, *limits, "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["limits"] == {"rate": 2.5, "message_bytes": 65536}
    caller = TokenFile(file).find(Secret(json.loads(made.output)["token"]))
    assert caller is not None
    assert caller.quota == Quota(rate=2.5, message_bytes=65536)
    listed = _RUNNER.invoke(app, ["tokens", "list", "--file", str(file)])
    assert "shop  read  rate=2.5  message_bytes=65536" in listed.output
