"""Files that others read while they are written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Whole and on disk, or not at all; nobody else can read it before it has its mode."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
