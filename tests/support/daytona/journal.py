"""What happened: every call, every change of state, every request that went to a harness, with times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened. `at` is monotonic, `wall` since the epoch, both in seconds.

    `kind`: "call" (data: call, method, path, status, fault), "state" (old, new, cause), "fault" (call, fault),
    "harness" (a request through the preview proxy: method, path, acp, server, status, began, accepted), "process"
    (command), "timer" (which). `session` is what the sandbox's labels say.
    """

    number: int
    at: float
    wall: float
    kind: str
    sandbox: str = ""
    session: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """The entries, oldest first."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def write(self, kind: str, *, sandbox: str = "", session: str = "", **data: Any) -> Entry:
        """Write down that something happened now."""
        entry = Entry(len(self._entries) + 1, time.monotonic(), time.time(), kind, sandbox, session, data)
        self._entries.append(entry)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, kind: str, **data: Any) -> Sequence[Entry]:
        """Entries of a kind whose data holds these values."""
        return [
            entry
            for entry in self._entries
            if entry.kind == kind and all(entry.data.get(name) == value for name, value in data.items())
        ]
