"""The log that tests read after a crash: what was asked of this agent, on the disk before anything comes of it."""

import json
import os
import time


class Journal:
    """Appends one JSON object a line to `path`, synced; without a path it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else None

    def write(self, event: str, **fields: object) -> None:
        """Log an event, with this process's id and the time (seconds since 1970)."""
        if self._descriptor is not None:
            entry = {"event": event, **fields, "pid": os.getpid(), "time": time.time()}
            os.write(self._descriptor, json.dumps(entry).encode() + b"\n")
            os.fsync(self._descriptor)
