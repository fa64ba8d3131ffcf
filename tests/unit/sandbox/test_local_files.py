"""What the local provider does about files that cannot be removed, or hold nothing that makes sense."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.chassis.clock import SystemClock
from services.sandbox.providers.files import TRASH, remove_tree, write_private
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.local_state import State
from services.sandbox.providers.port import InstanceNotFound, InstanceState, ProviderError
from services.sandbox.rows import NAME_PREFIX

OLD = 1_000_000_000


def old_trash(root: Path, name: str) -> Path:
    """Left by a process that was killed long ago."""
    left = root / f"{TRASH}{name}"
    (left / "below").mkdir(parents=True)
    os.utime(left, (OLD, OLD))
    return left


@pytest.fixture
def somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is named `theirs` is not ours to change; said instead of the system, which lets root do anything."""
    chmod, rmtree = os.chmod, shutil.rmtree

    def refuse(path: Any) -> None:
        if "theirs" in str(path):
            raise PermissionError(1, "Operation not permitted", str(path))

    def chmod_ours(path: Any, mode: int, **options: Any) -> None:
        refuse(path)
        chmod(path, mode, **options)

    def remove_ours(path: Any, **options: Any) -> None:
        refuse(path)
        rmtree(path, **options)

    monkeypatch.setattr(os, "chmod", chmod_ours)
    monkeypatch.setattr(shutil, "rmtree", remove_ours)


@pytest.mark.usefixtures("somebody_elses")
def test_trash_that_cannot_be_removed_keeps_no_service_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    around = [old_trash(tmp_path, "a"), old_trash(tmp_path, "z")]
    stuck = old_trash(tmp_path, "theirs")
    with caplog.at_level(logging.WARNING):
        LocalProvider(tmp_path, SystemClock())
    assert stuck.exists()
    assert not any(left.exists() for left in around)
    assert [record.message for record in caplog.records] == ["cannot remove what was deleted"]


@pytest.mark.usefixtures("somebody_elses")
def test_what_belongs_to_somebody_else_below_a_directory_of_ours_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "theirs").mkdir(parents=True)
    remove_tree(tree)
    assert not tree.exists()


@pytest.mark.parametrize("content", [b"", bytes(200), b"\xff", b"[]", b"null", b'{"labels": {}}', b'{"later": 1}'])
async def test_a_state_that_cannot_be_read_is_that_of_one_sandbox_only(tmp_path: Path, content: bytes) -> None:
    provider = LocalProvider(tmp_path, SystemClock())
    broken, whole = tmp_path / f"{NAME_PREFIX}broken", tmp_path / f"{NAME_PREFIX}whole"
    for directory in (broken, whole):
        directory.mkdir()
        State({"mine": "yes"}, "p", "s", created=0.0).write(directory)
    (broken / "state.json").write_bytes(content)
    assert [instance.name for instance in await provider.list({"mine": "yes"})] == [whole.name]
    assert (await provider.get(broken.name)).state is InstanceState.ERROR
    for change in (provider.start, provider.stop):
        with pytest.raises(ProviderError):
            await change(broken.name)
    await provider.delete(broken.name)
    assert not broken.exists()
    with pytest.raises(InstanceNotFound):
        await provider.get(broken.name)


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    kept: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "fsync", lambda file: kept.append((os.fstat(file).st_size, path.exists())))
    write_private(path, "text")
    assert kept == [(4, False)]
    assert path.read_text() == "text"
