"""A replica trusts what it holds only while its beats land, and asks its rows before what cannot be taken back."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from typing import cast

import pytest

from services.pool.rows import Execution, ExecutionState, Key
from services.pool.store import Store
from services.pool.trust import Trust
from tests.unit.pool.clocks import ManualClock, settle

ME = "me"
DRIVEN = Execution(
    execution_id="e",
    key=Key("acme", "one"),
    epoch=3,
    admitted_epoch=3,
    state=ExecutionState.RUNNING,
    outcome=None,
    failure_code="",
    input_id="i",
    source_execution_id=None,
    tries=1,
    driver=ME,
    ending_event_id=None,
    agent=None,
    harness_session_id=None,
    traceparent="",
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    started_at=None,
    settled_at=None,
    ending_sequence=0,
)


class Rows:
    """The row of the one execution, as it is now; None once it is gone."""

    def __init__(self, row: Execution | None) -> None:
        self.row = row
        self.reads = 0

    async def execution(self, _key: object, _execution_id: str) -> Execution | None:
        self.reads += 1
        return self.row


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def trust_in(rows: Rows, clock: ManualClock) -> Trust:
    return Trust(cast("Store", rows), clock, ME, limit=20.0)


def held(trust: Trust) -> bool:
    return trust.held


async def test_it_is_trusted_for_a_while_after_each_beat(clock: ManualClock) -> None:
    trust = trust_in(Rows(None), clock)
    assert not held(trust)
    trust.landed(clock.monotonic())
    await clock.advance(20)
    assert held(trust)
    # Nothing has to happen for it to be over: a frozen process would not see that either.
    clock.seconds += 0.1
    assert not held(trust)
    trust.landed(clock.monotonic() - 5)
    await clock.advance(16)
    assert not held(trust)


async def test_what_is_trusted_is_not_asked_about(clock: ManualClock) -> None:
    rows = Rows(None)
    trust = trust_in(rows, clock)
    trust.landed(clock.monotonic())
    assert await trust.confirm(DRIVEN)
    assert rows.reads == 0


@pytest.mark.parametrize(
    ("changes", "mine"),
    [({}, True), ({"driver": "other"}, False), ({"driver": None}, False), ({"epoch": 9}, False)],
)
async def test_what_is_doubtful_waits_for_a_beat_and_reads_its_row(
    clock: ManualClock, changes: dict[str, object], mine: bool
) -> None:
    rows = Rows(dataclasses.replace(DRIVEN, **changes))  # type: ignore[arg-type]
    trust = trust_in(rows, clock)
    asking = asyncio.create_task(trust.confirm(DRIVEN))
    await settle()
    assert not asking.done()
    trust.landed(clock.monotonic())
    assert await asking is mine


async def test_an_execution_that_is_gone_is_nobodys(clock: ManualClock) -> None:
    trust = trust_in(Rows(None), clock)
    asking = asyncio.create_task(trust.confirm(DRIVEN))
    await settle()
    trust.landed(clock.monotonic())
    assert not await asking
