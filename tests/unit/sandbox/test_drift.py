"""What the reconciler does about rows and instances that differ, and when it refuses to touch the unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.sandbox.claims import Claim
from services.sandbox.drift import Limits, Mend, compare, mend, proven
from services.sandbox.providers.port import Instance, InstanceState
from services.sandbox.rows import Key, Row
from services.sandbox.states import Desired, Observed, Tenure

ROW = Row(
    sandbox_id="1",
    key=Key("p", "s"),
    provider="local",
    agent="scripted",
    fingerprint="",
    daemon_fingerprint="",
    desired=Desired.RUNNING,
    observed=Observed.RUNNING,
    tenure=Tenure.ACTIVE,
    holder="me",
    claim=Claim(1, 1),
)
STOPPED = {"observed": Observed.STOPPED, "desired": Desired.STOPPED, "tenure": Tenure.FREE, "holder": None}
LIMITS = Limits(young=120, most_unknown=5, share_unknown=0.2)


def instance(name: str, state: InstanceState = InstanceState.RUNNING, age: float = 1000) -> Instance:
    return Instance(f"id-of-{name}", name, state, {}, age)


@pytest.mark.parametrize(
    ("change", "state", "expected"),
    [
        ({}, InstanceState.RUNNING, Mend.NOTHING),
        ({}, InstanceState.STOPPED, Mend.DOUBT),
        ({"tenure": Tenure.PARKED}, InstanceState.STOPPED, Mend.DOUBT),
        ({}, InstanceState.ERROR, Mend.DOUBT),
        ({}, InstanceState.STARTING, Mend.NOTHING),
        ({}, InstanceState.UNKNOWN, Mend.NOTHING),
        ({}, None, Mend.LOOK),
        (STOPPED, InstanceState.STOPPED, Mend.NOTHING),
        (STOPPED, InstanceState.ERROR, Mend.DOUBT),
        (STOPPED, InstanceState.RUNNING, Mend.STOP),
        (STOPPED, None, Mend.LOOK),
        ({"desired": Desired.STOPPED}, InstanceState.RUNNING, Mend.STOP),
        ({"desired": Desired.GONE}, InstanceState.RUNNING, Mend.DELETE),
        ({"tenure": Tenure.ORPHAN, "observed": Observed.UNKNOWN}, InstanceState.RUNNING, Mend.DELETE),
        ({"tenure": Tenure.ORPHAN, "observed": Observed.UNKNOWN}, None, Mend.DELETE),
        ({"observed": Observed.UNKNOWN}, InstanceState.RUNNING, Mend.DELETE),
        ({"observed": Observed.ERROR}, InstanceState.STOPPED, Mend.DELETE),
        # Somebody works on it: whatever is listed may be older than what they did.
        ({"worker": "w", "observed": Observed.STARTING}, InstanceState.STOPPED, Mend.NOTHING),
        ({"worker": "w", "observed": Observed.CREATING}, None, Mend.NOTHING),
        ({"worker": "w", "observed": Observed.CREATING, "overdue": True}, None, Mend.TAKE_OVER),
        ({"worker": "w", "observed": Observed.STOPPING, "overdue": True}, InstanceState.RUNNING, Mend.TAKE_OVER),
        # An orphan is deleted, not taken over: its session may have another sandbox by now.
        ({"worker": "w", "tenure": Tenure.ORPHAN, "overdue": True}, InstanceState.RUNNING, Mend.DELETE),
    ],
)
def test_mend(change: dict[str, object], state: InstanceState | None, expected: Mend) -> None:
    row = replace(ROW, **change)  # type: ignore[arg-type]
    assert mend(row, instance(row.name, state) if state else None) is expected


@pytest.mark.parametrize(
    ("change", "state", "expected"),
    [
        ({}, InstanceState.RUNNING, Mend.NOTHING),
        ({}, InstanceState.STARTING, Mend.NOTHING),
        ({}, InstanceState.UNKNOWN, Mend.NOTHING),
        ({}, InstanceState.STOPPED, Mend.NOTE_STOPPED),
        ({}, InstanceState.ERROR, Mend.DELETE),
        (STOPPED, InstanceState.STOPPED, Mend.NOTHING),
        (STOPPED, InstanceState.ERROR, Mend.DELETE),
    ],
)
def test_what_a_list_made_doubtful_is_judged_by_the_instance_alone(
    change: dict[str, object], state: InstanceState, expected: Mend
) -> None:
    row = replace(ROW, **change)  # type: ignore[arg-type]
    assert proven(row, instance(row.name, state)) is expected


def test_an_instance_without_a_row_is_unknown_once_it_is_old_enough() -> None:
    known, old, young = instance("hearth-1"), instance("hearth-2"), instance("hearth-3", age=119)
    plan = compare([ROW], [known, old, young], LIMITS, confirmed=False)
    assert plan.unknown == (old,)
    assert not plan.refused
    assert plan.mends == ((ROW, Mend.NOTHING),)


@pytest.mark.parametrize(
    ("unknown", "listed", "refused"), [(5, 5, False), (6, 6, True), (6, 30, False), (7, 30, True), (20, 100, False)]
)
def test_suspiciously_many_are_left_alone(unknown: int, listed: int, refused: bool) -> None:
    rows = [replace(ROW, sandbox_id=f"known-{number}") for number in range(listed - unknown)]
    instances = [instance(row.name) for row in rows] + [instance(f"hearth-u{number}") for number in range(unknown)]
    plan = compare(rows, instances, LIMITS, confirmed=False)
    assert len(plan.unknown) == unknown
    assert plan.refused is refused
    assert not compare(rows, instances, LIMITS, confirmed=True).refused


def test_once_tripped_it_waits_for_a_person_also_when_it_would_not_trip_again() -> None:
    rows = [replace(ROW, sandbox_id=f"known-{number}") for number in range(50)]
    instances = [instance(row.name) for row in rows] + [instance("hearth-u")]
    assert not compare(rows, instances, LIMITS).refused
    assert compare(rows, instances, LIMITS, tripped=True).refused
    assert not compare(rows, instances, LIMITS, tripped=True, confirmed=True).refused
    assert not compare(rows, instances[:-1], LIMITS, tripped=True).refused


def test_what_comes_after_its_row_was_seen_gone_is_late_whatever_its_age_and_never_unknown() -> None:
    late = [instance(f"hearth-late{number}", age=1) for number in range(20)]
    plan = compare([ROW], [instance("hearth-1"), *late], LIMITS, gone={found.name for found in late})
    assert (plan.late, plan.unknown, plan.refused) == (tuple(late), (), False)


def test_a_row_may_know_its_instance_by_the_providers_id_only() -> None:
    orphan = replace(ROW, sandbox_id="9", provider_id="id-of-x", tenure=Tenure.ORPHAN, observed=Observed.UNKNOWN)
    plan = compare([orphan], [instance("x")], LIMITS)
    assert plan.mends == ((orphan, Mend.DELETE),)
    assert plan.unknown == ()
