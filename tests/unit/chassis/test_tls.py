"""What is made from files: made anew when they change, and as soon as they can be used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hearth.tls import TlsError
from services.chassis.tls import Watched


def test_what_could_not_be_used_counts_as_soon_as_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "certificate.pem"
    file.write_text("old")
    denied: list[str] = []

    def make() -> str:
        if denied:
            raise TlsError(file, denied.pop(0))
        return file.read_text()

    watched = Watched([file], make)
    file.write_text("newer")
    denied += ["denied", "denied", "too many open files"]
    for _ in range(3):
        assert watched.current() == "old"
    # Nothing of the file has changed meanwhile but whether it can be read.
    assert watched.current() == "newer"
    told = [record.__dict__["cause"] for record in caplog.records if record.levelno == logging.ERROR]
    assert told == [f"{file} denied", f"{file} too many open files"]


def test_what_has_not_changed_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "certificate.pem"
    file.write_text("old")
    made: list[str] = []

    def make() -> int:
        made.append(file.read_text())
        return len(made)

    watched = Watched([file], make)
    assert [watched.current() for _ in range(3)] == [1, 1, 1]
    file.write_text("newer")
    assert [watched.current() for _ in range(3)] == [2, 2, 2]
