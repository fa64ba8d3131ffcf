"""What the policy of a session says when the agent asks for leave to run a tool."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from hearth.session.v1 import session_pb2
from hearth.types.v1 import event_pb2


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


def asking_fields(permissions: session_pb2.PermissionPolicy, path: str) -> list[str]:
    """The fields of a policy that want a person to be asked; `path` is where the policy stands in the request."""
    fields = []
    if permissions.default_action == session_pb2.PERMISSION_ACTION_ASK:
        fields.append(f"{path}.default_action")
    for index, rule in enumerate(permissions.rules):
        if rule.action == session_pb2.PERMISSION_ACTION_ASK:
            fields.append(f"{path}.rules[{index}].action")
    return fields


def resolved_by_policy(interaction_id: str, tool_call_id: str, allowed: bool) -> event_pb2.InteractionResolved:
    """What readers are told of an answer that the policy gave."""
    return event_pb2.InteractionResolved(
        interaction_id=interaction_id,
        tool_call_id=tool_call_id,
        resolution=event_pb2.INTERACTION_RESOLUTION_POLICY,
        decision=event_pb2.DECISION_ALLOWED if allowed else event_pb2.DECISION_DENIED,
        decided_by="policy",
    )


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
