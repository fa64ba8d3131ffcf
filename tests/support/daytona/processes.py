"""The processes of one sandbox, from outside: the base, what it is made to start, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MARKER = "DAYTONA_SANDBOX_ID"
_BASE = Path(__file__).with_name("base.py")
_BIGGEST = 1 << 18
_POLL_SECONDS = 0.01
_END_SECONDS = 10.0


class Child:
    """A process that was started in a sandbox."""

    def __init__(self) -> None:
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        """Its exit code, once it has one; negative when a signal ended it."""
        return await asyncio.shield(self.code)


class Base:
    """The base process of a sandbox that runs.

    `lost` is called when it ended without being asked to; then everything else in the sandbox is dead as well.
    """

    def __init__(self, sandbox: str, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.pid = process.pid
        self.lost: Callable[[], None] = lambda: None
        self._sandbox = sandbox
        self._process = process
        self._channel = channel
        self._children: dict[int, Child] = {}
        self._next = 1
        self._ending = False
        self._gone = asyncio.Event()
        self._after: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    @classmethod
    def start(cls, sandbox: str, environment: Mapping[str, str], directory: Path) -> Base:
        """Start the base of a sandbox; `environment` holds the marker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, (directory / "base.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_BASE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                cwd=directory,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(sandbox, process, ours)

    async def spawn(
        self, argv: Sequence[str], cwd: str, environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> Child:
        """Start a process with these descriptors as 0, 1, 2 … The caller closes its own copies."""
        number, self._next = self._next, self._next + 1
        child = self._children[number] = Child()
        message = {"spawn": number, "argv": list(argv), "cwd": cwd, "env": dict(environment)}
        await self._send(message, descriptors)
        await asyncio.shield(child.pid)
        return child

    async def end(self) -> None:
        """End every process of the sandbox; return when there is none."""
        self._ending = True
        with suppress(OSError):
            await self._send({"end": True}, ())
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._gone.wait()
            await self._reap()
        except TimeoutError:
            # It is frozen or worse. Without it, orphans go to the machine's own first process.
            self._process.kill()
            await self._gone.wait()
            await self._reap()
            await end_marked(self._sandbox)

    def kill(self) -> None:
        """End the base alone, as a crash does."""
        self._process.kill()

    def reap(self) -> None:
        """End the base if it is still there, and take its exit code."""
        self._process.kill()
        self._process.wait()

    async def settle(self) -> None:
        """Wait for what follows the loss of a base."""
        if self._after is not None:
            await self._after

    async def _send(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        data = json.dumps(message).encode()
        if len(data) > _BIGGEST:
            raise OSError(f"a command of {len(data)} bytes is too long")
        while True:
            try:
                socket.send_fds(self._channel, [data], list(descriptors))
            except BlockingIOError:
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return

    def _receive(self) -> None:
        while True:
            try:
                data = self._channel.recv(_BIGGEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost_contact()
                return
            message = json.loads(data)
            if "spawned" in message:
                self._children[message["spawned"]].pid.set_result(message["pid"])
            else:
                self._children.pop(message["ended"]).code.set_result(message["code"])

    def _lost_contact(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        for child in self._children.values():
            if not child.pid.done():
                child.pid.set_exception(OSError("the sandbox ended"))
                child.pid.exception()
            child.code.set_result(-signal.SIGKILL)
        self._children.clear()
        self._gone.set()
        if not self._ending:
            self._after = asyncio.get_running_loop().create_task(self._lost())

    async def _lost(self) -> None:
        await self._reap()
        await end_marked(self._sandbox)
        self.lost()

    async def _reap(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110 - it has let go of its socket and is about to be gone
            await asyncio.sleep(_POLL_SECONDS)


async def end_marked(sandbox: str) -> None:
    """Kill what carries the marker of a sandbox, or descends from what does, until there is nothing."""
    async with asyncio.timeout(_END_SECONDS):
        while found := await asyncio.to_thread(marked, sandbox):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_POLL_SECONDS)


def marked(sandbox: str) -> set[int]:
    """The living processes of this machine with the marker of a sandbox in their environment, and those below them."""
    wanted = f"{MARKER}={sandbox}".encode()
    table = _table()
    found = {pid for pid in table if wanted in _environment(pid).split(b"\0")}
    found |= below(found, table)
    return {pid for pid in found if not table[pid][1] and pid != os.getpid()}


def below(roots: set[int], table: Mapping[int, tuple[int, bool]] | None = None) -> set[int]:
    """The descendants of processes."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in (table if table is not None else _table()).items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def _table() -> dict[int, tuple[int, bool]]:
    """Parent of each process, and whether it is dead (a zombie)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                found[int(name)] = (int(fields[1]), fields[0] in (b"Z", b"X"))
    return found


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
