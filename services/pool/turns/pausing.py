"""When a turn that waits for people is paused, and why. Pure; times are seconds on one monotonic clock."""

from __future__ import annotations

import dataclasses
from enum import Enum

# An agent that says nothing for so long has asked all that it asks at once; one that talks on is waited for a while.
QUIET = 0.1
QUIET_AT_MOST = 2.0


class Why(Enum):
    """Why a turn that waits for people is paused."""

    WINDOW = "it waited long enough"
    ROOM = "too many wait"
    LEAVING = "the process ends"


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """A turn is paused: its entry is DRAINING, and these interactions are open."""

    why: Why
    interaction_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """How a turn stands that waits for people.

    `asked_at`: when it asked last, or used an answer. `heard_at`: when its agent sent something last. `leaving_at`:
    when its process began to end, `now_or_never`: and that is all but over. `has_place`: it may wait with a live agent.
    `working`: a call runs that somebody has allowed.
    """

    asked_at: float
    heard_at: float
    leaving_at: float | None = None
    now_or_never: bool = False
    has_place: bool = True
    working: bool = False


def pause_at(standing: Standing, *, window: float, tool_call_limit: float) -> tuple[Why, float]:
    """Why such a turn is paused next, and when: `window` seconds after the last question or answer, or at once.

    What was allowed before may still give its result, which nobody would ever know otherwise, and what an agent asks
    for at the same time is asked together.
    """
    if standing.leaving_at is not None:
        why, since = Why.LEAVING, max(standing.leaving_at, standing.asked_at)
    elif not standing.has_place:
        why, since = Why.ROOM, standing.asked_at
    else:
        why, since = Why.WINDOW, standing.asked_at + window
    if standing.now_or_never:
        return why, since
    if standing.working:
        return why, since + tool_call_limit
    return why, min(max(since, standing.heard_at + QUIET), since + QUIET_AT_MOST)
