"""What is decided about the requests of an agent: by the policy of its session, and about answers of people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from hearth.session.v1 import session_pb2
from hearth.types.v1 import event_pb2
from services.chassis.errors import FailedPrecondition, HearthError
from services.pool.control.answers import refuse_constant
from services.pool.rows import Gate, GateState

TRANSITIONS: Final[Mapping[GateState, frozenset[GateState]]] = {
    GateState.PENDING: frozenset({GateState.ANSWERED, GateState.CLOSED}),
    GateState.ANSWERED: frozenset({GateState.CONSUMED, GateState.CLOSED}),
    GateState.CONSUMED: frozenset(),
    GateState.CLOSED: frozenset(),
}


class Policy(Enum):
    """The answer to an agent that asks."""

    ASK = "ask"
    ALLOW = "allow"
    DENY = "deny"


_POLICIES = {
    session_pb2.PERMISSION_ACTION_ASK: Policy.ASK,
    session_pb2.PERMISSION_ACTION_ALLOW: Policy.ALLOW,
    session_pb2.PERMISSION_ACTION_DENY: Policy.DENY,
}


def decide(permissions: session_pb2.PermissionPolicy, names: Iterable[str], default: Policy) -> Policy:
    """The first rule that matches one of `names` (name or title, and kind, of the tool) counts, else the default."""
    known = [name for name in names if name]
    for rule in permissions.rules:
        if any(_matches(rule.tool, name) for name in known):
            return _POLICIES.get(rule.action, default)
    return _POLICIES.get(permissions.default_action, default)


def resolved_by_policy(interaction_id: str, tool_call_id: str, allowed: bool) -> event_pb2.InteractionResolved:
    """What readers are told of an answer that the policy gave."""
    return event_pb2.InteractionResolved(
        interaction_id=interaction_id,
        tool_call_id=tool_call_id,
        resolution=event_pb2.INTERACTION_RESOLUTION_POLICY,
        decision=event_pb2.DECISION_ALLOWED if allowed else event_pb2.DECISION_DENIED,
        decided_by="policy",
    )


class Follow(Enum):
    """What follows for an execution that was paused."""

    NOTHING = "NOTHING"
    CONTINUE = "CONTINUE"
    PAUSE_QUEUE = "PAUSE_QUEUE"


def after(pending: int, answered: int) -> Follow:
    """What follows when so many gates of a paused execution wait for an answer, and so many for being passed on."""
    if pending:
        return Follow.NOTHING
    return Follow.CONTINUE if answered else Follow.PAUSE_QUEUE


def canonical(input_json: str) -> str:
    """Arguments in the one form by which they are compared: keys sorted, no white space; arguments that come as a JSON
    text in a string are what that text says. What is no JSON stays as it is."""
    try:
        value: object = json.loads(input_json, parse_constant=refuse_constant)
        if isinstance(value, str):
            inner = json.loads(value, parse_constant=refuse_constant)
            value = inner if isinstance(inner, dict | list) else value
    except (ValueError, RecursionError):
        return input_json
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def input_digest(input_json: str) -> bytes:
    """SHA-256 of the canonical arguments."""
    return hashlib.sha256(canonical(input_json).encode()).digest()


def closed(gate: Gate, *, expired: bool = False) -> HearthError:
    """The refusal of an answer to what waits for none any more."""
    words = {
        GateState.PENDING: "was not answered in time" if expired else "is open",
        GateState.ANSWERED: "was answered before",
        GateState.CONSUMED: "was answered before, and the agent was told",
        GateState.CLOSED: "was closed before it was answered",
    }
    metadata = {"interaction_id": gate.interaction_id, "state": str(gate.state)}
    if expired:
        metadata["resolution"] = "EXPIRED"
    elif gate.resolution is not None:
        metadata["resolution"] = str(gate.resolution)
    if gate.decision is not None:
        metadata["decision"] = str(gate.decision)
    return FailedPrecondition(
        f"the interaction {words[gate.state]}; nothing of this request was taken",
        reason="INTERACTION_CLOSED",
        metadata=metadata,
        resource=("interaction", gate.interaction_id, ""),
    )


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
