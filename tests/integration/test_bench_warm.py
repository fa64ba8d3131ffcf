"""The benchmark of turns, very small, on all four services: figures of the right shape, and nothing wrong.

Nothing here asserts a time.
"""

from __future__ import annotations

import math

import pytest

from benchmarks import warm, warm_daytona, warm_memory, warm_turns
from benchmarks.rig import Rig
from benchmarks.runs import Part


def check_part(part: Part, *expected: str) -> None:
    """Nothing is wrong, and the figures are finite numbers."""
    assert part.problems == []
    assert set(expected) <= set(part.figures)
    assert all(math.isfinite(value) for value in part.figures.values()), part.figures


@pytest.mark.exhaustive
async def test_turns_cold_warm_and_at_once() -> None:
    async with Rig() as rig, warm_turns.house(rig, HEARTH_LOCAL_WARM_WINDOW="600") as house:
        check_part(await warm.measure_cold(rig, house, 1), "cold_p50_ms", "cold_most_ms")
        check_part(await warm.measure_warm(rig, house, 1, 3, "warm_"), "warm_p50_ms", "warm_p99_ms", "warm_acquire_ms")
        check_part(await warm.measure_warm(rig, house, 2, 2, "at_once_"), "at_once_p50_ms", "at_once_pool_cpu_ms")


async def test_parked_entries_are_counted() -> None:
    async with Rig() as rig:
        part = await warm_memory.measure(rig, 10)
    check_part(part, "parked_growth_mib", "parked_entry_kib", "pool_mib_before")


@pytest.mark.exhaustive
async def test_the_ladder_on_the_stand_in_of_daytona() -> None:
    async with Rig() as rig:
        part = await warm_daytona.measure(rig, warm_daytona.Shape(1, 1), "--delays", "none")
    check_part(part, *(f"daytona_{how}_added_ms" for how in warm_daytona.HOWS), "daytona_warm_of_cold")
