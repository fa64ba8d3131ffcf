"""Which call is allowed in which state, and what is wrong with a request. Values in, refusals out."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tests.support.daytona.problems import Problem, bad, conflict

ERRORED = frozenset({"error", "build_failed"})
STARTABLE = frozenset({"stopped", "archived", "archiving", "paused"})
STOPPABLE = frozenset({"started", "paused"})
# States in which processor and memory are charged. In `error` and `destroying` it depends on whether it still runs.
CHARGED = frozenset({"creating", "restoring", "started", "starting", "stopping", "resizing", "unknown"})
_FORBIDDEN_MOUNTS = ("/proc", "/sys", "/dev", "/boot", "/etc", "/bin", "/sbin", "/lib", "/lib64")
_MOST_ALLOWED = 10


@dataclass(frozen=True, slots=True)
class Standing:
    """What the rules look at."""

    state: str
    desired: str
    pending: bool
    ephemeral: bool = False
    recoverable: bool = False

    @property
    def changing(self) -> bool:
        return self.pending or self.state != self.desired


def check_start(now: Standing) -> None:
    """Refuse a start that is not allowed."""
    _check_errored(now)
    if now.changing and now.state != "archiving":
        raise _in_progress()
    if now.state not in STARTABLE:
        raise bad("Sandbox is not in valid state")


def check_stop(now: Standing) -> None:
    """Refuse a stop that is not allowed."""
    _check_errored(now)
    if now.changing:
        raise _in_progress()
    if now.state not in STOPPABLE:
        raise bad("Sandbox is not in a stoppable state")


def check_archive(now: Standing) -> None:
    """Refuse an archive that is not allowed."""
    _check_errored(now)
    if now.changing:
        raise _in_progress()
    if now.state != "stopped":
        raise bad("Sandbox is not stopped")
    if now.ephemeral:
        raise bad("Ephemeral sandboxes cannot be archived")


def check_recover(now: Standing) -> None:
    """Refuse a recovery that is not allowed."""
    if now.pending:
        raise _in_progress()
    if now.state != "error":
        raise bad("Sandbox must be in error state to recover")
    if not now.recoverable:
        raise bad("Sandbox is not recoverable")


def check_delete(now: Standing) -> None:
    """Refuse a deletion that is not allowed."""
    if now.pending:
        raise _in_progress()


def check_resize(now: Standing) -> None:
    """Refuse a change of resources that is not allowed."""
    _check_errored(now)
    if now.changing:
        raise _in_progress()
    if now.state not in ("started", "stopped"):
        raise bad("Sandbox is not in a valid state for resize")


def check_mount_path(path: str) -> None:
    """Refuse a mount path that the real server refuses."""
    if not path.startswith("/"):
        raise bad(f"Invalid mount path {path} (must be absolute)")
    if path in ("/", "//"):
        raise bad(f"Invalid mount path {path} (cannot mount to the root directory)")
    if "/../" in path or "/./" in path or path.endswith(("/..", "/.")):
        raise bad(f"Invalid mount path {path} (cannot contain relative path components)")
    if "//" in path[1:]:
        raise bad(f"Invalid mount path {path} (cannot contain consecutive slashes)")
    if any(path == forbidden or path.startswith(f"{forbidden}/") for forbidden in _FORBIDDEN_MOUNTS):
        raise bad(f"Invalid mount path {path} (cannot mount to system directory)")


def check_subpath(subpath: str) -> None:
    """Refuse a subpath that leaves the volume."""
    if subpath.startswith("/") or "//" in subpath or any(part in ("..", ".") for part in subpath.split("/")):
        raise bad(f'Invalid subpath "{subpath}"')


def check_allow_list(text: str) -> None:
    """Refuse an allow list that is not made of a few IPv4 networks."""
    networks = [part.strip() for part in text.split(",") if part.strip()]
    if len(networks) > _MOST_ALLOWED:
        raise bad(f"Network allow list cannot contain more than {_MOST_ALLOWED} networks")
    for network in networks:
        try:
            if "/" not in network:
                raise ValueError("no prefix length")
            ipaddress.IPv4Network(network, strict=False)
        except ValueError:
            raise bad(f'Invalid CIDR block: "{network}"') from None


def _check_errored(now: Standing) -> None:
    if now.state in ERRORED:
        raise bad("Sandbox is in an errored state")


def _in_progress() -> Problem:
    return conflict("Sandbox state change in progress")
