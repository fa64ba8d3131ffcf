"""Claims over the wire: the same one gives the same result, a lower one is fenced, a closed one is closed for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from hearth.sandbox.v1 import sandbox_pb2
from tests.support.processes import ServiceProcess
from tests.support.sandboxes import (
    Daemon,
    Sandboxes,
    agents_with_stubborn,
    connected,
    disposition,
    how,
    new_id,
    refused,
    service_environment,
    state,
)
from tests.support.servers import Servers


async def test_the_same_claim_gives_the_same_result(sandboxes: Sandboxes, session: str, holder: str) -> None:
    first = await sandboxes.acquire(session, 1, holder=holder)
    again = await sandboxes.acquire(session, 1, holder=holder)
    assert how(first) == how(again) == "CREATED"
    assert first.sandbox_id == again.sandbox_id
    assert first.endpoint == again.endpoint
    assert first.workspace == again.workspace


async def test_concurrent_acquires_of_one_claim_are_one(sandboxes: Sandboxes, session: str, holder: str) -> None:
    answers = await asyncio.gather(*(sandboxes.acquire(session, 3, holder=holder) for _ in range(10)))
    assert {(answer.sandbox_id, how(answer), answer.endpoint.token) for answer in answers} == {
        (answers[0].sandbox_id, "CREATED", answers[0].endpoint.token)
    }
    assert len(await sandboxes.list(project="p1", session=session, include_gone=True)) == 1


async def test_a_lower_claim_is_fenced_and_told_the_one_that_stands(
    sandboxes: Sandboxes, session: str, holder: str
) -> None:
    await sandboxes.acquire(session, 5, 2, holder=holder)
    for epoch, attempt in ((5, 1), (4, 9)):
        refusal = await refused(sandboxes.acquire(session, epoch, attempt, holder=holder))
        assert (refusal.code.name, refusal.reason) == ("FAILED_PRECONDITION", "FENCED")
        assert refusal.metadata == {"epoch": "5", "attempt": "2"}


async def test_one_claim_of_two_holders_is_fenced(sandboxes: Sandboxes, session: str, holder: str) -> None:
    await sandboxes.acquire(session, 5, holder=holder)
    refusal = await refused(sandboxes.acquire(session, 5, holder=new_id()))
    assert refusal.reason == "FENCED"


async def test_release_closes_its_claim_and_those_below(sandboxes: Sandboxes, session: str, holder: str) -> None:
    await sandboxes.acquire(session, 5, 2, holder=holder)
    assert disposition(await sandboxes.release(session, 5, 2)) == "PARKED"
    assert (await refused(sandboxes.acquire(session, 5, 2, holder=holder))).reason == "FENCED"
    assert (await refused(sandboxes.acquire(session, 5, 1, holder=holder))).reason == "FENCED"
    assert how(await sandboxes.acquire(session, 5, 3, holder=holder)) == "ATTACHED"


async def test_a_release_that_comes_first_wins(sandboxes: Sandboxes, session: str, holder: str) -> None:
    assert disposition(await sandboxes.release(session, 2, reason="ABORTED")) == "NOTHING"
    assert (await refused(sandboxes.acquire(session, 2, holder=holder))).reason == "FENCED"
    assert await sandboxes.list(project="p1", session=session, include_gone=True) == []


async def test_a_takeover_closes_what_came_before_and_not_its_own(
    sandboxes: Sandboxes, session: str, holder: str
) -> None:
    first = await sandboxes.acquire(session, 5, holder=holder)
    released = await sandboxes.release(session, 6, 0, reason="LOST")
    assert (disposition(released), released.sandbox_id) == ("DELETED", first.sandbox_id)
    second = await sandboxes.acquire(session, 6, 1, holder=new_id())
    assert how(second) == "CREATED"
    assert disposition(await sandboxes.release(session, 6, 0, reason="LOST")) == "NOTHING"
    assert state(await sandboxes.get(second.sandbox_id)) == "RUNNING/ACTIVE"


async def test_an_old_release_does_nothing_to_a_newer_claim(sandboxes: Sandboxes, session: str, holder: str) -> None:
    await sandboxes.acquire(session, 5, holder=holder)
    newer = await sandboxes.acquire(session, 6, holder=holder)
    for reason in ("KILLED", "CLEAN_TURN", "IDLE_EXPIRED"):
        assert disposition(await sandboxes.release(session, 5, reason=reason)) == "NOTHING"
    assert state(await sandboxes.get(newer.sandbox_id)) == "RUNNING/ACTIVE"


@pytest.mark.parametrize(
    ("reason", "expected"), [("CLEAN_TURN", "PARKED"), ("IDLE_EXPIRED", "STOPPED"), ("KILLED", "DELETED")]
)
async def test_release_may_be_repeated(
    sandboxes: Sandboxes, session: str, holder: str, reason: str, expected: str
) -> None:
    await sandboxes.acquire(session, holder=holder)
    both = await asyncio.gather(*(sandboxes.release(session, reason=reason) for _ in range(2)))
    assert [disposition(answer) for answer in both] == [expected, expected]
    later = "NOTHING" if expected == "DELETED" else expected
    assert disposition(await sandboxes.release(session, reason=reason)) == later


@pytest.mark.parametrize("reason", ["KILLED", "CLEAN_TURN", "IDLE_EXPIRED"])
async def test_release_during_a_create_undoes_it(sandboxes: Sandboxes, session: str, holder: str, reason: str) -> None:
    acquiring = asyncio.create_task(sandboxes.acquire(session, 1, holder=holder))
    while not (rows := await sandboxes.list(project="p1", session=session)):
        assert not acquiring.done()
    assert state(rows[0]) in ("CREATING/ACTIVE", "STARTING/ACTIVE")
    released = await sandboxes.release(session, 1, reason=reason)
    assert (disposition(released), released.sandbox_id) == ("DELETED", rows[0].sandbox_id)
    assert (await refused(acquiring)).reason == "FENCED"
    assert await sandboxes.list(project="p1", session=session) == []


async def test_a_cancelled_acquire_is_covered_by_its_claim(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    acquiring = asyncio.create_task(sandboxes.acquire(session, 1, holder=holder))
    while not await sandboxes.list(project="p1", session=session):
        assert not acquiring.done()
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    # The work goes on, and whoever asks again under the claim gets what came of it.
    answer = await sandboxes.acquire(session, 1, holder=holder)
    assert how(answer) == "CREATED"
    assert await Daemon(http, answer.endpoint).health() == 200
    assert len(await sandboxes.list(project="p1", session=session, include_gone=True)) == 1


async def test_racing_claims_leave_one_sandbox_for_the_highest(
    sandboxes: Sandboxes, session: str, http: aiohttp.ClientSession
) -> None:
    answers = await asyncio.gather(
        *(sandboxes.acquire(session, epoch, holder=new_id()) for epoch in range(1, 6)), return_exceptions=True
    )
    highest = answers[-1]
    assert not isinstance(highest, BaseException), highest
    rows = await sandboxes.list(project="p1", session=session)
    assert [row.claim.epoch for row in rows] == [5]
    assert await Daemon(http, highest.endpoint).health() == 200
    for answer in answers[:-1]:
        if isinstance(answer, BaseException):
            assert getattr(answer, "reason", "") == "FENCED"
        else:
            # It was served before a higher claim came; by now its token opens nothing.
            assert await Daemon(http, answer.endpoint).health() in (0, 401)


async def test_renewals_are_answered_one_by_one(sandboxes: Sandboxes, session: str, holder: str) -> None:
    await sandboxes.acquire(session, 5, holder=holder)
    other = f"{session}-other"
    results = await sandboxes.renew(holder, (session, 5, 1), (session, 4, 1), (other, 1, 1), (session, 5, 1))
    names = [sandbox_pb2.RenewalOutcome.Name(result.outcome).removeprefix("RENEWAL_OUTCOME_") for result in results]
    assert names == ["OK", "FENCED", "GONE", "OK"]
    assert (results[1].current.epoch, results[1].current.attempt) == (5, 1)
    foreign = await sandboxes.renew(new_id(), (session, 5, 1))
    assert foreign[0].outcome == sandbox_pb2.RENEWAL_OUTCOME_GONE
    await sandboxes.release(session, 5, reason="IDLE_EXPIRED")
    stopped = await sandboxes.renew(holder, (session, 5, 1), tenure="PARKED")
    assert stopped[0].outcome == sandbox_pb2.RENEWAL_OUTCOME_GONE


async def test_endpoint_is_told_to_the_claim_that_holds(sandboxes: Sandboxes, session: str, holder: str) -> None:
    assert (await refused(sandboxes.endpoint(session, 1))).reason == "SANDBOX_NOT_FOUND"
    answer = await sandboxes.acquire(session, 2, holder=holder)
    found = await sandboxes.endpoint(session, 2)
    assert (found.sandbox_id, found.endpoint) == (answer.sandbox_id, answer.endpoint)
    assert (await refused(sandboxes.endpoint(session, 1))).reason == "FENCED"
    assert (await refused(sandboxes.endpoint(session, 3))).reason == "SANDBOX_NOT_FOUND"


async def test_what_another_process_did_with_a_parked_sandbox_counts(
    sandboxes: Sandboxes,
    sandbox_root: Path,
    servers: Servers,
    module_postgres_dsn: str,
    session: str,
    holder: str,
) -> None:
    """Each process remembers what it parked; it goes by the rows all the same."""
    environment = service_environment(module_postgres_dsn, sandbox_root, HEARTH_AGENTS=agents_with_stubborn())
    other = ServiceProcess("services.sandbox", servers.scratch(), environment)
    other.start_blocking()
    try:
        async with connected(other.address) as elsewhere:
            first = await sandboxes.acquire(session, 1, holder=holder)
            assert disposition(await sandboxes.release(session, 1)) == "PARKED"
            assert how(await elsewhere.acquire(session, 2, holder=holder)) == "ATTACHED"
            assert disposition(await elsewhere.release(session, 2)) == "PARKED"
            # Remembered here at claim 1, but parked anew at claim 2.
            again = await sandboxes.acquire(session, 3, holder=holder)
            assert (how(again), again.sandbox_id) == ("ATTACHED", first.sandbox_id)
            assert disposition(await sandboxes.release(session, 3)) == "PARKED"
            # Remembered here, but the other one was told of a higher claim, and then gave the sandbox up.
            assert how(await elsewhere.acquire(session, 9, holder=holder)) == "ATTACHED"
            assert (await refused(sandboxes.acquire(session, 4, holder=holder))).reason == "FENCED"
            assert disposition(await elsewhere.release(session, 9, reason="FAILED_TURN")) == "DELETED"
            assert how(await sandboxes.acquire(session, 10, holder=holder)) == "CREATED"
    finally:
        assert other.stop() == 0
