"""A log file that cannot grow without bound: what agents write on their standard error."""

import logging
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

LOG_BYTES = 1024 * 1024


class LogFile:
    """Appends to `path`. At `limit` bytes the file becomes `<path>.1`, replacing the one before. A disk that cannot be
    written never disturbs the writer: the text is lost, and that is logged once."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self._path = path
        self._limit = limit
        self._file: BinaryIO | None = None
        self._size = 0
        self._broken = False

    def write(self, chunk: bytes) -> None:
        """Append `chunk`."""
        if self._broken:
            return
        try:
            self._append(chunk)
        except OSError as error:
            self._broken = True
            logger.warning("agent log lost", extra={"path": str(self._path), "error": error.strerror})

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, chunk: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
        if self._size and self._size + len(chunk) > self._limit:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        self._file.write(chunk)
        self._size += len(chunk)
