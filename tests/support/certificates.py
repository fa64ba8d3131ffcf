"""Certificates for tests: an authority, and what it signs, as files."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hearth.certificates import Authority, write_pair

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate and its key."""

    certificate: Path
    key: Path


@dataclass(slots=True)
class Certificates:
    """An authority below a directory that exists."""

    directory: Path
    authority: Authority = field(default_factory=lambda: Authority.create("tests", datetime.now(UTC)))

    def __post_init__(self) -> None:
        self.authority.write(self.ca, self.directory / "ca.key")

    @property
    def ca(self) -> Path:
        """Its root certificate."""
        return self.directory / "ca.pem"

    def issue(self, name: str, *, hosts: tuple[str, ...] = HOSTS, days: float = 2) -> Files:
        """A certificate called `name`, in the place of a former one of that name."""
        files = Files(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        pair = self.authority.issue(name, hosts, datetime.now(UTC), timedelta(days=days))
        write_pair(pair, files.certificate, files.key)
        return files
