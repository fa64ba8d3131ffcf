"""Legal changes of state, and what each reason for a release comes to."""

from __future__ import annotations

import pytest

from hearth.sandbox.v1 import sandbox_pb2
from services.sandbox import states
from services.sandbox.requests import reason_name
from services.sandbox.states import Fate, IllegalChange, Observed, fate

ON = {"park_running": True, "park_stopped": True}


@pytest.mark.parametrize("before", [state for state in Observed if state is not Observed.GONE])
def test_delete_is_legal_everywhere_and_so_is_what_a_provider_may_show(before: Observed) -> None:
    for seen in (
        Observed.DELETING,
        Observed.GONE,
        Observed.RUNNING,
        Observed.STOPPED,
        Observed.ERROR,
        Observed.UNKNOWN,
    ):
        states.check(before, seen)


def test_gone_is_the_end() -> None:
    assert [after for after in Observed if states.legal(Observed.GONE, after)] == [Observed.GONE]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Observed.RUNNING, Observed.CREATING),
        (Observed.STOPPED, Observed.CREATING),
        (Observed.STOPPING, Observed.STARTING),
        (Observed.DELETING, Observed.STARTING),
        (Observed.ERROR, Observed.STARTING),
        (Observed.UNKNOWN, Observed.STARTING),
    ],
)
def test_what_is_not_in_the_table_is_a_defect(before: Observed, after: Observed) -> None:
    with pytest.raises(IllegalChange, match=f"from {before} to {after}"):
        states.check(before, after)


def test_every_state_of_the_contract_is_known_and_no_other() -> None:
    names = {name.removeprefix("SANDBOX_STATE_") for name in sandbox_pb2.SandboxState.DESCRIPTOR.values_by_name}
    assert names - {"UNSPECIFIED"} == set(Observed)
    tenures = {name.removeprefix("TENURE_") for name in sandbox_pb2.Tenure.DESCRIPTOR.values_by_name}
    assert tenures - {"UNSPECIFIED"} == set(states.Tenure)
    dispositions = {name.removeprefix("DISPOSITION_") for name in sandbox_pb2.Disposition.DESCRIPTOR.values_by_name}
    assert dispositions - {"UNSPECIFIED"} == set(states.Disposition)


EXPECTED = {
    "CLEAN_TURN": Fate.PARK,
    "STOPPED_WARM": Fate.PARK,
    "IDLE_EXPIRED": Fate.STOP,
    "CAPACITY": Fate.STOP,
    "SHUTDOWN_IDLE": Fate.STOP,
    "SESSION_INCOMPATIBLE": Fate.STOP,
    "CONTINUITY_INVALID": Fate.STOP,
}


@pytest.mark.parametrize("number", sandbox_pb2.ReleaseReason.values())
def test_each_reason_of_the_contract_has_its_fate_and_the_rest_deletes(
    number: sandbox_pb2.ReleaseReason.ValueType,
) -> None:
    name = reason_name(number)
    assert fate(name, **ON) is EXPECTED.get(name, Fate.DELETE)


def test_a_reason_of_a_later_version_deletes() -> None:
    unknown: sandbox_pb2.ReleaseReason.ValueType = 999  # type: ignore[assignment]
    assert reason_name(unknown) == ""
    assert fate(reason_name(unknown), **ON) is Fate.DELETE


def test_the_tiers_are_independent() -> None:
    assert fate("CLEAN_TURN", park_running=False, park_stopped=True) is Fate.STOP
    assert fate("CLEAN_TURN", park_running=False, park_stopped=False) is Fate.DELETE
    assert fate("CLEAN_TURN", park_running=True, park_stopped=False) is Fate.PARK
    assert fate("IDLE_EXPIRED", park_running=True, park_stopped=False) is Fate.DELETE
    assert fate("KILLED", park_running=True, park_stopped=True) is Fate.DELETE
