"""agentd under a witness: what it proves of S1 comes from the kernel, not from rows.

Before it serves, it takes a lock on a file of its session, which the kernel lets go when the process is gone and not
before. A second daemon of the session that is there at the same time cannot take it, and writes that down. So of two
daemons of one session it is known for sure whether they lived at once, also when nobody was looking.

`HEARTH_LOCAL_DAEMON` names this module, `WITNESS` (inherited by `HEARTH_LOCAL_INHERIT`) the directory of locks and log.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

VARIABLE = "WITNESS"


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that was started: for which session (its HOME), in which sandbox; `second`: while another one lived."""

    home: str
    sandbox_id: str
    pid: int
    at: float
    second: bool


class Witness:
    """What was seen of all daemons that wrote into `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def environment(self) -> dict[str, str]:
        """For the service whose sandboxes are to be witnessed; its `HEARTH_LOCAL_INHERIT` must name the variable."""
        return {
            VARIABLE: str(self.directory),
            "HEARTH_LOCAL_DAEMON": json.dumps([sys.executable, "-P", "-m", "tests.support.witnessed_agentd"]),
        }

    def started(self) -> list[Started]:
        """All daemons, in the order in which they came."""
        log = self.directory / "log"
        if not log.exists():
            return []
        return [Started(**json.loads(line)) for line in log.read_text().splitlines()]

    def alive(self) -> list[Started]:
        """Those that live now."""
        return [
            one
            for path in self.directory.glob("*.lock")
            if (one := _holder(path, {found.pid: found for found in self.started()})) is not None
        ]

    def check(self) -> None:
        """S1 over everything that happened: no daemon was started while another one of its session lived."""
        assert [one for one in self.started() if one.second] == []


def _holder(path: Path, started: dict[int, Started]) -> Started | None:
    """Who holds a lock; it wrote its process id into the file."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return started.get(int(file.read() or 0))
    return None


def testify(directory: Path) -> None:
    """Take the session's lock for the rest of this process's life, or write down that another daemon has it."""
    home = os.environ["HOME"]
    descriptor = os.open(directory / f"{sha256(home.encode()).hexdigest()[:32]}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    second = not _lock(descriptor)
    if not second:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    line = {
        "home": home,
        "sandbox_id": os.environ["HEARTH_SANDBOX_ID"],
        "pid": os.getpid(),
        "at": time.monotonic(),
        "second": second,
    }
    log = os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, json.dumps(line).encode() + b"\n")
    os.fsync(log)
    os.close(log)


def _lock(descriptor: int) -> bool:
    # A look of the test takes the lock for a moment too; a daemon that lives holds it for longer.
    ends = time.monotonic() + 0.5
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        else:
            return True


def main() -> None:
    """Testify, then be agentd."""
    testify(Path(os.environ[VARIABLE]))
    sys.argv[0] = "agentd"
    runpy.run_module("services.sandbox.agentd", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
