"""What the embedded stack remembers of itself between two commands, and whether that is still true.

The record is one JSON file. A process counts as ours only if its pid *and* its start time are the recorded ones, so a
pid that the system gave to somebody else is never touched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One started process: `started` is its start time in seconds since the epoch, as the system reports it. Services
    have an address for calls and one at which their metrics are read."""

    name: str
    pid: int
    started: float
    address: str
    metrics: str = ""

    @classmethod
    def of(cls, name: str, pid: int, address: str) -> ProcessRecord:
        """Record a process that runs now; raises `psutil.NoSuchProcess` if it is gone already."""
        return cls(name, pid, psutil.Process(pid).create_time(), address)

    def process(self) -> psutil.Process | None:
        """The live process, or None when it is gone, a zombie, or somebody else's by now."""
        try:
            process = psutil.Process(self.pid)
            # The kernel counts in clock ticks; two readings of one process may differ by one of them.
            if abs(process.create_time() - self.started) > 0.05 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


@dataclasses.dataclass(slots=True)
class StackRecord:
    """A stack as it was started: its processes by name, and how to reach its stores."""

    processes: dict[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    postgres_dsn: str = ""
    valkey_url: str = ""
    agents: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def address(self, name: str) -> str:
        """host:port of a service; empty when it was not started."""
        record = self.processes.get(name)
        return record.address if record is not None else ""

    @property
    def pools(self) -> list[str]:
        """Names of the replicas of the pool that were started, the first one first."""
        return sorted(
            (name for name in self.processes if name.partition("-")[0] == "pool"),
            key=lambda name: int(name.partition("-")[2] or 1),
        )

    @property
    def pool_address(self) -> str:
        """All replicas of the pool as one address, for `hearth.channel.open_channel`; empty when none was started."""
        return ",".join(self.address(name) for name in self.pools)

    @classmethod
    def load(cls, path: Path) -> StackRecord | None:
        """Read the record; None when there is none, or none that this version understands."""
        try:
            content: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return None
        if content.get("format") != FORMAT:
            return None
        processes = {entry["name"]: ProcessRecord(**entry) for entry in content["processes"]}
        return cls(processes, content["postgres_dsn"], content["valkey_url"], content["agents"])

    def save(self, path: Path) -> None:
        """Write the record so that a reader sees the old one or the new one, never half of it."""
        content = {
            "format": FORMAT,
            "processes": [dataclasses.asdict(record) for record in self.processes.values()],
            "postgres_dsn": self.postgres_dsn,
            "valkey_url": self.valkey_url,
            "agents": self.agents,
        }
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=2)
        os.replace(temporary, path)
