"""What is written down of a local sandbox: `state.json` in its directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.sandbox.providers.files import write_private
from services.sandbox.providers.port import InstanceNotFound, ProviderError
from services.sandbox.providers.processes import Process


class StateUnreadable(ProviderError):
    """There is a sandbox, and what was written down of it says nothing, as after a crash of the machine."""


@dataclass(frozen=True, slots=True)
class State:
    """What state.json holds. `created` is wall time in seconds; `daemon` is absent where none was started."""

    labels: Mapping[str, str]
    project: str
    session: str
    created: float
    stopped: bool = False
    daemon_pid: int = 0
    daemon_started: str = ""
    port: int = 0
    # Files below HOME that must not outlive the daemon.
    logins: Sequence[str] = ()

    @property
    def daemon(self) -> Process | None:
        return Process(self.daemon_pid, self.daemon_started) if self.daemon_pid else None

    @classmethod
    def read(cls, directory: Path) -> State | None:
        """None where there is no sandbox. Raises `StateUnreadable`."""
        try:
            return cls(**json.loads((directory / "state.json").read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise StateUnreadable(f"state.json of {directory} cannot be read: {error}") from None

    def write(self, directory: Path) -> None:
        """In one piece, for this user only. Raises `InstanceNotFound` where the directory is gone."""
        try:
            write_private(directory / "state.json", json.dumps(asdict(self)))
        except FileNotFoundError:
            raise InstanceNotFound(f"there is no sandbox in {directory}") from None
