"""What the reconciler does about the difference between rows and instances: a decision over both lists.

Rows win over labels: an instance is ours to judge by its row, and only one without any row is judged by its label.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from services.sandbox.providers.port import Instance, InstanceState
from services.sandbox.rows import Row
from services.sandbox.states import Desired, Observed, Tenure


class Mend(enum.Enum):
    """What to do about one row."""

    NOTHING = "nothing"
    # Its worker is dead: look, then end it.
    TAKE_OVER = "take_over"
    # It should be gone: delete, again.
    DELETE = "delete"
    # It runs and should not.
    STOP = "stop"
    # It stopped by itself.
    NOTE_STOPPED = "note_stopped"
    # It is not listed; only the provider's own "not found" proves that it is gone.
    LOOK = "look"


@dataclass(frozen=True, slots=True)
class Limits:
    """When an instance without a row counts as unknown (seconds since its creation: a create may be under way), and how
    many may be deleted without asking: the larger of a number and a share of all instances listed."""

    young: float = 120.0
    most_unknown: int = 5
    share_unknown: float = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass over one provider does. `refused`: too many are unknown, so something is wrong with the rows or
    the label, and none of them is touched."""

    mends: tuple[tuple[Row, Mend], ...]
    unknown: tuple[Instance, ...]
    refused: bool


def compare(rows: Sequence[Row], instances: Sequence[Instance], limits: Limits, *, confirmed: bool) -> Plan:
    """`rows` must have been read before `instances` were listed: a row written in between is then only missed, not
    mended by what was true before it. `confirmed`: a person has looked at the unknown ones."""
    by_name = {instance.name: instance for instance in instances}
    known = {row.name for row in rows}
    unknown = tuple(instance for instance in instances if instance.name not in known and instance.age >= limits.young)
    allowed = max(limits.most_unknown, limits.share_unknown * len(instances))
    return Plan(
        mends=tuple((row, mend(row, by_name.get(row.name))) for row in rows),
        unknown=unknown,
        refused=len(unknown) > allowed and not confirmed,
    )


def mend(row: Row, instance: Instance | None) -> Mend:  # noqa: PLR0911 - a table, read from the top
    """What to do about `row`, whose instance the provider lists as `instance` (None: does not list)."""
    if row.in_transition:
        return Mend.NOTHING
    if row.tenure is Tenure.ORPHAN or row.desired is Desired.GONE:
        return Mend.DELETE
    if row.overdue:
        return Mend.TAKE_OVER
    if instance is None:
        return Mend.LOOK
    if instance.state is InstanceState.ERROR or row.observed in (Observed.ERROR, Observed.UNKNOWN):
        return Mend.DELETE
    if instance.state is InstanceState.STOPPED:
        return Mend.NOTHING if row.observed is Observed.STOPPED else Mend.NOTE_STOPPED
    if instance.state is InstanceState.RUNNING and (row.observed is Observed.STOPPED or row.desired is Desired.STOPPED):
        return Mend.STOP
    return Mend.NOTHING
