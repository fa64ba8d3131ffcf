"""What Daytona says of a sandbox, and what that means here: decisions over values.

A sandbox has a state and a desired state; the two differ while something is under way or was lost. Only `stopped` that
is also wanted stopped is stopped, and a state that this version does not know is unknown, never stopped.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from services.sandbox.providers.daytona_values import ATTEMPT_LABEL, Network, Seen
from services.sandbox.providers.port import Instance, InstanceState

# Labels of ours and of the SDK that are no business of whoever asked for labels.
_HIDDEN = frozenset({ATTEMPT_LABEL, "code-toolbox-language"})

_STATES: Mapping[str, InstanceState] = {
    "creating": InstanceState.CREATING,
    "pending_build": InstanceState.CREATING,
    "building_snapshot": InstanceState.CREATING,
    "pulling_snapshot": InstanceState.CREATING,
    "forking": InstanceState.CREATING,
    "restoring": InstanceState.STARTING,
    "starting": InstanceState.STARTING,
    "resuming": InstanceState.STARTING,
    "started": InstanceState.RUNNING,
    "stopping": InstanceState.STOPPING,
    "pausing": InstanceState.STOPPING,
    "stopped": InstanceState.STOPPED,
    "archiving": InstanceState.STOPPED,
    "archived": InstanceState.STOPPED,
    "destroying": InstanceState.DELETING,
    "error": InstanceState.ERROR,
    "build_failed": InstanceState.ERROR,
}
# Where it can be started from. A paused one keeps its memory, so it is not stopped; it comes back as if it were.
_AT_REST = frozenset({"stopped", "archiving", "archived", "paused"})
_BROKEN = frozenset({"error", "build_failed"})


class Step(enum.Enum):
    """What to do next to get an instance into a state."""

    DONE = "done"
    ASK = "ask"
    WAIT = "wait"
    BROKEN = "broken"
    GONE = "gone"


def instance_state(seen: Seen) -> InstanceState:
    """The state in our words. A change that is wanted and did not begin yet counts as begun."""
    state = _STATES.get(seen.state, InstanceState.UNKNOWN)
    if seen.desired == "destroyed" and state is not InstanceState.ERROR:
        return InstanceState.DELETING
    if state is InstanceState.RUNNING and seen.desired in ("stopped", "archived", "paused"):
        return InstanceState.STOPPING
    if state is InstanceState.STOPPED and seen.desired == "started":
        return InstanceState.STARTING
    return state


def to_start(seen: Seen) -> Step:
    """The next step towards running."""
    if seen.destroyed:
        return Step.GONE
    if seen.state in _BROKEN:
        return Step.BROKEN
    if seen.desired == "destroyed" or seen.state == "destroying":
        return Step.WAIT
    if seen.state == "started" and seen.desired in ("", "started"):
        return Step.DONE
    if seen.state in _AT_REST and seen.desired != "started":
        return Step.ASK
    return Step.WAIT


def to_stop(seen: Seen) -> Step:
    """The next step towards stopped."""
    if seen.destroyed:
        return Step.GONE
    if seen.state in _BROKEN:
        return Step.BROKEN
    if instance_state(seen) is InstanceState.STOPPED:
        return Step.DONE
    if seen.state in ("started", "paused") and seen.desired in ("", seen.state):
        return Step.ASK
    return Step.WAIT


def detail(seen: Seen) -> str:
    """What an operator wants to read beside the state."""
    state = instance_state(seen)
    if state is InstanceState.ERROR:
        return seen.reason or seen.state
    return seen.state if state is InstanceState.UNKNOWN or seen.state in ("archiving", "archived") else ""


def to_instance(seen: Seen, now: datetime) -> Instance:
    """The instance of the port; `now` is aware."""
    labels = {name: value for name, value in seen.labels.items() if name not in _HIDDEN}
    return Instance(seen.id, seen.name, instance_state(seen), labels, age(seen.created_at, now), detail(seen))


def age(created_at: str, now: datetime) -> float:
    """Seconds since an ISO 8601 time; 0 for one that is in the future or cannot be read, so that what it is about
    counts as young."""
    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return 0.0
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    return max(0.0, (now - created).total_seconds())


def wanted_network(mode: str, allow: Sequence[str]) -> Network | None:
    """The policy of `Spec.network`; None leaves the choice to the provider. An allow list of nothing blocks all."""
    addresses = _addresses(allow)
    if mode == "OPEN":
        return Network(block_all=False)
    if mode == "BLOCKED" or (mode == "ALLOW_LIST" and not addresses):
        return Network(block_all=True)
    return Network(block_all=False, allow=addresses) if mode == "ALLOW_LIST" else None


def shown_network(seen: Seen) -> Network | None:
    """The policy that an instance has; None where it was not told."""
    if seen.block_all is None:
        return None
    if seen.block_all:
        return Network(block_all=True)
    return Network(block_all=False, allow=_addresses((seen.allow or "").split(",")))


def _addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """Order and blanks do not matter."""
    return tuple(sorted({text.strip() for text in texts if text.strip()}))
