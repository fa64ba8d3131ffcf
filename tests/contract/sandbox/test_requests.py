"""What the service answers to wrong input, and what its reading calls tell."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path

import aiohttp
import pytest

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.support.sandboxes import Daemon, Sandboxes, claim, disposition, members, new_id, refused, state

GOOD = {
    "session": session_pb2.SessionKey(project="p1", session="bad-input"),
    "claim": claim(1),
    "holder": "6f1d3c0e-58a4-4d0b-9a63-2f7c1b0e9d51",
    "spec": sandbox_pb2.SandboxSpec(agent="scripted"),
}


def spec(**fields: object) -> dict[str, object]:
    return {"spec": sandbox_pb2.SandboxSpec(agent="scripted", **fields)}  # type: ignore[arg-type]


def network(mode: sandbox_pb2.NetworkMode.ValueType, *allow: str) -> dict[str, object]:
    return spec(network=sandbox_pb2.NetworkPolicy(mode=mode, allow=allow))


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"session": session_pb2.SessionKey(project="", session="s")}, "session.project", "INVALID_FIELD"),
        ({"session": session_pb2.SessionKey(project="p", session="a/b")}, "session.session", "INVALID_FIELD"),
        ({"session": session_pb2.SessionKey(project="p", session="x" * 129)}, "session.session", "INVALID_FIELD"),
        ({"claim": claim(0)}, "claim.epoch", "INVALID_FIELD"),
        ({"claim": claim(1, 0)}, "claim.attempt", "INVALID_FIELD"),
        ({"claim": claim(2**63)}, "claim.epoch", "INVALID_FIELD"),
        ({"holder": ""}, "holder", "INVALID_FIELD"),
        ({"holder": "me"}, "holder", "INVALID_FIELD"),
        ({"spec": sandbox_pb2.SandboxSpec()}, "spec.agent", "UNKNOWN_AGENT"),
        ({"spec": sandbox_pb2.SandboxSpec(agent="nobody")}, "spec.agent", "UNKNOWN_AGENT"),
        (spec(provider="moon"), "spec.provider", "UNKNOWN_PROVIDER"),
        (spec(provider="daytona"), "spec.provider", "UNKNOWN_PROVIDER"),
        (spec(snapshot="a", image="b"), "spec.image", "INVALID_FIELD"),
        (spec(image="x" * 2000), "spec.image", "TOO_LARGE"),
        (spec(env={"1A": ""}), "spec.env['1A']", "INVALID_FIELD"),
        (spec(env={"HOME": "/"}), "spec.env['HOME']", "INVALID_FIELD"),
        (spec(env={"HEARTH_SANDBOX_ID": "x"}), "spec.env['HEARTH_SANDBOX_ID']", "INVALID_FIELD"),
        (spec(env={"A": "a\0b"}), "spec.env['A']", "INVALID_FIELD"),
        (spec(env={"A": "x" * 200_000}), "spec.env", "TOO_LARGE"),
        (
            spec(env={"A": "1"}, secrets=[sandbox_pb2.SecretSlot(env_name="A", value="x")]),
            "spec.secrets[0].env_name",
            "INVALID_FIELD",
        ),
        (network(sandbox_pb2.NETWORK_MODE_OPEN, "10.0.0.0/8"), "spec.network.allow", "INVALID_FIELD"),
        (network(sandbox_pb2.NETWORK_MODE_ALLOW_LIST, "example.org"), "spec.network.allow[0]", "INVALID_FIELD"),
    ],
)
async def test_a_wrong_field_is_named_and_changes_nothing(
    sandboxes: Sandboxes, change: dict[str, object], field: str, reason: str
) -> None:
    request = sandbox_service_pb2.AcquireRequest(**{**GOOD, **change})  # type: ignore[arg-type]
    refusal = await refused(_acquire(sandboxes, request))
    assert refusal.code.name == "INVALID_ARGUMENT"
    assert refusal.reason == reason
    assert field in [found for found, _ in refusal.field_violations]
    assert await sandboxes.list(include_gone=True, project="p1", session="bad-input") == []
    # The claim was not taken either: a lower one is still free.
    assert (await refused(sandboxes.endpoint("bad-input", 1))).reason == "SANDBOX_NOT_FOUND"


async def _acquire(
    sandboxes: Sandboxes, request: sandbox_service_pb2.AcquireRequest
) -> sandbox_service_pb2.AcquireResponse:
    import grpc.aio

    try:
        return await sandboxes.stub.Acquire(request, timeout=10)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


async def test_what_local_cannot_keep_is_refused(sandboxes: Sandboxes, session: str, holder: str) -> None:
    wanted = sandbox_pb2.SandboxSpec(agent="scripted", resources=sandbox_pb2.Resources(cpus=2))
    refusal = await refused(sandboxes.acquire(session, holder=holder, spec=wanted))
    assert (refusal.code.name, refusal.reason) == ("FAILED_PRECONDITION", "PROVIDER_REFUSED")
    assert [field for field, _ in refusal.field_violations] == ["spec.resources"]
    assert await sandboxes.list(project="p1", session=session, include_gone=True) == []


@pytest.mark.parametrize("call", ["get", "delete"])
async def test_unknown_and_malformed_sandbox_ids(sandboxes: Sandboxes, call: str) -> None:
    method = getattr(sandboxes, call)
    refusal = await refused(method(new_id()))
    assert (refusal.code.name, refusal.reason) == ("NOT_FOUND", "SANDBOX_NOT_FOUND")
    malformed = await refused(method("hearth-1"))
    assert [field for field, _ in malformed.field_violations] == ["sandbox_id"]


async def test_renewals_are_bounded_and_checked(sandboxes: Sandboxes, session: str, holder: str) -> None:
    too_many: HearthError = await refused(sandboxes.renew(holder, *((session, 1, 1) for _ in range(1001))))
    assert [field for field, _ in too_many.field_violations] == ["renewals"]
    assert len(await sandboxes.renew(holder, *((f"{session}-{n}", 1, 1) for n in range(1000)))) == 1000
    assert await sandboxes.renew(holder) == []
    wrong = await refused(sandboxes.renew(holder, (session, 1, 1), tenure="FREE"))
    assert [field for field, _ in wrong.field_violations] == ["renewals[0].tenure"]


async def test_pages_are_complete_and_in_order(sandboxes: Sandboxes, holder: str) -> None:
    project = f"p-{new_id()}"
    made = [(await sandboxes.acquire(f"s{number}", holder=holder, project=project)).sandbox_id for number in range(5)]
    await sandboxes.release("s0", reason="KILLED", project=project)
    await sandboxes.release("s1", project=project)
    listed = await sandboxes.list(project=project, page_size=2, include_gone=True)
    assert [sandbox.sandbox_id for sandbox in listed] == made
    assert [sandbox.sandbox_id for sandbox in await sandboxes.list(project=project, page_size=1)] == made[1:]
    parked = await sandboxes.list(project=project, tenure=sandbox_pb2.TENURE_PARKED)
    assert [sandbox.sandbox_id for sandbox in parked] == made[1:2]
    one = await sandboxes.list(project=project, session="s3")
    assert [sandbox.sandbox_id for sandbox in one] == made[3:4]
    for fields, field in (({"session": "s1"}, "project"), ({"tenure": 99}, "tenure")):
        refusal = await refused(sandboxes.list(**fields))
        assert [found for found, _ in refusal.field_violations] == [field]
    too_early = base64.urlsafe_b64encode(f"0001-01-01T00:00:00+14:00 {new_id()}".encode()).decode()
    for token in ("x", "eA==", "MjAyNi0wMS0wMSB4", too_early):
        request = sandbox_service_pb2.ListSandboxesRequest(page_token=token)
        with pytest.raises(Exception, match="page_token"):
            await sandboxes.stub.ListSandboxes(request, timeout=10)


async def test_a_sandbox_is_shown_as_it_is(sandboxes: Sandboxes, session: str, holder: str) -> None:
    answer = await sandboxes.acquire(session, 4, 2, holder=holder)
    shown = await sandboxes.get(answer.sandbox_id)
    assert state(shown) == "RUNNING/ACTIVE"
    assert (shown.session.project, shown.session.session) == ("p1", session)
    assert (shown.provider, shown.agent, shown.holder) == ("local", "scripted", holder)
    assert (shown.claim.epoch, shown.claim.attempt) == (4, 2)
    assert len(shown.fingerprint) == 64
    assert shown.created_at.ToDatetime() < shown.changed_at.ToDatetime()
    await sandboxes.release(session, 4, 2, reason="IDLE_EXPIRED")
    stopped = await sandboxes.get(answer.sandbox_id)
    assert state(stopped) == "STOPPED/FREE"
    assert not stopped.HasField("claim")
    assert stopped.holder == ""


async def test_delete_is_for_any_state_and_may_be_repeated(sandboxes: Sandboxes, session: str, holder: str) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    assert await sandboxes.delete(answer.sandbox_id) == "DELETED"
    assert await sandboxes.delete(answer.sandbox_id) == "NOTHING"
    assert members(answer.sandbox_id) == []
    (outcome,) = await sandboxes.renew(holder, (session, 1, 1))
    assert outcome.outcome == sandbox_pb2.RENEWAL_OUTCOME_GONE
    assert disposition(await sandboxes.release(session, 1)) == "NOTHING"


async def test_delete_workspace_takes_sandbox_and_files(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    answer = await sandboxes.acquire(session, 3, holder=holder)
    workspace = Path(answer.workspace)
    # Some package caches take away the right to delete what is in them.
    made = await Daemon(http, answer.endpoint).run(
        "sh", "-c", f"cd {workspace} && mkdir -p a/b && touch a/b/c && chmod 500 a/b"
    )
    assert made["exitCode"] == 0
    assert (await refused(sandboxes.delete_workspace(session, 2))).reason == "FENCED"
    assert workspace.exists()
    await sandboxes.delete_workspace(session, 3, 1)
    assert not workspace.exists()
    assert members(answer.sandbox_id) == []
    await sandboxes.delete_workspace(session, 3, 1)
    assert (await refused(sandboxes.acquire(session, 3, holder=holder))).reason == "FENCED"


async def test_usage_counts_seconds_in_each_tier(sandboxes: Sandboxes, holder: str) -> None:
    project = f"p-{new_id()}"
    began = time.monotonic()
    await sandboxes.acquire("s", 1, holder=holder, project=project)
    await asyncio.sleep(0.3)
    await sandboxes.release("s", 1, project=project)
    await asyncio.sleep(0.3)
    await sandboxes.release("s", 1, reason="IDLE_EXPIRED", project=project)
    await asyncio.sleep(0.3)
    usage = await sandboxes.usage(project)
    tiers = {tier.tier: (tier.count, tier.total.ToMicroseconds() / 1e6) for tier in usage.tiers}
    assert tiers["active"][0] == tiers["parked"][0] == tiers["orphan"][0] == 0
    assert tiers["stopped"][0] == 1
    for tier in ("active", "parked", "stopped"):
        assert tiers[tier][1] >= 0.3
    # Of no second it is counted twice.
    assert sum(seconds for _, seconds in tiers.values()) <= time.monotonic() - began
    assert tiers["orphan"][1] == 0
    later = {tier.tier: tier.total.ToMicroseconds() / 1e6 for tier in (await sandboxes.usage(project)).tiers}
    assert later["stopped"] > tiers["stopped"][1]
    assert later["active"] == tiers["active"][1]
