"""S2 in numbers: whatever state a sandbox is in, it is told to stop within 120 s of its holder's last sign of life.

With the timers of production and a clock that is moved by hand, so that a minute of waiting takes no time and the
number does not depend on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.chassis.clock import SystemClock
from services.sandbox.claims import Claim
from services.sandbox.providers.port import ProviderError
from services.sandbox.rows import Key
from services.sandbox.states import Disposition, Observed
from services.sandbox.store import Renewal
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandbox_parts import Replica, clear, holder, replica
from tests.support.sandboxes import left_below, members

BOUND = 120.0
READ_EVERY = 5.0


class MovedClock(SystemClock):
    """The clock of this machine, and what it was moved by."""

    def __init__(self) -> None:
        self.moved = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.moved


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def root(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_MARKER, marker())
    return scratch / "sandboxes"


@pytest_asyncio.fixture
async def one(migrated_dsn: str, root: Path, clock: MovedClock) -> AsyncIterator[Replica]:
    deadlines = {"create_deadline": 120.0, "start_deadline": 60.0, "stop_deadline": 30.0, "delete_deadline": 30.0}
    async with replica(migrated_dsn, root, clock=clock, **deadlines) as found:
        yield found
    await clear(root)
    assert left_below(root) == []


async def seconds_until_told(one: Replica, clock: MovedClock, sandbox_id: str) -> float:
    """Read the leases every 5 s, until the provider is told to stop or delete it."""
    told = len([call for call in one.switches.calls if call in ("stop", "delete")])
    began = clock.moved
    while len([call for call in one.switches.calls if call in ("stop", "delete")]) == told:
        clock.moved += READ_EVERY
        assert clock.moved - began <= BOUND
        await asyncio.gather(*await one.parts.reconciler.read_leases())
    return clock.moved - began


async def test_parked_and_active(one: Replica, clock: MovedClock) -> None:
    me = holder()
    active = await one.acquire("active", holder=me)
    parked = await one.acquire("parked", holder=me)
    assert await one.release("parked") is Disposition.PARKED
    # Renewed just after a reading: seen anew at the next one only.
    await one.parts.reconciler.read_leases()
    renewals = [Renewal(Key("p1", session), Claim(1, 1), active=True) for session in ("active", "parked")]
    await one.parts.store.renew(me, renewals, refresh_after=240)
    assert await seconds_until_told(one, clock, active.sandbox_id) <= BOUND
    assert (await one.row(active.sandbox_id)).observed is Observed.GONE
    assert (await one.row(parked.sandbox_id)).observed is Observed.STOPPED
    assert members(active.sandbox_id) == members(parked.sandbox_id) == []


@pytest.mark.parametrize(("held", "observed"), [("create", Observed.CREATING), ("restart_daemon", Observed.STARTING)])
async def test_what_is_being_made_for_a_caller_that_is_gone(
    one: Replica, clock: MovedClock, root: Path, held: str, observed: Observed
) -> None:
    """The create hangs for longer than the holder lives; what it brings in the end is deleted at once."""
    hang = one.switches.pause(held)
    acquiring = asyncio.create_task(one.acquire("s", holder=holder()))
    await one.switches.entered[held].wait()
    acquiring.cancel()
    await asyncio.wait([acquiring])
    (row,) = await one.rows()
    assert row.observed is observed
    assert await seconds_until_told(one, clock, row.sandbox_id) <= BOUND
    assert await one.rows() == []
    hang.set()
    await one.parts.works.drain()
    assert list(root.glob("hearth-*")) == []
    assert members(row.sandbox_id) == []


async def test_a_caller_that_waits_keeps_what_is_being_made_for_it(one: Replica, clock: MovedClock) -> None:
    me = holder()
    hang = one.switches.pause("create")
    acquiring = asyncio.create_task(one.acquire("s", holder=me))
    await one.switches.entered["create"].wait()
    for _ in range(40):
        # As the open call does, by a clock that this test does not wait for.
        renewed = await one.parts.store.renew(me, [Renewal(Key("p1", "s"), Claim(1, 1), active=False)], refresh_after=1)
        assert renewed[0].sandbox_id is not None
        clock.moved += READ_EVERY
        await asyncio.gather(*await one.parts.reconciler.read_leases())
    hang.set()
    answer = await acquiring
    assert (await one.row(answer.sandbox_id)).observed is Observed.RUNNING
    await one.release("s", reason="KILLED")


async def test_a_stop_that_fails_and_a_delete_that_fails_are_told_again_until_it_is_gone(
    one: Replica, clock: MovedClock
) -> None:
    me = holder()
    answer = await one.acquire("s", holder=me)
    await one.release("s")
    one.switches.always = {"stop": ProviderError("no"), "delete": ProviderError("no")}
    assert await seconds_until_told(one, clock, answer.sandbox_id) <= BOUND
    assert (await one.parts.store.orphans(None))[0] == 1
    for _ in range(3):
        before = one.switches.calls.count("delete")
        await one.parts.reconciler.run(confirm_unknown=False)
        assert one.switches.calls.count("delete") == before + 1
    one.switches.always = {}
    await one.parts.reconciler.run(confirm_unknown=False)
    assert (await one.parts.store.orphans(None))[0] == 0
    assert members(answer.sandbox_id) == []
