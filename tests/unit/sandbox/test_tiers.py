"""Timers of a provider against ours: one that is too short is told at the start, not met in the middle of a turn."""

from __future__ import annotations

import pytest

from services.sandbox.tiers import Tier, auto_stop_problem


@pytest.mark.parametrize(
    ("minutes", "refresh", "parked", "said"),
    [
        (15, 240, 600, ""),
        (10, 240, 0, ""),
        (9.9, 240, 0, "HEARTH_ACTIVITY_REFRESH"),
        (12, 240, 600, "longest parked window"),
        (12.1, 240, 600, ""),
        # Nothing is parked running, so nothing has to outlast it.
        (12, 240, 0, ""),
    ],
)
def test_auto_stop_outlasts_two_refreshes_and_the_longest_parked_window(
    minutes: float, refresh: float, parked: float, said: str
) -> None:
    problem = auto_stop_problem(minutes * 60, refresh=refresh, parked=parked)
    assert said in problem
    assert bool(problem) is bool(said)


@pytest.mark.parametrize(
    ("tier", "longest"),
    [
        (Tier(120, 20, True), 600),
        (Tier(900, 20, True), 900),
        (Tier(0, 20, True), 0),
        (Tier(120, 0, True), 0),
    ],
)
def test_the_longest_parked_window(tier: Tier, longest: float) -> None:
    assert tier.longest_parked(600) == longest
