"""The log that tests read after a crash: what was asked of this agent, on the disk before anything comes of it."""

import json
import os
import time
from collections.abc import Mapping, Sequence

Object = Mapping[str, object]


class Journal:
    """Appends one JSON object a line to `path`, synced; without a path it does nothing.

    `shown` are the names of variables and headers whose values may be written: what others hold may be a secret.
    """

    def __init__(self, path: str | None, shown: Sequence[str] = ()) -> None:
        self._shown = shown
        self._began = time.time()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else None

    def write(self, event: str, **fields: object) -> None:
        """Log an event, with this process's id and the time (seconds since 1970)."""
        if self._descriptor is not None:
            entry = {"event": event, **fields, "pid": os.getpid(), "time": time.time()}
            os.write(self._descriptor, json.dumps(entry).encode() + b"\n")
            os.fsync(self._descriptor)

    def opened(self, session: str, params: Object, *, loaded: bool) -> None:
        """Log a session that was opened, with what it was opened with. `began` tells this process from an earlier one
        of the same id."""
        meta = params.get("_meta")
        told = meta if isinstance(meta, dict) else {}
        self.write(
            "open",
            session=session,
            began=self._began,
            loaded=loaded,
            instructions=told.get("hearth.dev/instructions", ""),
            model=told.get("hearth.dev/model", ""),
            values={name: os.environ[name] for name in self._shown if name in os.environ},
            servers=[self._server(one) for one in _objects(params.get("mcpServers"))],
        )

    def _server(self, server: Object) -> Object:
        named = [*_objects(server.get("env")), *_objects(server.get("headers"))]
        return {
            "name": server.get("name"),
            "where": server.get("url") or [server.get("command"), *_list(server.get("args"))],
            "names": sorted(str(one.get("name")) for one in named),
            "values": {str(one["name"]): one.get("value") for one in named if one.get("name") in self._shown},
        }


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _objects(value: object) -> list[Object]:
    return [one for one in _list(value) if isinstance(one, dict)]
