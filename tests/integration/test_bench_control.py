"""The benchmark of control, very small, on all services: figures of the right shape, and nothing wrong.

Nothing here asserts a time.
"""

from __future__ import annotations

import math

import pytest

from benchmarks import control_away, control_inputs, control_kills, control_stops, control_streams, warm_turns
from benchmarks.rig import Rig
from benchmarks.runs import Part


def check_part(part: Part, *expected: str) -> None:
    """Nothing is wrong, and the figures are finite numbers."""
    assert part.problems == []
    assert set(expected) <= set(part.figures)
    assert all(math.isfinite(value) for value in part.figures.values()), part.figures


@pytest.mark.exhaustive
async def test_stops_while_others_stream() -> None:
    async with Rig() as rig:
        journal = rig.directory / "agents.jsonl"
        settings = {"HEARTH_LOCAL_WARM_WINDOW": "600", **control_streams.journal_settings(journal)}
        async with warm_turns.house(rig, **settings) as house:
            shape = control_stops.Shape(stops=2, sessions=1, streams=1)
            part = await control_stops.measure(rig, house, journal, shape)
    check_part(part, "stop_to_cancel_p50_ms", "stop_to_settled_p99_ms", "warm_after_stop", "streamed_share")
    assert part.figures["stops"] == 2
    assert part.figures["streamed_frames_per_s"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
async def test_a_replica_that_is_killed() -> None:
    async with Rig() as rig:
        part = await control_kills.part(rig, control_kills.FEW, "fast_", control_kills.FAST)
    check_part(part, "fast_lost_most_s", "fast_next_most_s")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
async def test_inputs_through_crashes() -> None:
    async with Rig() as rig:
        part = await control_inputs.part(rig, control_inputs.QUICK, print)
    check_part(part, "inputs_prompted_once", "inputs_lost_unasked", "turns_lost")
    assert part.figures["inputs"] == control_inputs.QUICK.inputs
    assert part.figures["inputs_prompted_again"] == part.figures["inputs_listed"] == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
async def test_without_postgres_for_a_while() -> None:
    async with Rig() as rig:
        part = await control_away.part(rig, control_away.QUICK)
    check_part(part, "away_turns", "away_refused_sends", "away_back_most_s")
    assert part.figures["away_lost"] == part.figures["away_taken_over"] == 0
