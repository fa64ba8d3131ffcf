"""The base process of a sandbox: starts what it is told to, takes in orphans, ends them all. Run as a program.

It is to a sandbox what pid 1 and the toolbox are to a real one. Messages are JSON over a sequenced-packet socket whose
descriptor is the first argument:

    → {"spawn": n, "argv": [..], "cwd": "..", "env": {..}}  with descriptors for stdin, stdout, stderr and the rest
    ← {"spawned": n, "pid": p}                              then  {"ended": n, "code": c}; c < 0: ended by signal -c
    → {"end": true}                                         kill every descendant, then exit

When the other side goes away it ends everything too, so that no sandbox outlives its stand-in. Only modules that a
bare interpreter has loaded anyway or loads fast: one of these starts with every sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys

_PR_SET_CHILD_SUBREAPER = 36
_BIGGEST = 1 << 18
_POLL_SECONDS = 0.005


def main() -> None:
    """Serve until told to end or until the other side is gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if channel.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, _BIGGEST, 16)
            message = json.loads(data) if data else {"end": True}
            if message.get("end"):
                break
            pid = _spawn(message, descriptors)
            numbers[pid] = message["spawn"]
            channel.send(json.dumps({"spawned": message["spawn"], "pid": pid}).encode())
        for pid, code in _reap():
            if pid in numbers:
                channel.send(json.dumps({"ended": numbers.pop(pid), "code": code}).encode())
    _end_all()


def _spawn(message: dict[str, object], descriptors: list[int]) -> int:
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # First out of the way of the numbers they shall have, then to them; no other copy may outlive the exec.
        high = [_above(descriptor, len(descriptors) + 10) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number)
        argv = [str(part) for part in message["argv"]]  # type: ignore[attr-defined]
        environment: dict[str, str] = message["env"]  # type: ignore[assignment]
        os.chdir(str(message["cwd"]))
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:  # noqa: BLE001 - this is the child; nothing of it may return
        os.write(2, f"{error}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _above(descriptor: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)


def _reap() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _end_all() -> None:
    """Kill until there is no child left: what a killed one leaves behind becomes a child of this process."""
    while True:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return
        select.select([], [], [], _POLL_SECONDS)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    main()
