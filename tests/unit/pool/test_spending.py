"""The cost of a run from sums over a session."""

from __future__ import annotations

from services.pool.harness.spending import Spending


def told(spending: Spending, *totals: int) -> int:
    """What a run has cost that tells these sums."""
    spending.begin()
    return [spending.told(total) for total in totals][-1]


def test_a_run_costs_what_the_sum_has_grown_by() -> None:
    spending = Spending(0)
    assert told(spending, 100, 300) == 300
    assert told(spending, 550) == 250
    assert told(spending, 550) == 0


def test_what_is_told_between_runs_belongs_to_the_one_before() -> None:
    spending = Spending(0)
    assert told(spending, 300) == 300
    spending.told(400)
    assert told(spending, 450) == 50


def test_an_agent_that_counts_anew_is_believed() -> None:
    spending = Spending(0)
    assert told(spending, 300) == 300
    assert told(spending, 20, 50) == 50


def test_of_the_first_run_of_a_loaded_session_nothing_is_known() -> None:
    spending = Spending(None)
    assert told(spending, 700, 900) == 0
    assert told(spending, 1000) == 100
