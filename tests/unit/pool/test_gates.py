"""What the policy of a session answers an agent that asks."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from services.pool.control.gates import Policy, decide

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
