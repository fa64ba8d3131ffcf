"""Plans of faults: a function of their seed, every kind in each, a restore behind its copy."""

from __future__ import annotations

import pytest

from tests.faults.plan import NAMES, plan


@pytest.mark.parametrize("seed", range(50))
def test_every_kind_is_in_every_plan(seed: int) -> None:
    found = [fault.name for fault in plan(seed).faults]
    assert sorted(found) == sorted([*NAMES, "copy"])
    assert found.index("copy") < found.index("restore")
    assert plan(seed) == plan(seed)
    assert plan(seed) != plan(seed + 1)


def test_neighbouring_seeds_cover_all_numbers_of_replicas() -> None:
    assert {(plan(seed).histories, plan(seed).relays) for seed in range(4)} == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_a_part_of_it_can_be_asked_for() -> None:
    found = plan(3, only=["kill:history+postgres", "flush"], histories=2)
    assert sorted(fault.name for fault in found.faults) == ["flush", "kill:history+postgres"]
    assert found.histories == 2
    assert [fault.name for fault in plan(3, only=["restore"]).faults] == ["copy", "restore"]
    with pytest.raises(ValueError, match="no such fault: earthquake"):
        plan(3, only=["earthquake"])
