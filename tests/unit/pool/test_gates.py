"""What the policy of a session answers an agent that asks, and what is decided about the answers of people."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import grpc
import pytest

from hearth.session.v1 import session_pb2 as sessions
from services.pool.control.gates import TRANSITIONS, Follow, Policy, after, closed, decide, input_digest
from services.pool.rows import Decision, Gate, GateKind, GateState, Key, Resolution

ALLOW, DENY = sessions.PERMISSION_ACTION_ALLOW, sessions.PERMISSION_ACTION_DENY
ASK, UNSET = sessions.PERMISSION_ACTION_ASK, sessions.PERMISSION_ACTION_UNSPECIFIED


def policy(
    default: sessions.PermissionAction.ValueType, *rules: tuple[str, sessions.PermissionAction.ValueType]
) -> sessions.PermissionPolicy:
    return sessions.PermissionPolicy(
        default_action=default, rules=[sessions.PermissionRule(tool=tool, action=action) for tool, action in rules]
    )


@pytest.mark.parametrize(
    ("found", "names", "answer"),
    [
        (policy(UNSET), ("edit", "edit"), Policy.DENY),
        (policy(ALLOW), ("edit", "edit"), Policy.ALLOW),
        (policy(ASK), ("edit", "edit"), Policy.ASK),
        (policy(ASK, ("read*", ALLOW), ("rm", DENY)), ("rm", ""), Policy.DENY),
        (policy(ALLOW, ("rm", ASK)), ("rm", ""), Policy.ASK),
        (policy(DENY, ("edit", ALLOW)), ("edit", "other"), Policy.ALLOW),
        (policy(DENY, ("edit", ALLOW)), ("Edit a.txt", "edit"), Policy.ALLOW),
        (policy(DENY, ("edit", ALLOW)), ("edits", "other"), Policy.DENY),
        (policy(DENY, ("ed*", ALLOW)), ("edits", ""), Policy.ALLOW),
        (policy(DENY, ("*", ALLOW)), ("anything", ""), Policy.ALLOW),
        # The first that matches counts.
        (policy(ALLOW, ("rm*", DENY), ("*", ALLOW)), ("rm -rf", "execute"), Policy.DENY),
        # A rule without an action leaves it to the deployment, not to the policy's default.
        (policy(ALLOW, ("edit", UNSET)), ("edit", ""), Policy.DENY),
        # An agent that names nothing is not taken for one that names everything but what `*` says.
        (policy(ALLOW, ("edit", DENY)), ("", ""), Policy.ALLOW),
    ],
)
def test_decide(found: sessions.PermissionPolicy, names: tuple[str, str], answer: Policy) -> None:
    assert decide(found, names, Policy.DENY) is answer


@pytest.mark.parametrize(
    ("pending", "answered", "follows"),
    [
        (1, 0, Follow.NOTHING),
        (2, 3, Follow.NOTHING),
        (0, 1, Follow.CONTINUE),
        (0, 4, Follow.CONTINUE),
        (0, 0, Follow.PAUSE_QUEUE),
    ],
)
def test_what_follows_for_a_paused_execution(pending: int, answered: int, follows: Follow) -> None:
    assert after(pending, answered) is follows


def test_no_gate_leaves_an_end() -> None:
    ends = {state for state, following in TRANSITIONS.items() if not following}
    assert ends == {GateState.CONSUMED, GateState.CLOSED}
    assert set(TRANSITIONS) == set(GateState)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}', True),
        # A harness may give arguments as a text that holds them.
        ('"{\\"a\\": 1}"', '{"a":1}', True),
        ('"a"', '"a"', True),
        ('"1"', "1", False),
        ('{"a": 1}', '{"a": 2}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": "x"}', '{"a": "x "}', False),
        ('{"a": null}', "{}", False),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ("not json", "not json", True),
        ("not json", "not  json", False),
        ("NaN", "null", False),
        ("[" * 5000 + "]" * 5000, "[" * 5001 + "]" * 5001, False),
    ],
)
def test_arguments_are_the_same_only_if_they_say_the_same(one: str, other: str, same: bool) -> None:
    assert (input_digest(one) == input_digest(other)) is same


def gate(state: GateState, **more: object) -> Gate:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = Gate(
        "i", Key("p", "s"), "e", "t", "r", GateKind.APPROVAL, state, b"", b"", None, None, None, None, None,
        now, None, None, now,
    )  # fmt: skip
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]


def test_what_is_answered_already_says_how() -> None:
    error = closed(gate(GateState.ANSWERED, decision=Decision.DENIED, answered_by="ann"))
    assert (error.reason, error.code) == ("INTERACTION_CLOSED", grpc.StatusCode.FAILED_PRECONDITION)
    assert error.metadata == {"interaction_id": "i", "state": "ANSWERED", "decision": "DENIED"}
    error = closed(gate(GateState.CLOSED, resolution=Resolution.CANCELLED))
    assert error.metadata == {"interaction_id": "i", "state": "CLOSED", "resolution": "CANCELLED"}
    # Nobody has closed it yet, but its time is over.
    error = closed(gate(GateState.PENDING), expired=True)
    assert error.metadata == {"interaction_id": "i", "state": "PENDING", "resolution": "EXPIRED"}
