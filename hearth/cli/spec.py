"""What options of `hearth send` and `hearth chat` say of a session: its agent, what that may run, its credentials."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hearth.client import Client
from hearth.errors import NotFound
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import session_pb2

PERMISSIONS = {
    "ask": control_pb2.PERMISSION_ACTION_ASK,
    "allow": control_pb2.PERMISSION_ACTION_ALLOW,
    "deny": control_pb2.PERMISSION_ACTION_DENY,
}
POLICY_HELP = "what the agent may run: ask, allow or deny, and by tool, as `ask,search=allow,rm*=deny`; empty: as it is"


def policy_of(text: str) -> control_pb2.PermissionPolicy | None:
    """The policy that `ask,search=allow` describes: what counts for all tools, and for single ones, the first that
    matches; None for nothing. Raises `typer.BadParameter`."""
    if not text:
        return None
    policy = control_pb2.PermissionPolicy()
    for part in text.split(","):
        tool, rule, action = part.strip().rpartition("=")
        if action not in PERMISSIONS or bool(rule) != bool(tool):
            raise typer.BadParameter(f"{part!r} is none of {', '.join(PERMISSIONS)}", param_hint="--permissions")
        if tool:
            policy.rules.add(tool=tool, action=PERMISSIONS[action])
        elif policy.default_action:
            raise typer.BadParameter(f"{part!r} comes after another rule for all tools", param_hint="--permissions")
        else:
            policy.default_action = PERMISSIONS[action]
    return policy


def spec_of(
    agent: str, permissions: str, credentials: Sequence[control_pb2.CredentialBinding] = ()
) -> control_pb2.SessionSpec | None:
    """What options ask for of a spec; None when they ask for nothing."""
    policy = policy_of(permissions)
    if not agent and policy is None and not credentials:
        return None
    return control_pb2.SessionSpec(agent=agent, permissions=policy, credentials=credentials)


async def spec_in_place(
    client: Client, key: session_pb2.SessionKey, asked: control_pb2.SessionSpec | None
) -> control_pb2.SessionSpec | None:
    """The spec to send for what options ask for: what they leave open stays as the session has it.

    A spec that is sent replaces the whole of the former one, so it begins as that one. Another agent is told nothing of
    the former one's model.
    """
    if asked is None:
        return None
    try:
        spec = (await client.get_session(key)).spec
    except NotFound:
        return asked
    if asked.agent and asked.agent != spec.agent:
        spec.agent = asked.agent
        spec.ClearField("model")
        spec.ClearField("model_capabilities")
    if asked.HasField("permissions"):
        spec.permissions.CopyFrom(asked.permissions)
    if asked.credentials:
        spec.ClearField("credentials")
        spec.credentials.extend(asked.credentials)
    return spec
