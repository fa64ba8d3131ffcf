"""Spans in files: one JSON object a line, bounded by a change to a fresh file, read by `hearth trace`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

# What the name of the file before the present one ends with.
OLDER = ".1"


class SpanFile(SpanExporter):
    """Appends finished spans to a file that many processes may share: each batch is one write in append mode.

    A file that has reached `max_bytes` is set aside, in place of the one set aside before, so that both together hold
    no more than twice that and one batch.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        # Whether the last line of the file has no end; the next one begins anew, so that both are not lost.
        self._torn = False
        self._file = self._open()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._make_room()
        begin = "\n" if self._torn else ""
        rest = memoryview((begin + "".join(json.dumps(span_record(done)) + "\n" for done in spans)).encode())
        # A disk that is full may have taken a part.
        self._torn = True
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._torn = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _open(self) -> int:
        opened = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(opened).st_size
        # As a process may leave it that was killed while it wrote.
        self._torn = size > 0 and os.pread(opened, 1, size - 1) != b"\n"
        return opened

    def _make_room(self) -> None:
        while not self._is_present() or os.fstat(self._file).st_size >= self._max_bytes:
            # Of several processes one sets the file aside; the others find that it is another one now.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if self._is_present():
                    self._path.replace(self._path.with_name(self._path.name + OLDER))
                fresh = self._open()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = fresh

    def _is_present(self) -> bool:
        """Whether the open file is the one with the name."""
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(self._file)
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def span_record(done: ReadableSpan) -> dict[str, Any]:
    """A finished span as its line: ids in hex, times in nanoseconds since 1970, `parent_id` null for a root."""
    own = done.get_span_context()
    assert own is not None
    return {
        "trace_id": format(own.trace_id, "032x"),
        "span_id": format(own.span_id, "016x"),
        "parent_id": format(done.parent.span_id, "016x") if done.parent is not None else None,
        "name": done.name,
        "kind": done.kind.name,
        "start_ns": done.start_time,
        "end_ns": done.end_time,
        "status": done.status.status_code.name,
        "status_message": done.status.description,
        "attributes": dict(done.attributes or {}),
        "links": [
            {"trace_id": format(link.context.trace_id, "032x"), "span_id": format(link.context.span_id, "016x")}
            for link in done.links
        ],
        "service": done.resource.attributes.get("service.name"),
        "instance": done.resource.attributes.get("service.instance.id"),
    }
