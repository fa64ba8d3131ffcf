"""Files of local sandboxes: written so that no reader sees half of one, removed also where their owner resists."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

logger = logging.getLogger(__name__)

TRASH = ".trash-"
_TRASH_SECONDS = 600.0
_LOG_TAIL_BYTES = 2000


def path_part(text: str) -> str:
    """A session or project id as one name of a path: `..` must not climb, and `:` separates paths in variables."""
    escaped = text.replace(":", "%3A")
    return "%2E" + escaped[1:] if escaped.startswith(".") else escaped


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user reads, so that a reader sees the whole of it or what was there before, also when
    the machine fails in between."""
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def remove_tree(path: Path) -> None:
    """Remove a tree also where its owner took away the right to write in it, as some package caches do."""
    for directory, below, _ in os.walk(path):
        for name in below:
            inner = os.path.join(directory, name)
            # What belongs to somebody else may still be removed from a directory of ours.
            with suppress(FileNotFoundError, PermissionError):
                if not os.path.islink(inner):
                    os.chmod(inner, stat.S_IRWXU)
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_old_trash(root: Path) -> None:
    """Remove what a killed process left half made or half deleted; what is young may be another one's work. What cannot
    be removed stays."""
    for left in root.glob(f"{TRASH}*"):
        try:
            if time.time() - left.stat().st_mtime > _TRASH_SECONDS:
                remove_tree(left)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("cannot remove what was deleted", extra={"path": str(left), "error": str(error)})


def remove_below(home: Path, paths: Iterable[str]) -> None:
    """Remove these files below `home`; never what a link on the way leads to elsewhere."""
    top = home.resolve()
    for path in paths:
        found = home / path
        if found.parent.resolve().is_relative_to(top):
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                found.unlink()


def tail(path: Path) -> str:
    """The last lines of a log in one."""
    try:
        text = path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return "it wrote nothing"
    return " | ".join(line.strip() for line in text.splitlines()[-5:] if line.strip()) or "it wrote nothing"
