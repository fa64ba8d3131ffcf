"""What the embedded stack remembers of itself between two commands, and whether that is still true.

The record is one JSON file. A process counts as ours only if its pid *and* its start time are the recorded ones, so a
pid that the system gave to somebody else is never touched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hearth.secret import NO_SECRET, Secret
from hearth.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, SERVER_NAME, Tls

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


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """What the services of a stack speak TLS with: absolute paths of PEM files. `certificate` and `key` are for them
    and for who calls them; with `client_ca` callers must show one that it signed."""

    ca: str
    certificate: str
    key: str
    client_ca: str = ""
    server_name: str = ""

    @classmethod
    def below(cls, root: Path, *, ask_callers: bool) -> TlsFiles:
        """Those that a stack makes for itself, see `hearth.embedded.certificates`."""
        directory = root / "tls"
        ca = str(directory / "ca.pem")
        return cls(ca, str(directory / "stack.pem"), str(directory / "stack.key"), ca if ask_callers else "")

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> TlsFiles | None:
        """Those that the environment gives to services; None when it gives them no certificate."""
        names = ("CA_FILE", "CERTIFICATE_FILE", "KEY_FILE", "CLIENT_CA_FILE")
        files = [environment.get(f"HEARTH_TLS_{name}", "") for name in names]
        if not files[1]:
            return None
        ca, certificate, key, client_ca = (str(Path(file).absolute()) if file else "" for file in files)
        return cls(ca, certificate, key, client_ca, environment.get(SERVER_NAME, ""))

    def environment(self) -> dict[str, str]:
        """The settings of a service."""
        return {
            CA_FILE: self.ca,
            CERTIFICATE_FILE: self.certificate,
            KEY_FILE: self.key,
            "HEARTH_TLS_CLIENT_CA_FILE": self.client_ca,
            SERVER_NAME: self.server_name,
        }

    def caller_environment(self) -> dict[str, str]:
        """What tells a program how to call them, see `Tls.from_environment`."""
        given = {CA_FILE: self.ca, SERVER_NAME: self.server_name}
        if self.client_ca:
            given |= {CERTIFICATE_FILE: self.certificate, KEY_FILE: self.key}
        return {name: value for name, value in given.items() if value}

    def read(self) -> Tls:
        """How to call the services; raises `TlsError`."""
        found = Tls.from_environment(self.caller_environment())
        assert found is not None
        return found


@dataclasses.dataclass(slots=True)
class StackRecord:
    """A stack as it was started: its processes by name, how to reach its stores, and how its services speak TLS."""

    processes: dict[str, ProcessRecord] = dataclasses.field(default_factory=dict)
    postgres_dsn: Secret = NO_SECRET
    valkey_url: Secret = NO_SECRET
    agents: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    tls: TlsFiles | None = None

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
        tls = TlsFiles(**content["tls"]) if content.get("tls") else None
        return cls(processes, Secret(content["postgres_dsn"]), Secret(content["valkey_url"]), content["agents"], tls)

    def save(self, path: Path) -> None:
        """Write the record so that a reader sees the old one or the new one, never half of it."""
        content = {
            "format": FORMAT,
            "processes": [dataclasses.asdict(record) for record in self.processes.values()],
            "postgres_dsn": self.postgres_dsn.reveal(),
            "valkey_url": self.valkey_url.reveal(),
            "agents": self.agents,
            "tls": dataclasses.asdict(self.tls) if self.tls is not None else None,
        }
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=2)
        os.replace(temporary, path)
