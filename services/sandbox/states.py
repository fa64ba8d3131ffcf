"""What a sandbox can be, which changes are legal, and what a reason for giving it back means."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Observed(enum.StrEnum):
    """What a sandbox was last seen to be, or is being made."""

    CREATING = "CREATING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    DELETING = "DELETING"
    GONE = "GONE"
    ERROR = "ERROR"
    UNKNOWN = "UNKNOWN"


class Desired(enum.StrEnum):
    """What the service wants a sandbox to be."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    GONE = "GONE"


class Tenure(enum.StrEnum):
    """What a sandbox is used for."""

    ACTIVE = "ACTIVE"
    PARKED = "PARKED"
    FREE = "FREE"
    ORPHAN = "ORPHAN"


class How(enum.StrEnum):
    """How an Acquire got its sandbox."""

    ATTACHED = "ATTACHED"
    RESTARTED = "RESTARTED"
    CREATED = "CREATED"


class Disposition(enum.StrEnum):
    """What was done to a sandbox that was given back."""

    PARKED = "PARKED"
    STOPPED = "STOPPED"
    DELETED = "DELETED"
    ORPHANED = "ORPHANED"
    NOTHING = "NOTHING"


class IllegalChange(Exception):
    """A change of state that the table does not have: a defect of ours."""


_ANYTHING_SEEN: Final = frozenset(
    {Observed.RUNNING, Observed.STOPPED, Observed.GONE, Observed.ERROR, Observed.UNKNOWN, Observed.DELETING}
)

# From what is observed now to what may be written next, staying as it is included. An instance may be found in any
# state whatever was last written, so what was seen is legal everywhere; what we set out to do is not.
_LEGAL: Final[Mapping[Observed, frozenset[Observed]]] = {
    Observed.CREATING: _ANYTHING_SEEN | {Observed.CREATING, Observed.STARTING},
    Observed.STARTING: _ANYTHING_SEEN | {Observed.STARTING, Observed.STOPPING},
    Observed.RUNNING: _ANYTHING_SEEN | {Observed.STARTING, Observed.STOPPING},
    Observed.STOPPING: _ANYTHING_SEEN | {Observed.STOPPING},
    # It may be found running though it was stopped, and is then stopped again.
    Observed.STOPPED: _ANYTHING_SEEN | {Observed.STARTING, Observed.STOPPING},
    Observed.DELETING: _ANYTHING_SEEN,
    Observed.ERROR: _ANYTHING_SEEN,
    Observed.UNKNOWN: _ANYTHING_SEEN | {Observed.STOPPING},
    # Seen gone is the end; a new instance gets a new row.
    Observed.GONE: frozenset({Observed.GONE}),
}


def legal(before: Observed, after: Observed) -> bool:
    """Whether a row may go from `before` to `after`."""
    return after in _LEGAL[before]


def check(before: Observed, after: Observed) -> None:
    """Raise `IllegalChange` unless `legal`."""
    if not legal(before, after):
        raise IllegalChange(f"a sandbox cannot go from {before} to {after}")


class Fate(enum.Enum):
    """What a release asks for."""

    PARK = "park"
    STOP = "stop"
    DELETE = "delete"


# By the names of hearth.sandbox.v1.ReleaseReason without its prefix. What is not here deletes: a reason that this
# version does not know may say that the sandbox must not be used again.
_FATES: Final[Mapping[str, Fate]] = {
    "CLEAN_TURN": Fate.PARK,
    "STOPPED_WARM": Fate.PARK,
    "IDLE_EXPIRED": Fate.STOP,
    "CAPACITY": Fate.STOP,
    "SHUTDOWN_IDLE": Fate.STOP,
    "SESSION_INCOMPATIBLE": Fate.STOP,
    "CONTINUITY_INVALID": Fate.STOP,
    "KILLED": Fate.DELETE,
    "FAILED_TURN": Fate.DELETE,
    "ABORTED": Fate.DELETE,
    "RUNTIME_INCOMPATIBLE": Fate.DELETE,
    "SANDBOX_INCOMPATIBLE": Fate.DELETE,
    "SHUTDOWN_IN_FLIGHT": Fate.DELETE,
    "LOST": Fate.DELETE,
}


def fate(reason: str, *, park_running: bool, park_stopped: bool) -> Fate:
    """What `reason` asks for where the two tiers are on or off: parked → stopped → deleted, each if the tier is on."""
    wanted = _FATES.get(reason, Fate.DELETE)
    if wanted is Fate.PARK and not park_running:
        wanted = Fate.STOP
    if wanted is Fate.STOP and not park_stopped:
        wanted = Fate.DELETE
    return wanted
