"""What operators do with `hearth sandboxes`, `hearth pool` and `hearth doctor`, on a stack with live agents."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.chassis.auth import hash_token
from tests.support.cli import Hearth, running

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def session_with_an_agent(hearth: Hearth) -> str:
    """A session whose agent is idle."""
    session = f"operators-{uuid.uuid4().hex[:8]}"
    assert (await hearth.run("send", session, "hello", "--wait")).code == 0
    return session


async def entry_of(hearth: Hearth, session: str) -> dict[str, Any] | None:
    entries = (await hearth.run("pool", "entries", "--json")).json()["entries"]
    return next((entry for entry in entries if entry["session"]["session"] == session), None)


@pytest.mark.exhaustive
async def test_a_sandbox_is_listed_shown_evicted_and_deleted(hearth: Hearth) -> None:
    session = await session_with_an_agent(hearth)
    listing = ("sandboxes", "list", "--project", "demo", "--session", session)
    (parked,) = (await hearth.run(*listing, "--json")).json()["sandboxes"]
    assert (parked["tenure"], parked["observed"]) == ("TENURE_PARKED", "SANDBOX_STATE_RUNNING")
    entry = await entry_of(hearth, session)
    assert entry is not None
    assert entry["state"] == "ENTRY_STATE_IDLE"
    assert entry["sandbox_id"] == parked["sandbox_id"]
    assert "expires_at" in entry
    table = (await hearth.run("pool", "entries")).stdout
    assert parked["sandbox_id"] in table
    assert f"demo/{session}" in table

    # The answer comes when the sandbox is stopped, not before.
    assert (await hearth.run("pool", "evict", session, "--json")).json() == {
        "evicted": {"project": "demo", "session": session}
    }
    (stopped,) = (await hearth.run(*listing, "--json")).json()["sandboxes"]
    assert (stopped["tenure"], stopped["observed"]) == ("TENURE_FREE", "SANDBOX_STATE_STOPPED")
    assert stopped["sandbox_id"] == parked["sandbox_id"]
    assert await entry_of(hearth, session) is None
    again = await hearth.run("pool", "evict", session)
    assert again.code == 4
    assert "NOT_FOUND" in again.stderr

    shown = await hearth.run("sandboxes", "show", parked["sandbox_id"])
    assert "stopped" in shown.stdout
    assert (await hearth.run("sandboxes", "delete", parked["sandbox_id"], "--json")).json() == {
        "disposition": "DISPOSITION_DELETED"
    }
    assert (await hearth.run(*listing)).stdout.strip() == "no sandboxes"
    (gone,) = (await hearth.run(*listing, "--gone", "--json")).json()["sandboxes"]
    assert gone["observed"] == "SANDBOX_STATE_GONE"
    assert "there was nothing left" in (await hearth.run("sandboxes", "delete", parked["sandbox_id"])).stdout


async def test_usage_and_stats_count_what_was_done(hearth: Hearth) -> None:
    before = (await hearth.run("pool", "stats", "--json")).json()
    session = await session_with_an_agent(hearth)
    assert (await hearth.run("send", session, "hello again", "--wait")).code == 0
    after = (await hearth.run("pool", "stats", "--json")).json()

    def turns(stats: dict[str, Any], how: str) -> int:
        return int(stats.get("turns_by_how", {}).get(how, 0))

    assert turns(after, "cold") == turns(before, "cold") + 1
    assert turns(after, "warm") == turns(before, "warm") + 1
    assert int(after["entries_by_state"]["IDLE"]) >= 1
    text = (await hearth.run("pool", "stats")).stdout
    assert after["holder"] in text
    assert "% of " in text

    usage = (await hearth.run("sandboxes", "usage", "--json")).json()
    parked = next(tier for tier in usage["tiers"] if tier["tier"] == "parked")
    assert int(parked["count"]) >= 1
    (slots,) = usage["slots"]
    assert (slots["provider"], slots["cap"]) == ("local", 8)
    assert 1 <= slots["used"] <= 8
    assert "warm slots taken" in (await hearth.run("sandboxes", "usage")).stdout


async def test_rows_and_provider_are_compared_on_demand(hearth: Hearth) -> None:
    report = (await hearth.run("sandboxes", "reap", "--yes", "--json")).json()
    assert "refused_unknown" not in report
    assert "checked" in (await hearth.run("sandboxes", "reap")).stdout


async def test_wrong_use_and_refusals_say_what_to_do(hearth: Hearth) -> None:
    wrong = await hearth.run("sandboxes", "list", "--tenure", "warm")
    assert wrong.code == 2
    assert "active, parked, free, orphan" in wrong.stderr
    wrong = await hearth.run("sandboxes", "list", "--session", "s")
    assert wrong.code == 2
    assert "--project" in wrong.stderr
    refused = await hearth.run("sandboxes", "show", "no-uuid")
    assert refused.code == 4
    assert "sandbox_id" in refused.stderr
    refused = await hearth.run("sandboxes", "delete", str(uuid.uuid4()))
    assert refused.code == 4
    assert "SANDBOX_NOT_FOUND" in refused.stderr
    refused = await hearth.run("pool", "drain", str(uuid.uuid4()))
    assert refused.code == 4
    assert "this is replica" in refused.stderr
    nobody = Hearth(hearth.root, {"HEARTH_SANDBOX_ADDRESS": "127.0.0.1:1", "HEARTH_POOL_ADDRESS": "127.0.0.1:1"})
    for command in (("sandboxes", "list"), ("pool", "stats")):
        assert (await nobody.run(*command)).code == 3


async def test_the_doctor_finds_nothing_wrong_with_a_fresh_stack(hearth: Hearth) -> None:
    await session_with_an_agent(hearth)
    told = (await hearth.run("doctor", "--json")).json()
    assert told["findings"] == []
    assert told["unchecked"] == {}
    assert {service["name"]: service["state"] for service in told["services"]} == dict.fromkeys(
        ("pool", "history", "relay", "sandbox"), "serving"
    )
    assert {service["version"] for service in told["services"]} == {told["version"]}
    assert told["pool"]["entries_by_state"]["IDLE"]
    text = await hearth.run("doctor")
    assert text.code == 0
    assert "all is good" in text.stdout
    assert "8 slots of local" in text.stdout
    assert "an hour now" in text.stdout
    assert "no authentication" in text.stdout


async def test_the_doctor_says_who_does_not_answer(hearth: Hearth) -> None:
    # Nothing is reconciled by somebody else's hand meanwhile, so what it finds is what is away.
    lonely = Hearth(hearth.root, {"HEARTH_RELAY_ADDRESS": "127.0.0.1:1"})
    told = await lonely.run("doctor", "--json")
    assert told.code == 2
    assert '"name":"relay","address":"127.0.0.1:1","state":"no answer"' in told.stdout
    text = await lonely.run("doctor")
    assert text.code == 2
    assert "no answer" in text.stdout
    assert "all is good" not in text.stdout


@pytest.mark.timeout(180)
async def test_the_doctor_says_what_it_found_and_a_drained_pool_takes_nothing(scratch: Path) -> None:
    async with running(scratch / ".hearth", {"HEARTH_LOCAL_WARM_CAP": "0"}) as hearth:
        found = await hearth.run("doctor", "--json")
        assert found.code == 1
        told = json.loads(found.stdout)
        assert [finding["about"] for finding in told["findings"]] == ["settings"]
        assert "no turn on local is a warm one" in told["findings"][0]["message"]
        # So it is: what is not kept running is stopped.
        for how in ("cold", "restarted"):
            lines = (await hearth.run("send", "s", "hello", "--wait")).stdout
            assert how in lines

        (replica,) = (await hearth.run("pool", "replicas", "--json")).json()["replicas"]
        drained = await hearth.run("pool", "drain", replica["holder"], "--wait")
        assert "drained" in drained.stdout
        refused = await hearth.run("send", "s", "hello")
        assert refused.code == 3
        found = await hearth.run("doctor")
        assert found.code == 1
        assert "no replica takes new turns" in found.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_the_doctor_sees_a_sandbox_whose_holder_died(scratch: Path) -> None:
    async with running(scratch / ".hearth") as hearth:
        assert (await hearth.run("send", "s", "hello", "--wait")).code == 0
        pool = psutil.Process(hearth.pids()["pool"])
        pool.kill()
        psutil.wait_procs([pool], 10)
        silent = await hearth.run("doctor")
        assert silent.code == 2
        assert (await hearth.up()).json()["started"]
        async with asyncio.timeout(60):
            while (found := await hearth.run("doctor", "--json")).code == 0:
                pass
        told = json.loads(found.stdout)
        assert [finding["about"] for finding in told["findings"]] == ["leak"], told
        assert "no living replica" in told["findings"][0]["message"]
        (sandbox,) = (await hearth.run("sandboxes", "list", "--json")).json()["sandboxes"]
        assert sandbox["sandbox_id"] in told["findings"][0]["message"]
        assert (await hearth.run("sandboxes", "delete", sandbox["sandbox_id"])).code == 0
        assert (await hearth.run("doctor")).code == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
async def test_what_a_token_may_not_ask_is_left_out_and_said(scratch: Path) -> None:
    tokens = {
        "whole": {"name": "all", "project": "*", "scopes": ["read", "run", "admin", "internal"]},
        "demo-admin": {"name": "ann", "project": "demo", "scopes": ["read", "run", "admin"]},
        "demo-reader": {"name": "bob", "project": "demo", "scopes": ["read"]},
    }
    auth = scratch / "auth.json"
    auth.write_text(json.dumps({hash_token(token): entry for token, entry in tokens.items()}))
    async with running(scratch / ".hearth", {"HEARTH_AUTH_FILE": str(auth), "HEARTH_TOKEN": "whole"}) as hearth:
        told = (await hearth.run("doctor", "--json")).json()
        assert told["unchecked"] == {}
        assert told["notes"] == []

        ann = Hearth(hearth.root, {"HEARTH_TOKEN": "demo-admin"})
        told = (await ann.run("doctor", "--json")).json()
        assert list(told["unchecked"]) == ["unknown instances"]
        assert "PROJECT_DENIED" in told["unchecked"]["unknown instances"]
        assert told["usage"] is not None
        refused = await ann.run("sandboxes", "reap")
        assert refused.code == 4
        assert "PROJECT_DENIED" in refused.stderr

        bob = Hearth(hearth.root, {"HEARTH_TOKEN": "demo-reader"})
        told = (await bob.run("doctor", "--json")).json()
        assert set(told["unchecked"]) == {
            "pool stats",
            "replicas",
            "entries",
            "unknown instances",
            "usage",
            "sandboxes",
        }
        for command in (("pool", "stats"), ("sandboxes", "list")):
            assert (await bob.run(*command)).code == 4
