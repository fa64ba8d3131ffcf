"""Finding and ending all processes of a local sandbox.

They are found by a variable in their environment, which descendants inherit also into sessions and groups of their own,
and by descent from such a process, which finds those that cleared their environment. A process id alone says nothing,
because ids are used again: a process is an id with the time it started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from services.chassis.clock import Clock
from services.sandbox.providers.port import StillAlive

logger = logging.getLogger(__name__)

MARKER = "HEARTH_SANDBOX_ID"
_PROC = Path("/proc")
_POLL_SECONDS = 0.01
_KILL_SECONDS = 5.0


class Process(NamedTuple):
    """A process of this machine. `started` is opaque; equal only for the same process."""

    pid: int
    started: str


class _Entry(NamedTuple):
    parent: int
    started: str
    dead: bool


def identify(pid: int) -> Process | None:
    """The living process `pid`; None when there is none (a zombie is dead)."""
    entry = _entry(pid)
    return Process(pid, entry.started) if entry is not None and not entry.dead else None


def alive(process: Process) -> bool:
    """Whether this very process still lives."""
    return identify(process.pid) == process


def members(sandbox_id: str) -> set[Process]:
    """The living processes of a sandbox. Never this process itself."""
    table = _table()
    wanted = f"{MARKER}={sandbox_id}".encode()
    roots = {pid for pid in table if wanted in _environment(pid).split(b"\0")}
    found = roots | _below(table, roots)
    return {Process(pid, table[pid].started) for pid in found if pid != os.getpid() and not table[pid].dead}


async def end(
    sandbox_id: str,
    daemon: Process | None,
    *,
    grace: float,
    clock: Clock,
    before_kill: Callable[[], None] = lambda: None,
) -> None:
    """End every process of the sandbox; return when a listing finds none. `before_kill` may raise to keep them alive.

    The daemon is asked first and has `grace` seconds to end its agents in order. What is left then is killed, the
    daemon last and frozen until then: orphans become its children, so while it is there nothing can leave the tree,
    and frozen it starts nothing new. Raises `StillAlive`.
    """
    if daemon is not None and grace > 0 and _send(daemon, signal.SIGTERM):
        until = clock.monotonic() + grace
        while alive(daemon) and clock.monotonic() < until:
            await clock.sleep(_POLL_SECONDS)
    if daemon is not None:
        _send(daemon, signal.SIGSTOP)
    until = clock.monotonic() + _KILL_SECONDS
    while found := await asyncio.to_thread(members, sandbox_id):
        if clock.monotonic() > until:
            pids = sorted(process.pid for process in found)
            logger.error("processes outlive SIGKILL", extra={"sandbox_id": sandbox_id, "pids": pids})
            raise StillAlive(f"processes still alive: {', '.join(map(str, pids))}")
        before_kill()
        others = found - {daemon} if daemon is not None else found
        for process in others or found:
            _send(process, signal.SIGKILL)
        await clock.sleep(_POLL_SECONDS)


def _send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this very process; False when it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except AttributeError:  # not Linux
        if not alive(process):
            return False
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return True
    except ProcessLookupError:
        return False
    try:
        # The handle keeps to whatever had the id when it was opened, so it is compared after that.
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        logger.warning("not allowed to signal a process of a sandbox", extra={"pid": process.pid})
    finally:
        os.close(handle)
    return True


def _below(table: Mapping[int, _Entry], roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def _table() -> dict[int, _Entry]:
    pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()] if _has_proc() else psutil.pids()
    found = ((pid, _entry(pid)) for pid in pids)
    return {pid: entry for pid, entry in found if entry is not None}


def _has_proc() -> bool:
    return (_PROC / "self" / "stat").exists()


def _entry(pid: int) -> _Entry | None:
    if not _has_proc():
        return _entry_by_psutil(pid)
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The program's name stands in parentheses and may itself hold blanks and parentheses.
    fields = stat.rpartition(b")")[2].split()
    # Field 22 of proc(5) counts clock ticks since boot, so it is unique together with the boot.
    return _Entry(int(fields[1]), f"{_boot()}/{int(fields[19])}", fields[0] in (b"Z", b"X"))


def _entry_by_psutil(pid: int) -> _Entry | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return _Entry(process.ppid(), f"{process.create_time():.3f}", dead)
    except psutil.Error:
        return None


def _environment(pid: int) -> bytes:
    try:
        if _has_proc():
            return (_PROC / str(pid) / "environ").read_bytes()
        return b"\0".join(f"{name}={value}".encode() for name, value in psutil.Process(pid).environ().items())
    except (OSError, psutil.Error):  # it ended, or is another user's
        return b""


class _Boot:
    """Which boot of the machine this is; read once, it cannot change under a running process."""

    id = ""


def _boot() -> str:
    if not _Boot.id:
        try:
            _Boot.id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            _Boot.id = "unknown"
    return _Boot.id
