"""Behaviours of tests/behaviours.toml that show at the sandbox service: one sandbox of a session, got back or made new,
and what becomes of it for each reason to give it back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.types.v1 import session_pb2
from tests.support.sandboxes import PROJECT, Sandboxes, claim, disposition, how, members, new_id

SECRET = "quite-secret"
FATES = {
    "CLEAN_TURN": "PARKED",
    "STOPPED_WARM": "PARKED",
    "IDLE_EXPIRED": "STOPPED",
    "CAPACITY": "STOPPED",
    "SHUTDOWN_IDLE": "STOPPED",
    "SESSION_INCOMPATIBLE": "STOPPED",
    "CONTINUITY_INVALID": "STOPPED",
    "KILLED": "DELETED",
    "FAILED_TURN": "DELETED",
    "ABORTED": "DELETED",
    "RUNTIME_INCOMPATIBLE": "DELETED",
    "SANDBOX_INCOMPATIBLE": "DELETED",
    "SHUTDOWN_IN_FLIGHT": "DELETED",
    "LOST": "DELETED",
    "UNSPECIFIED": "DELETED",
}


def test_every_reason_of_the_contract_has_a_fate_here() -> None:
    names = {name.removeprefix("RELEASE_REASON_") for name in sandbox_pb2.ReleaseReason.keys()}  # noqa: SIM118
    assert names == set(FATES)


@pytest.mark.parametrize("reason", FATES)
async def test_w_p17_w_r07_w_r09_the_reason_alone_decides_whoever_gives_it_back(
    sandboxes: Sandboxes, holder: str, reason: str
) -> None:
    for by in (holder, ""):
        session = f"s-{new_id()}"
        acquired = await sandboxes.acquire(session, holder=holder)
        request = sandbox_service_pb2.ReleaseRequest(
            session=session_pb2.SessionKey(project=PROJECT, session=session),
            claim=claim(1, 1),
            reason=sandbox_pb2.ReleaseReason.Value(f"RELEASE_REASON_{reason}"),
            holder=by,
        )
        assert disposition(await sandboxes.stub.Release(request, timeout=60)) == FATES[reason]
        seen = await sandboxes.get(acquired.sandbox_id)
        wanted = {
            "PARKED": sandbox_pb2.SANDBOX_STATE_RUNNING,
            "STOPPED": sandbox_pb2.SANDBOX_STATE_STOPPED,
            "DELETED": sandbox_pb2.SANDBOX_STATE_GONE,
        }
        assert seen.observed == wanted[FATES[reason]]
        assert bool(members(acquired.sandbox_id)) == (FATES[reason] == "PARKED")
        await sandboxes.delete(acquired.sandbox_id)


async def test_w_p17_a_reason_of_a_later_version_deletes(sandboxes: Sandboxes, holder: str) -> None:
    session = f"s-{new_id()}"
    acquired = await sandboxes.acquire(session, holder=holder)
    request = sandbox_service_pb2.ReleaseRequest(
        session=session_pb2.SessionKey(project=PROJECT, session=session), claim=claim(1, 1), holder=holder
    )
    request.reason = 4711  # type: ignore[assignment]
    assert disposition(await sandboxes.stub.Release(request, timeout=60)) == "DELETED"
    assert members(acquired.sandbox_id) == []


async def test_w_r05_whatever_agent_was_used_last_a_session_has_one_sandbox(sandboxes: Sandboxes, holder: str) -> None:
    session = f"s-{new_id()}"
    for epoch, agent in enumerate(("scripted", "stubborn", "scripted", "stubborn"), start=1):
        acquired = await sandboxes.acquire(session, epoch, holder=holder, spec=sandbox_pb2.SandboxSpec(agent=agent))
        (row,) = await sandboxes.list(project=PROJECT, session=session)
        assert (row.sandbox_id, row.agent) == (acquired.sandbox_id, agent)
        await sandboxes.release(session, epoch, reason="IDLE_EXPIRED" if epoch % 2 else "CLEAN_TURN")


async def test_w_r06_what_cannot_be_got_back_costs_one_new_sandbox(
    sandboxes: Sandboxes, holder: str, sandbox_root: Path
) -> None:
    session = f"s-{new_id()}"
    first = await sandboxes.acquire(session, holder=holder)
    await sandboxes.release(session, reason="IDLE_EXPIRED")
    # Its disk is lost; nobody has told the service.
    (directory,) = [path for path in sandbox_root.rglob(f"*{first.sandbox_id}*") if path.is_dir()]
    shutil.rmtree(directory)
    second = await sandboxes.acquire(session, 2, holder=holder)
    assert how(second) == "CREATED"
    assert second.sandbox_id != first.sandbox_id
    rows = await sandboxes.list(project=PROJECT, session=session, include_gone=True)
    assert {row.sandbox_id: row.observed for row in rows} == {
        first.sandbox_id: sandbox_pb2.SANDBOX_STATE_GONE,
        second.sandbox_id: sandbox_pb2.SANDBOX_STATE_RUNNING,
    }
    # The next turns go on with it.
    await sandboxes.release(session, 2)
    assert how(await sandboxes.acquire(session, 3, holder=holder)) == "ATTACHED"


async def test_w_e01_one_sandbox_serves_many_turns_and_is_ended_once(sandboxes: Sandboxes, holder: str) -> None:
    session = f"s-{new_id()}"
    ids = set()
    for epoch in range(1, 6):
        ids.add((await sandboxes.acquire(session, epoch, holder=holder)).sandbox_id)
        assert disposition(await sandboxes.release(session, epoch)) == "PARKED"
    assert len(ids) == 1
    ended = await asyncio.gather(*(sandboxes.release(session, 5, reason="KILLED") for _ in range(3)))
    assert {disposition(answer) for answer in ended} <= {"DELETED", "NOTHING"}
    assert disposition(await sandboxes.release(session, 5, reason="KILLED")) == "NOTHING"
    (gone,) = await sandboxes.list(project=PROJECT, session=session, include_gone=True)
    assert gone.observed == sandbox_pb2.SANDBOX_STATE_GONE


async def test_w_e01_an_acquire_that_fails_in_the_middle_leaves_nothing(sandboxes: Sandboxes, holder: str) -> None:
    session = f"s-{new_id()}"
    taking = asyncio.create_task(sandboxes.acquire(session, holder=holder))
    async with asyncio.timeout(20):
        while not await sandboxes.list(project=PROJECT, session=session):
            pass
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await sandboxes.release(session, reason="ABORTED")
    assert await sandboxes.list(project=PROJECT, session=session) == []
    for row in await sandboxes.list(project=PROJECT, session=session, include_gone=True):
        assert members(row.sandbox_id) == []


async def test_w_s01_secrets_count_by_slot_and_generation_and_are_shown_to_nobody(
    sandboxes: Sandboxes, holder: str
) -> None:
    session = f"s-{new_id()}"

    def spec(**slots: int) -> sandbox_pb2.SandboxSpec:
        return sandbox_pb2.SandboxSpec(
            agent="scripted",
            secrets=[
                sandbox_pb2.SecretSlot(env_name=name, value=f"{SECRET}-{generation}", generation=generation)
                for name, generation in slots.items()
            ],
        )

    wanted = [
        (spec(KEY=1), "CREATED"),
        (spec(KEY=1), "ATTACHED"),
        (spec(KEY=2), "CREATED"),
        (spec(KEY=2, OTHER=1), "CREATED"),
        (spec(OTHER=1), "CREATED"),
        (spec(), "CREATED"),
        (spec(), "ATTACHED"),
    ]
    for epoch, (one, expected) in enumerate(wanted, start=1):
        acquired = await sandboxes.acquire(session, epoch, holder=holder, spec=one)
        assert how(acquired) == expected, epoch
        assert SECRET not in str(await sandboxes.get(acquired.sandbox_id))
        await sandboxes.release(session, epoch)
