"""Time, ids, and how long the call being served still has."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC

from hypothesis import given
from hypothesis import strategies as st

from services.chassis import deadlines
from services.chassis.clock import SystemClock, SystemIds, derived_id

parts = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), min_size=1, max_size=4)


async def test_the_clock_of_this_machine() -> None:
    clock = SystemClock()
    assert clock.now().tzinfo is UTC
    before = clock.monotonic()
    await clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.009


def test_ids_are_fresh_uuids() -> None:
    ids = SystemIds()
    found = {ids.new() for _ in range(100)}
    assert len(found) == 100
    assert all(str(uuid.UUID(value)) == value for value in found)


@given(parts, parts)
def test_derived_ids_differ_as_their_parts_do(one: list[str], other: list[str]) -> None:
    assert (derived_id(*one) == derived_id(*other)) == (one == other)


def test_a_derived_id_never_changes() -> None:
    # Stored events carry such ids: another value here would deliver them twice after an update.
    assert derived_id("row", "started") == "5aa5fe11-d7ad-5dba-9d7d-d2b0cf04b413"


async def test_without_a_call_there_is_no_bound() -> None:
    assert deadlines.remaining() is None
    assert deadlines.bounded(None) is None
    assert deadlines.bounded(5.0) == 5.0


async def test_the_shorter_one_counts() -> None:
    deadlines.serve_until(1.0)
    left = deadlines.bounded(None)
    assert left is not None
    assert 0.9 < left <= 1.0
    assert deadlines.bounded(0.5) == 0.5
    longer = deadlines.bounded(60)
    assert longer is not None
    assert longer <= 1.0
    deadlines.serve_until(-1.0)
    assert deadlines.remaining() == 0.0
    deadlines.serve_until(None)
    assert deadlines.remaining() is None


async def test_a_task_that_the_call_started_is_not_bound_by_it() -> None:
    deadlines.serve_until(1.0)

    async def look() -> float | None:
        return deadlines.remaining()

    assert await asyncio.create_task(look()) is None
    assert deadlines.remaining() is not None
