"""What the reconciler does about the difference between rows and instances: a decision over both lists.

Rows win over labels: an instance is ours to judge by its row, and only one without any row is judged by its label.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
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
    # It is listed as stopped or broken and was not: a list may be older than its start, only a look at it proves that.
    DOUBT = "doubt"
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
    """What one pass over one provider does. `late`: instances that came after their row was seen gone, as of a create
    that nobody waited for any more. `refused`: too many are unknown, so something is wrong with the rows or the label,
    and none of the unknown is touched."""

    mends: tuple[tuple[Row, Mend], ...]
    late: tuple[Instance, ...]
    unknown: tuple[Instance, ...]
    refused: bool


def strangers(rows: Sequence[Row], instances: Sequence[Instance]) -> list[Instance]:
    """The instances that none of these rows is about."""
    names = {row.name for row in rows}
    ids = {row.provider_id for row in rows if row.provider_id}
    return [instance for instance in instances if instance.name not in names and instance.provider_id not in ids]


def compare(
    rows: Sequence[Row],
    instances: Sequence[Instance],
    limits: Limits,
    *,
    gone: Collection[str] = (),
    tripped: bool = False,
    confirmed: bool = False,
) -> Plan:
    """`rows` (none that is gone) must have been read before `instances` were listed: a row written in between is then
    only missed, not mended by what was true before it.

    `gone`: names of instances whose row was seen gone. `tripped`: there were too many unknown ones before, and nobody
    has looked yet. `confirmed`: a person has.
    """
    by_name = {instance.name: instance for instance in instances}
    by_id = {instance.provider_id: instance for instance in instances}
    strange = strangers(rows, instances)
    unknown = tuple(instance for instance in strange if instance.name not in gone and instance.age >= limits.young)
    allowed = max(limits.most_unknown, limits.share_unknown * len(instances))
    too_many = len(unknown) > allowed or (tripped and len(unknown) > 0)
    return Plan(
        mends=tuple((row, mend(row, by_id.get(row.provider_id) or by_name.get(row.name))) for row in rows),
        late=tuple(instance for instance in strange if instance.name in gone),
        unknown=unknown,
        refused=too_many and not confirmed,
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
    if row.observed in (Observed.ERROR, Observed.UNKNOWN):
        return Mend.DELETE
    if instance.state is InstanceState.ERROR:
        return Mend.DOUBT
    if instance.state is InstanceState.STOPPED:
        return Mend.NOTHING if row.observed is Observed.STOPPED else Mend.DOUBT
    if instance.state is InstanceState.RUNNING and (row.observed is Observed.STOPPED or row.desired is Desired.STOPPED):
        return Mend.STOP
    return Mend.NOTHING


def proven(row: Row, instance: Instance) -> Mend:
    """What to do about `row`, which was doubted, now that the provider was asked for its `instance` alone."""
    if instance.state is InstanceState.ERROR:
        return Mend.DELETE
    if instance.state is InstanceState.STOPPED and row.observed is not Observed.STOPPED:
        return Mend.NOTE_STOPPED
    return Mend.NOTHING
