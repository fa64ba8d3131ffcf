"""Numbers and enums as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
import typer

from hearth.cli import words
from hearth.cli.control import chosen_of
from hearth.cli.pool import share
from hearth.cli.spec import policy_of
from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2, session_pb2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (90_000, "1 d 1 h"),
        (86_399, "23 h 59 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert words.span(seconds) == text


def test_a_clock_that_is_behind_is_no_time_ago() -> None:
    now = datetime.now(UTC)
    assert words.since(now + timedelta(seconds=5), now) == "0 s"


@pytest.mark.parametrize(
    ("micro", "text"),
    [(0, "$0.00"), (170_000, "$0.1700"), (900, "$0.0009"), (99, "under $0.0001"), (3_400_000, "$3.40")],
)
def test_dollars(micro: int, text: str) -> None:
    assert words.dollars(micro) == text


def test_values_of_enums() -> None:
    assert words.tenure(sandbox_pb2.TENURE_PARKED) == "parked"
    assert words.tenure(sandbox_pb2.TENURE_UNSPECIFIED) == ""
    assert words.state(sandbox_pb2.SANDBOX_STATE_STOPPED) == "stopped"
    assert words.state(cast("sandbox_pb2.SandboxState.ValueType", 4711)) == "4711"
    assert words.session(session_pb2.SessionKey(project="p", session="s")) == "p/s"
    assert words.session(session_pb2.SessionKey()) == ""


def test_the_share_of_warm_turns() -> None:
    assert share({}) == "no turns yet"
    assert share({"warm": 3, "cold": 1}) == "75% of 4 turns"
    # A turn that never reached an agent is none of them.
    assert share({"": 2}) == "no turns yet"


def test_how_executions_and_interactions_stand() -> None:
    running = control_pb2.Execution(state=control_pb2.EXECUTION_STATE_RUNNING)
    failed = control_pb2.Execution(
        state=control_pb2.EXECUTION_STATE_TERMINAL,
        outcome=control_pb2.EXECUTION_OUTCOME_FAILED,
        failure_code="AGENT_EXITED",
    )
    assert words.execution(control_pb2.Execution()) == ""
    assert words.execution(running) == "running"
    assert words.execution(failed) == "failed, AGENT_EXITED"
    asked = control_pb2.Interaction(state=control_pb2.INTERACTION_STATE_PENDING)
    answered = control_pb2.Interaction(state=control_pb2.INTERACTION_STATE_ANSWERED, decision=event_pb2.DECISION_DENIED)
    closed = control_pb2.Interaction(
        state=control_pb2.INTERACTION_STATE_CLOSED, resolution=event_pb2.INTERACTION_RESOLUTION_EXPIRED
    )
    assert [words.gate(found) for found in (asked, answered, closed)] == [
        "pending",
        "denied, answered",
        "closed, expired",
    ]


WHOLE = "0b9f7b3c-3b1e-4c59-9d0a-0d7c2a8d4f11"


def test_ids_are_meant_by_how_they_begin() -> None:
    ids = ["aa1", "aa2", "b"]
    assert words.begun_by("b", ids) == "b"
    assert words.begun_by(WHOLE, ids) == WHOLE
    for wrong in ("a", "", "c"):
        with pytest.raises(typer.BadParameter):
            words.begun_by(wrong, ids)
    assert chosen_of([], ["only"]) == ["only"]
    assert chosen_of([], []) == []
    assert chosen_of(["aa1", WHOLE], ids) == ["aa1", WHOLE]
    with pytest.raises(typer.BadParameter, match="3 are open"):
        chosen_of([], ids)


def test_policies_are_written_by_tool() -> None:
    ask, allow, deny = (
        control_pb2.PERMISSION_ACTION_ASK,
        control_pb2.PERMISSION_ACTION_ALLOW,
        control_pb2.PERMISSION_ACTION_DENY,
    )
    assert policy_of("") is None
    assert policy_of("ask") == control_pb2.PermissionPolicy(default_action=ask)
    rules = [
        control_pb2.PermissionRule(tool="search", action=allow),
        control_pb2.PermissionRule(tool="rm*", action=deny),
    ]
    assert policy_of("ask, search=allow,rm*=deny") == control_pb2.PermissionPolicy(default_action=ask, rules=rules)
    assert policy_of("search=allow,rm*=deny") == control_pb2.PermissionPolicy(rules=rules)
    for wrong in ("maybe", "search=", "=allow", "ask,allow", "search=allow,", "allow=search"):
        with pytest.raises(typer.BadParameter):
            policy_of(wrong)
