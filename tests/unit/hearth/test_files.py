"""Files that others read while they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hearth.files import write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for content, mode in ((b"one", 0o600), (b"two", 0o640)):
        write_whole(path, content, mode)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_the_new_file_belongs_to_whom_the_former_one_did(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(b"one")
    os.chown(path, 10_001, 10_002)
    write_whole(path, b"two", 0o640)
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (10_001, 10_002, 0o640)


def test_a_file_that_cannot_be_given_away_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(b"one")

    def refused(*_: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    if os.geteuid() == 0:
        os.chown(path, 10_001, 10_002)
    write_whole(path, b"two", 0o640)
    assert path.read_bytes() == b"two"
