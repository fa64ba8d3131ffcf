"""Child processes with everything they start: spawned with a marker, reaped, found again and killed as a whole.

A group or a session is not enough to find a tree: tools start children in sessions of their own, and those outlive
their parents. Each child therefore carries a variable in its environment that its descendants inherit, and the daemon
adopts orphans (Linux: it is a subreaper), so that a descendant that cleared its environment is still below it.
"""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

logger = logging.getLogger(__name__)

MARKER = "HEARTH_AGENTD_SERVER"
PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


class Entry(NamedTuple):
    """One living process: its parent, and its session (where that is unknown, its group)."""

    parent: int
    session: int


@dataclass(eq=False)
class Child:
    """A process this daemon started. `exited` becomes its exit code, negative for a signal."""

    popen: subprocess.Popen[bytes]
    marker: str
    exited: asyncio.Future[int]

    @property
    def pid(self) -> int:
        """The process id; only a living process when `exited` is not done."""
        return self.popen.pid


class Children:
    """All child processes of this daemon. Made inside the running event loop, once per process."""

    def __init__(self) -> None:
        self._instance = uuid4().hex
        self._count = 0
        self._running: dict[int, Child] = {}
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                logger.warning("cannot adopt orphans", extra={"errno": ctypes.get_errno()})
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        stdin: int = subprocess.PIPE,
    ) -> Child:
        """Start `command` in a session of its own, with pipes. Raises OSError (no such program, no such directory) and
        ValueError (a NUL byte in the command)."""
        self._count += 1
        marker = f"{self._instance}:{self._count}"
        popen = subprocess.Popen(
            command,
            env={**env, MARKER: marker},
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        child = Child(popen, marker, asyncio.get_running_loop().create_future())
        self._running[popen.pid] = child
        return child

    def members(self, child: Child) -> set[int]:
        """Ids of the living processes that stem from `child`, itself included."""
        table = read_table()
        ours = below(table, {os.getpid()})
        # A session id cannot be someone else's while it is looked for below this daemon only.
        roots = {pid for pid, entry in table.items() if pid in ours and entry.session == child.pid}
        needle = f"{MARKER}={child.marker}".encode()
        roots |= {pid for pid in table if pid not in roots and needle in _environment(pid).split(b"\0")}
        return (roots | below(table, roots)) - {os.getpid()}

    async def kill(self, child: Child, *, grace: float, deadline: float = 2.0) -> set[int]:
        """End the whole tree: SIGTERM to the child, up to `grace` seconds for it to go, then SIGKILL to every member
        until none is left. Returns the ids still alive after `deadline` further seconds (normally none)."""
        if not child.exited.done():
            # Not popen.send_signal: it would reap the child behind this class's back.
            os.kill(child.pid, signal.SIGTERM)
            await asyncio.wait([child.exited], timeout=grace)
        return await _kill_until_gone(lambda: self.members(child), deadline)

    async def kill_strays(self, *, deadline: float = 0.5) -> set[int]:
        """SIGKILL whatever still runs below this daemon. Returns the ids still alive after `deadline` seconds."""
        return await _kill_until_gone(lambda: below(read_table(), {os.getpid()}), deadline)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._running.pop(pid, None)
            if child is not None:
                child.popen.returncode = os.waitstatus_to_exitcode(status)
                child.exited.set_result(child.popen.returncode)


def read_table() -> dict[int, Entry]:
    """All living processes of this machine (zombies are dead)."""
    return _table_from_proc() if (PROC / "self" / "stat").exists() else table_from_ps()


def table_from_ps() -> dict[int, Entry]:
    """The same from `ps`, for systems without /proc. The group stands in for the session."""
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,pgid=,state="], stdout=subprocess.PIPE) as ps:
        output, _ = ps.communicate()
    rows = (line.split() for line in output.splitlines())
    table = {int(pid): Entry(int(parent), int(group)) for pid, parent, group, state in rows if state[:1] != b"Z"}
    table.pop(ps.pid, None)
    return table


def below(table: Mapping[int, Entry], roots: Iterable[int]) -> set[int]:
    """The ids of all descendants of `roots` in `table`, without `roots`."""
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


def _table_from_proc() -> dict[int, Entry]:
    table: dict[int, Entry] = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            try:
                stat = (PROC / name / "stat").read_bytes()
            except OSError:  # it ended since the listing
                continue
            # The program's name stands in parentheses and may itself hold blanks and parentheses.
            state, parent, _group, session, *_ = stat.rpartition(b")")[2].split()
            if state not in (b"Z", b"X"):
                table[int(name)] = Entry(int(parent), int(session))
    return table


def _environment(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # ended, another user's, or no /proc
        return b""


async def _kill_until_gone(members: Callable[[], set[int]], deadline: float) -> set[int]:
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    while alive := members():
        if loop.time() > end:
            logger.error("processes outlive SIGKILL", extra={"pids": sorted(alive)})
            return alive
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                logger.warning("not allowed to kill a process of the tree", extra={"pid": pid})
        await asyncio.sleep(_POLL_S)
    return set()
