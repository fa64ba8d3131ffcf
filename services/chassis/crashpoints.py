"""Named points at which a test can make a process die or freeze, to see what the next one makes of what is left.

A module declares the points of its service and passes them where an await leaves something half done:

    crashpoint = crashpoints.declare("sandbox", "acquire.intent_written", "acquire.created")
    ...
    crashpoint("acquire.intent_written")

They are off unless `HEARTH_CRASH_POINT` is set when the process starts, and a point that is off is one comparison. Its
form is `NAME[@N][=kill|=stop]`, several separated by commas: at the N-th passage (default: the first) the process gets
SIGKILL (default) or SIGSTOP. What happened is on stderr, so that a test can tell it from any other end.

`@/PATH` takes the points from that file, which is looked at at every passage: so a test can aim at a process that has
been running for a while. No file is none of them; one that was replaced counts passages from then on.

`declared` lists the points of a service once its modules are imported; a test that walks over them fails for one that
it cannot reach.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

from services.chassis.settings import EXIT_USAGE, StartupError

logger = logging.getLogger(__name__)

VARIABLE = "HEARTH_CRASH_POINT"

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class _Armed:
    """What this process shall do, by the name of the point: at which passage, by which signal."""

    def __init__(self, plan: dict[str, tuple[int, signal.Signals]]) -> None:
        self._plan = plan
        self.names = sorted(plan)
        self._passed: dict[str, int] = {}

    def pass_by(self, name: str) -> None:
        if name not in self._plan:
            return
        wanted, number = self._plan[name]
        self._passed[name] = passed = self._passed.get(name, 0) + 1
        if passed == wanted:
            # Straight to the descriptor: nothing buffered would outlive the signal.
            os.write(2, f"crash point reached: {name} ({number.name})\n".encode())
            os.kill(os.getpid(), number)


class _Aimed(_Armed):
    """The same by a file that changes."""

    def __init__(self, path: str) -> None:
        super().__init__({})
        self._path = path
        self._version: tuple[int, int] | None = None

    def pass_by(self, name: str) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                text = file.read()
        except FileNotFoundError:
            self._version = None
            return
        version = (found.st_ino, found.st_mtime_ns)
        if version != self._version:
            self._version, self._plan, self._passed = version, parse(text), {}
        super().pass_by(name)


def parse(text: str) -> dict[str, tuple[int, signal.Signals]]:
    """Points by name: the passage that counts, the signal. Raises ValueError for what has another form."""
    plan = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        rest, _, action = part.partition("=")
        name, _, count = rest.partition("@")
        if not name or (count and not count.isdigit()) or count == "0" or (action or "kill") not in _SIGNALS:
            raise ValueError(f"{VARIABLE}: {part!r} is not NAME[@N][=kill|=stop]")
        plan[name] = (int(count or 1), _SIGNALS[action or "kill"])
    return plan


_declared: dict[str, dict[str, None]] = {}


def _from_environment(text: str) -> _Armed | None:
    if text.startswith("@/"):
        return _Aimed(text.removeprefix("@"))
    return _Armed(parse(text)) if text else None


_armed = _from_environment(os.environ.get(VARIABLE, ""))


def declare(service: str, *names: str) -> Callable[[str], None]:
    """Declare points of a service, each unique in it; what passes by them. An undeclared name raises KeyError.

    The whole name of a point, as in the variable, is `service.name`.
    """
    points = _declared.setdefault(service, {})
    taken = [name for name in names if name in points]
    if taken or len(set(names)) != len(names):
        raise ValueError(f"crash points declared twice in {service}: {', '.join(taken or names)}")
    points.update(dict.fromkeys(names))
    mine = {name: f"{service}.{name}" for name in names}

    def crashpoint(name: str) -> None:
        whole = mine[name]
        if _armed is not None:
            _armed.pass_by(whole)

    return crashpoint


def declared(service: str) -> tuple[str, ...]:
    """The whole names of a service's points, as far as its modules are imported, in the order of declaration."""
    return tuple(f"{service}.{name}" for name in _declared.get(service, ()))


def announce(service: str) -> None:
    """Say what this process was told to die or freeze at; for the start of `service`, when its modules are imported.

    Raises `StartupError` for a point of this service that none of them declares: it would never be reached.
    """
    if _armed is None:
        return
    unknown = [name for name in _armed.names if name.startswith(f"{service}.") and name not in declared(service)]
    if unknown:
        raise StartupError(f"{VARIABLE}: there is no point {', '.join(unknown)}", exit_code=EXIT_USAGE)
    logger.warning("crash points are armed, this process will die at one", extra={"points": _armed.names})
