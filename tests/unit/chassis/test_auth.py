"""Tokens: who is found by one, what a wrong file says, and that a change of the file counts at once."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hearth.secret import Secret
from services.chassis.auth import ANONYMOUS, Caller, TokenFile, current_caller, hash_token, require_project
from services.chassis.errors import PermissionDenied
from services.chassis.limits import Quota
from services.chassis.settings import StartupError


def write(path: Path, tokens: dict[str, dict[str, Any]]) -> None:
    path.write_text(json.dumps({hash_token(token): entry for token, entry in tokens.items()}))


ENTRY = {"name": "backend", "project": "acme", "scopes": ["read", "run"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    write(path, {"one": ENTRY})
    return path


def test_a_token_names_its_caller(file: Path) -> None:
    tokens = TokenFile(file)
    assert tokens.find(Secret("one")) == Caller("backend", "acme", frozenset({"read", "run"}))
    for wrong in ("two", "", "ONE", hash_token("one")):
        assert tokens.find(Secret(wrong)) is None


def test_a_change_counts_at_once(file: Path) -> None:
    tokens = TokenFile(file)
    write(file, {"two": ENTRY})
    os.utime(file, ns=(1, 1))
    assert tokens.find(Secret("one")) is None
    assert tokens.find(Secret("two")) is not None


def test_a_broken_change_keeps_the_former_tokens(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = TokenFile(file)
    file.write_text('{"half')
    with caplog.at_level(logging.ERROR):
        assert tokens.find(Secret("one")) is not None
    assert "auth file cannot be read" in caplog.text
    file.unlink()
    assert tokens.find(Secret("one")) is not None
    write(file, {"three": ENTRY})
    assert tokens.find(Secret("three")) is not None
    assert tokens.find(Secret("one")) is None


def test_what_could_not_be_read_counts_as_soon_as_it_can(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(file)
    write(file, {"two": ENTRY})
    os.utime(file, ns=(1, 1))
    read = Path.read_text
    causes = [PermissionError(13, "denied"), PermissionError(13, "denied"), OSError(24, "too many open files")]

    def denied(path: Path, *arguments: Any) -> str:
        if causes:
            raise causes.pop(0)
        return read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", denied)
    for _ in range(3):
        assert tokens.find(Secret("one")) is not None
    # Nothing of the file has changed meanwhile but whether it can be read.
    assert tokens.find(Secret("one")) is None
    assert tokens.find(Secret("two")) is not None
    told = [record.__dict__["cause"] for record in caplog.records if record.levelno == logging.ERROR]
    assert told == ["[Errno 13] denied", "[Errno 24] too many open files"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "Expecting value"),
        ("[]", "dictionary"),
        (json.dumps({"short": ENTRY}), "SHA-256"),
        (json.dumps({"G" * 64: ENTRY}), "SHA-256"),
        (json.dumps({"a" * 64: {"name": "n", "project": "p"}}), "scopes"),
        (json.dumps({"a" * 64: {**ENTRY, "scopes": ["root"]}}), "scopes"),
        (json.dumps({"a" * 64: {**ENTRY, "sope": []}}), "sope"),
        (json.dumps({"a" * 64: {**ENTRY, "limits": {"rate": -1}}}), "limits.rate"),
        (json.dumps({"a" * 64: {**ENTRY, "limits": {"message_bytes": 2**23}}}), "limits.message_bytes"),
        (json.dumps({"a" * 64: {**ENTRY, "limits": {"calls": 1}}}), "limits.calls"),
        (json.dumps({"a" * 64: {**ENTRY, "project": "*", "limits": {"rate": 1}}}), "all projects"),
    ],
)
def test_a_wrong_file_is_refused_at_start(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(StartupError, match=words) as caught:
        TokenFile(path)
    assert caught.value.exit_code == 2
    assert "HEARTH_AUTH_FILE" in str(caught.value)


def test_without_auth_everybody_may_do_everything() -> None:
    assert current_caller() == ANONYMOUS
    require_project("anything")


def test_a_project_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.chassis import auth

    token = auth._current.set(Caller("backend", "acme", frozenset({"read"})))
    try:
        require_project("acme")
        with pytest.raises(PermissionDenied) as caught:
            require_project("other")
        assert caught.value.reason == "PROJECT_DENIED"
        assert caught.value.metadata == {"project": "other"}
    finally:
        auth._current.reset(token)


def test_limits_are_of_a_project_and_the_smallest_of_its_tokens_counts(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write(
        path,
        {
            "silent": ENTRY,
            "wide": {**ENTRY, "limits": {"rate": 50, "message_bytes": 1000}},
            "narrow": {**ENTRY, "limits": {"rate": 20, "streams": 0, "message_bytes": 0}},
            "other": {**ENTRY, "project": "other"},
            "free": {**ENTRY, "project": "free", "limits": {"rate": 0, "streams": 0, "message_bytes": 0}},
            "all": {**ENTRY, "project": "*"},
        },
    )
    default = Quota(rate=5, streams=7, message_bytes=9)
    tokens = TokenFile(path, default)

    def quota(token: str) -> Quota:
        caller = tokens.find(Secret(token))
        assert caller is not None
        return caller.quota

    for token in ("silent", "wide", "narrow"):
        assert quota(token) == Quota(rate=20, streams=0, message_bytes=1000)
    assert quota("other") == default
    assert quota("free") == quota("all") == Quota()
    write(path, {"silent": ENTRY})
    os.utime(path, ns=(1, 1))
    assert quota("silent") == default
