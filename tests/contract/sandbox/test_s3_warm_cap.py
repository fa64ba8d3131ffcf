"""S3: sandboxes kept running between turns never exceed the cap, counting those on their way in and out."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.support.sandboxes import Sandboxes, disposition, how, members, new_id, state

CAP = 3
ENVIRONMENT = {"HEARTH_LOCAL_WARM_CAP": str(CAP)}


async def used_slots(sandboxes: Sandboxes) -> int:
    (slots,) = (await sandboxes.usage()).slots
    assert slots.cap == CAP
    return slots.used


async def running_without_a_turn(sandboxes: Sandboxes) -> int:
    """Parked and running, or on its way to be stopped."""
    found = Counter(state(sandbox) for sandbox in await sandboxes.list())
    return found["RUNNING/PARKED"] + found["STOPPING/PARKED"]


async def test_ten_racing_releases_never_exceed_it(sandboxes: Sandboxes, holder: str) -> None:
    sessions = [f"s-{new_id()}" for _ in range(10)]
    acquired = await asyncio.gather(*(sandboxes.acquire(session, holder=holder) for session in sessions))
    seen: list[tuple[int, int]] = []

    async def watch() -> None:
        while True:
            seen.append((await running_without_a_turn(sandboxes), await used_slots(sandboxes)))

    watching = asyncio.create_task(watch())
    try:
        released = await asyncio.gather(*(sandboxes.release(session) for session in sessions))
    finally:
        watching.cancel()
    assert len(seen) > 3
    assert max(parked for parked, _ in seen) <= CAP
    assert max(used for _, used in seen) <= CAP
    states = Counter(state(sandbox) for sandbox in await sandboxes.list())
    assert states == {"RUNNING/PARKED": CAP, "STOPPED/FREE": 10 - CAP}
    assert await used_slots(sandboxes) == CAP
    # What an answer said was true when it was given: whoever was told STOPPED stopped.
    for answer, release in zip(acquired, released, strict=True):
        if disposition(release) == "STOPPED":
            assert members(answer.sandbox_id) == []


async def test_the_least_recently_used_one_makes_room_and_is_stopped_before_the_answer(
    sandboxes: Sandboxes, holder: str
) -> None:
    sessions = [f"s-{new_id()}" for _ in range(CAP + 1)]
    acquired = [await sandboxes.acquire(session, holder=holder) for session in sessions]
    for session in sessions[:CAP]:
        assert disposition(await sandboxes.release(session)) == "PARKED"
    # Used again, so the first one is not the oldest any more.
    assert how(await sandboxes.acquire(sessions[0], 2, holder=holder)) == "ATTACHED"
    assert disposition(await sandboxes.release(sessions[0], 2)) == "PARKED"

    assert disposition(await sandboxes.release(sessions[CAP])) == "PARKED"
    assert members(acquired[1].sandbox_id) == []
    states = [state(await sandboxes.get(answer.sandbox_id)) for answer in acquired]
    assert states == ["RUNNING/PARKED", "STOPPED/FREE", "RUNNING/PARKED", "RUNNING/PARKED"]
    (outcome,) = await sandboxes.renew(holder, (sessions[1], 1, 1), tenure="PARKED")
    assert outcome.outcome != 1


async def test_a_turn_is_never_refused_by_the_cap_and_its_sandbox_holds_no_slot(
    sandboxes: Sandboxes, holder: str
) -> None:
    sessions = [f"s-{new_id()}" for _ in range(CAP + 2)]
    for session in sessions:
        await sandboxes.acquire(session, holder=holder)
    assert await used_slots(sandboxes) == 0
    for session in sessions:
        await sandboxes.release(session)
    assert await used_slots(sandboxes) == CAP
    for session in sessions:
        assert how(await sandboxes.acquire(session, 2, holder=holder)) in ("ATTACHED", "RESTARTED")
    assert await used_slots(sandboxes) == 0


async def test_release_and_acquire_racing_over_the_same_sandboxes(sandboxes: Sandboxes, holder: str) -> None:
    """Evictions race with turns that want the very sandbox: one of them wins, and the count holds."""
    sessions = [f"s-{new_id()}" for _ in range(CAP + 2)]

    async def turns(session: str) -> None:
        for epoch in range(1, 6):
            await sandboxes.acquire(session, epoch, holder=holder)
            assert disposition(await sandboxes.release(session, epoch)) in ("PARKED", "STOPPED")
            assert await used_slots(sandboxes) <= CAP

    await asyncio.gather(*(turns(session) for session in sessions))
    rows = [state(row) for row in await sandboxes.list()]
    assert len(rows) == len(sessions)
    assert await used_slots(sandboxes) == rows.count("RUNNING/PARKED") <= CAP
