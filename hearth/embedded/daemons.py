"""Processes that outlive the one that starts them: start, recognise, end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HOST = "127.0.0.1"
_POLL_SECONDS = 0.01
_LOG_TAIL_LINES = 15
# Of Linux; and how many of the ports below are tried.
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 12_000
_ATTEMPTS = 20

# Children of this very process, which has to collect them when they end. Dropping a Popen of a running process warns.
_children: dict[int, subprocess.Popen[bytes]] = {}


class EmbeddedError(Exception):
    """An embedded server cannot be started or stopped; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Account:
    """Who a server runs as, when that is not the user who starts it."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers on `port` of the loopback address; `url` is how a client reaches it."""

    pid: int
    port: int
    url: str


def spawn(
    command: Sequence[str | Path], *, log: Path, cwd: Path, env: Mapping[str, str], account: Account | None = None
) -> int:
    """Start `command` in a session of its own, its output appended to `log`; its pid."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
            **_identity(account),
        )
    _children[child.pid] = child
    return child.pid


def run(command: Sequence[str | Path], *, account: Account | None, env: Mapping[str, str], timeout: float = 60) -> str:
    """Run `command` to its end, output discarded; what it printed when it failed, else an empty text."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            timeout=timeout,
            check=False,
            cwd="/",
            **_identity(account),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return done.stdout.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"


def _identity(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def alive(pid: int) -> bool:
    """Whether `pid` runs; a dead process that nobody has collected does not."""
    child = _children.get(pid)
    try:
        dead = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        dead = True
    if dead and child is not None:
        child.wait()
        del _children[pid]
    return not dead


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait until `pid` runs no more; False when it still does after `seconds`."""
    ends = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() >= ends:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def end(pid: int, steps: Sequence[tuple[signal.Signals, float]]) -> bool:
    """Send each signal in turn and give the process its seconds; whether it is gone in the end."""
    for number, seconds in steps:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return wait_gone(pid, seconds)
        if wait_gone(pid, seconds):
            return True
    return False


def working_in(directory: Path, name: str) -> list[int]:
    """Pids of the processes called `name` whose working directory is `directory`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith(name) and process.cwd() == str(directory):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def free_port() -> int:
    """A TCP port that nobody listens on now; where the system tells, one that it gives to nobody who asks for any.

    Between this call and the start of the server that is to listen there, another one could get it else.
    """
    with socket.socket() as probe:
        for port in (*random.sample(_quiet_ports(), _ATTEMPTS), 0):
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                break
        found: int = probe.getsockname()[1]
        return found


def _quiet_ports() -> range:
    """Ports below those that the system hands out."""
    try:
        lowest = int(_HANDED_OUT.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 0
    return range(_LOWEST_PORT, max(lowest, _LOWEST_PORT + _ATTEMPTS))


def port_taken(port: int) -> bool:
    """Whether somebody listens on `port` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def tail(log: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(lines[-_LOG_TAIL_LINES:])


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory` for one starter or stopper at a time, across processes."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
