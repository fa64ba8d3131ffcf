"""Fingerprints: what needs a new sandbox, what a new daemon, what neither; and the next step of an Acquire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.secret import Secret, hidden
from services.sandbox.claims import Claim
from services.sandbox.compatibility import (
    AgentCommand,
    SecretVariable,
    Spec,
    Step,
    Wanted,
    daemon_fingerprint,
    fingerprint,
    network_policy,
    next_step,
)
from services.sandbox.rows import Key, Row
from services.sandbox.states import Desired, Observed, Tenure

SPEC = Spec(
    provider="local",
    agent="scripted",
    image="img:1",
    target="eu",
    cpus=2,
    memory_mib=1024,
    disk_mib=2048,
    network="ALLOW_LIST",
    allow=("10.0.0.0/8", "192.168.0.0/16"),
    env=hidden({"A": "1", "B": "2"}),
    secrets=(SecretVariable("KEY", 1, Secret("hush")),),
)


BAKED = {"snapshot": "v1", "volume": "workspaces"}


@pytest.mark.parametrize(
    "change",
    [
        {"provider": "daytona"},
        {"agent": "codex"},
        {"image": "", "snapshot": "snap"},
        {"image": "img:2"},
        {"target": "us"},
        {"cpus": 4},
        {"memory_mib": 1},
        {"disk_mib": 1},
        {"env": hidden({"A": "1"})},
        {"env": hidden({"A": "1", "C": "2"})},
        {"secrets": ()},
        {"secrets": (SecretVariable("KEY", 2, Secret("hush")),)},
        {"secrets": (SecretVariable("OTHER", 1, Secret("hush")),)},
    ],
)
def test_what_creation_bakes_in_changes_the_fingerprint(change: dict[str, object]) -> None:
    assert fingerprint(replace(SPEC, **change), BAKED) != fingerprint(SPEC, BAKED)  # type: ignore[arg-type]


@pytest.mark.parametrize("baked", [{}, {**BAKED, "snapshot": "v2"}, {**BAKED, "volume": "other"}])
def test_so_does_what_the_provider_chooses_and_adds(baked: dict[str, str]) -> None:
    assert fingerprint(SPEC, baked) != fingerprint(SPEC, BAKED)


@pytest.mark.parametrize(
    "change",
    [
        {"env": hidden({"B": "2", "A": "other value"})},
        {"network": "OPEN", "allow": ()},
        {"secrets": (SecretVariable("KEY", 1, Secret("another value")),)},
    ],
)
def test_order_spelling_and_values_do_not(change: dict[str, object]) -> None:
    assert fingerprint(replace(SPEC, **change), BAKED) == fingerprint(SPEC, BAKED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "policy"),
    [
        ({}, "ALLOW_LIST 10.0.0.0/8 192.168.0.0/16"),
        ({"allow": ("192.168.0.0/16", " 10.0.0.0/8 ", "10.0.0.0/8")}, "ALLOW_LIST 10.0.0.0/8 192.168.0.0/16"),
        ({"allow": ()}, "BLOCKED"),
        ({"network": "BLOCKED", "allow": ()}, "BLOCKED"),
        ({"network": "OPEN", "allow": ()}, "OPEN"),
        ({"network": "", "allow": ()}, ""),
    ],
)
def test_w_r04_a_network_policy_has_one_spelling(change: dict[str, object], policy: str) -> None:
    assert network_policy(replace(SPEC, **change)) == policy  # type: ignore[arg-type]


def test_a_secret_shows_in_no_text_and_no_digest() -> None:
    other = replace(SPEC, secrets=(SecretVariable("KEY", 1, Secret("another value")),))
    agents = {"scripted": AgentCommand(("run",), hidden({"TOKEN": "hush-too"}))}
    assert daemon_fingerprint(SPEC, agents) == daemon_fingerprint(other, agents)
    assert "hush" not in f"{SPEC!r} {agents!r}"
    assert len(fingerprint(SPEC, BAKED)) == 64


def test_values_and_commands_need_a_new_daemon() -> None:
    agents = {"scripted": AgentCommand(("run",))}
    before = daemon_fingerprint(SPEC, agents)
    assert daemon_fingerprint(replace(SPEC, env=hidden({"A": "1", "B": "3"})), agents) != before
    assert daemon_fingerprint(SPEC, {"scripted": AgentCommand(("run", "--fast"))}) != before
    assert daemon_fingerprint(SPEC, {"scripted": AgentCommand(("run",), hidden({"X": "1"}))}) != before


WANTED = Wanted(Claim(5, 1), "me", "print", "daemon")
ROW = Row(
    sandbox_id="id",
    key=Key("p", "s"),
    provider="local",
    agent="scripted",
    fingerprint="print",
    daemon_fingerprint="daemon",
    desired=Desired.RUNNING,
    observed=Observed.RUNNING,
    tenure=Tenure.PARKED,
    holder="me",
    claim=Claim(4, 1),
    token=Secret("t"),
    url="http://x",
    network="",
)


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({}, Step.ATTACH),
        ({"tenure": Tenure.ACTIVE}, Step.ATTACH),
        ({"holder": "other"}, Step.RESTART),
        ({"token": None}, Step.RESTART),
        ({"url": ""}, Step.RESTART),
        ({"daemon_fingerprint": "old"}, Step.RESTART),
        ({"fingerprint": "old"}, Step.REPLACE),
        ({"observed": Observed.STOPPED, "fingerprint": "old"}, Step.REPLACE),
        ({"observed": Observed.STOPPED, "holder": None, "tenure": Tenure.FREE}, Step.START),
        ({"observed": Observed.ERROR}, Step.REPLACE),
        ({"observed": Observed.UNKNOWN}, Step.REPLACE),
        ({"desired": Desired.GONE}, Step.REPLACE),
        ({"worker": "w", "observed": Observed.CREATING}, Step.WAIT),
        ({"worker": "w", "observed": Observed.CREATING, "overdue": True}, Step.SETTLE),
        ({"worker": "w", "observed": Observed.DELETING, "desired": Desired.GONE}, Step.WAIT),
        ({"worker": "w", "observed": Observed.DELETING, "desired": Desired.GONE, "overdue": True}, Step.REPLACE),
        # This claim was served: whatever is asked for now, it is told the same.
        ({"claim": Claim(5, 1), "tenure": Tenure.ACTIVE}, Step.ANSWER),
        ({"claim": Claim(5, 1), "tenure": Tenure.ACTIVE, "fingerprint": "old"}, Step.ANSWER),
        ({"claim": Claim(5, 1), "tenure": Tenure.ACTIVE, "token": None}, Step.RESTART),
    ],
)
def test_next_step(change: dict[str, object], step: Step) -> None:
    assert next_step(replace(ROW, **change), WANTED) is step  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("has", "converges", "observed", "step"),
    [
        ("BLOCKED", True, Observed.RUNNING, Step.ATTACH),
        ("OPEN", True, Observed.RUNNING, Step.RESTART),
        ("?", True, Observed.RUNNING, Step.RESTART),
        ("OPEN", True, Observed.STOPPED, Step.START),
        ("OPEN", False, Observed.RUNNING, Step.REPLACE),
        ("OPEN", False, Observed.STOPPED, Step.REPLACE),
        ("?", False, Observed.RUNNING, Step.REPLACE),
        ("BLOCKED", False, Observed.RUNNING, Step.ATTACH),
    ],
)
def test_w_r04_another_network_policy_is_set_under_a_new_daemon_or_needs_another_sandbox(
    has: str, converges: bool, observed: Observed, step: Step
) -> None:
    wanted = replace(WANTED, network="BLOCKED", converges=converges)
    assert next_step(replace(ROW, network=has, observed=observed), wanted) is step


def test_without_a_sandbox_one_is_created() -> None:
    assert next_step(None, WANTED) is Step.CREATE
