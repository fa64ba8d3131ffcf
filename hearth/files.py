"""Files that others read while they are written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Whole and on disk, or not at all; nobody else can read it before it has its mode.

    A file that is replaced leaves its owner and group to the new one, as far as this process may give them.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        _hand_over(file.fileno(), path)
        os.fchmod(file.fileno(), mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _hand_over(draft: int, path: Path) -> None:
    """Give the draft to whom the file at `path` belongs, who could not read it otherwise."""
    with contextlib.suppress(OSError):
        former, own = path.stat(), os.fstat(draft)
        if (former.st_uid, former.st_gid) != (own.st_uid, own.st_gid):
            os.fchown(draft, former.st_uid, former.st_gid)
