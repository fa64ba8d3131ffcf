"""Requests as values: what is wrong with one is told field by field, before anything is changed."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.secret import Secret, hidden
from hearth.types.v1 import session_pb2
from services.chassis import fields
from services.chassis.errors import HearthError, invalid
from services.chassis.fields import Violations
from services.sandbox import problems
from services.sandbox.claims import Claim
from services.sandbox.compatibility import SecretVariable, Spec
from services.sandbox.rows import Key
from services.sandbox.states import Tenure
from services.sandbox.store import Position, Renewal

MOST_RENEWALS = 1000
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENV_BYTES = 128 * 1024
_TEXT_BYTES = 1024
# Set by the service itself; a spec that could set them could mark its processes as another sandbox's.
_RESERVED = ("HEARTH_",)
_RESERVED_NAMES = frozenset({"HOME"})


def read_key(key: session_pb2.SessionKey, field: str = "session") -> Key:
    """A session."""
    return Key(*fields.session_key(key.project, key.session, field=field))


def read_claim(claim: sandbox_pb2.Claim, field: str = "claim", *, least_attempt: int = 1) -> Claim:
    """A claim; an attempt of 0 is for closing only."""
    fields.number(f"{field}.epoch", claim.epoch, minimum=1)
    fields.number(f"{field}.attempt", claim.attempt, minimum=least_attempt)
    return Claim(claim.epoch, claim.attempt)


def read_spec(
    spec: sandbox_pb2.SandboxSpec, *, default_provider: str, providers: Collection[str], agents: Collection[str]
) -> Spec:
    """What a sandbox must be. Raises INVALID_ARGUMENT, also UNKNOWN_PROVIDER and UNKNOWN_AGENT."""
    provider = spec.provider or default_provider
    if provider not in providers:
        raise problems.unknown_provider("spec.provider", spec.provider, sorted(providers))
    if spec.agent not in agents:
        raise problems.unknown_agent("spec.agent", spec.agent, sorted(agents))
    checks = Violations()
    for name in ("snapshot", "image", "target"):
        _gather(checks, partial(fields.length, f"spec.{name}", getattr(spec, name), maximum=_TEXT_BYTES))
    if spec.snapshot and spec.image:
        checks.add("spec.image", "must be empty when a snapshot is named")
    _check_variables(spec, checks)
    network = spec.network.mode
    if network not in sandbox_pb2.NetworkMode.values():
        checks.add("spec.network.mode", "is not a known mode")
    if spec.network.allow and network != sandbox_pb2.NETWORK_MODE_ALLOW_LIST:
        checks.add("spec.network.allow", "goes with the mode ALLOW_LIST only")
    for index, address in enumerate(spec.network.allow):
        if not _is_network(address):
            checks.add(f"spec.network.allow[{index}]", "must be an address in CIDR form, as 10.0.0.0/8")
    checks.raise_if_any()
    return Spec(
        provider=provider,
        agent=spec.agent,
        snapshot=spec.snapshot,
        image=spec.image,
        target=spec.target,
        cpus=spec.resources.cpus,
        memory_mib=spec.resources.memory_mib,
        disk_mib=spec.resources.disk_mib,
        network=_short(sandbox_pb2.NetworkMode.Name(network), "NETWORK_MODE_"),
        allow=tuple(spec.network.allow),
        env=hidden(spec.env),
        secrets=tuple(SecretVariable(slot.env_name, slot.generation, Secret(slot.value)) for slot in spec.secrets),
    )


def read_renewals(request: sandbox_service_pb2.RenewClaimsRequest) -> list[Renewal]:
    """The claims to renew."""
    if len(request.renewals) > MOST_RENEWALS:
        raise invalid("renewals", f"must be at most {MOST_RENEWALS}; send the others in another call")
    renewals = []
    for index, renewal in enumerate(request.renewals):
        path = f"renewals[{index}]"
        if renewal.tenure not in (sandbox_pb2.TENURE_ACTIVE, sandbox_pb2.TENURE_PARKED):
            raise invalid(f"{path}.tenure", "must be ACTIVE or PARKED")
        key = read_key(renewal.session, f"{path}.session")
        claim = read_claim(renewal.claim, f"{path}.claim")
        renewals.append(Renewal(key, claim, renewal.tenure == sandbox_pb2.TENURE_ACTIVE))
    return renewals


def read_tenure(tenure: sandbox_pb2.Tenure.ValueType) -> str | None:
    """A filter by tenure; unset is any."""
    if tenure == sandbox_pb2.TENURE_UNSPECIFIED:
        return None
    if tenure not in sandbox_pb2.Tenure.values():
        raise invalid("tenure", "is not a known tenure")
    return Tenure(_short(sandbox_pb2.Tenure.Name(tenure), "TENURE_"))


def reason_name(reason: sandbox_pb2.ReleaseReason.ValueType) -> str:
    """The name of a reason without prefix; empty for a number that this version does not know."""
    if reason not in sandbox_pb2.ReleaseReason.values():
        return ""
    return _short(sandbox_pb2.ReleaseReason.Name(reason), "RELEASE_REASON_")


def read_page_token(token: str) -> Position | None:
    """Where the page before ended."""
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token.encode()).decode()
        moment, _, sandbox_id = text.partition(" ")
        created_at = datetime.fromisoformat(moment)
        if created_at.tzinfo is None:
            raise ValueError("a time without zone")
        return Position(created_at.astimezone(UTC), str(UUID(sandbox_id)))
    except (ValueError, OverflowError, binascii.Error):
        raise invalid("page_token", "is not one that this service gave out") from None


def page_token(position: Position) -> str:
    """The token from which `read_page_token` makes `position` again."""
    return base64.urlsafe_b64encode(f"{position.created_at.isoformat()} {position.sandbox_id}".encode()).decode()


def _check_variables(spec: sandbox_pb2.SandboxSpec, checks: Violations) -> None:
    total = 0
    for name, value in spec.env.items():
        total += _check_variable(f"spec.env[{name!r}]", name, value, checks)
    seen = set(spec.env)
    for index, slot in enumerate(spec.secrets):
        path = f"spec.secrets[{index}]"
        total += _check_variable(f"{path}.env_name", slot.env_name, slot.value, checks)
        if slot.env_name in seen:
            checks.add(f"{path}.env_name", "names a variable that is set already")
        seen.add(slot.env_name)
        _gather(checks, partial(fields.number, f"{path}.generation", slot.generation))
    if total > _ENV_BYTES:
        checks.add("spec.env", f"all variables together must be at most {_ENV_BYTES} bytes", reason="TOO_LARGE")


def _check_variable(path: str, name: str, value: str, checks: Violations) -> int:
    if _ENV_NAME.fullmatch(name) is None:
        checks.add(path, "must be a name of letters, digits and _, not starting with a digit")
    elif name.startswith(_RESERVED) or name in _RESERVED_NAMES:
        checks.add(path, "is set by Hearth and cannot be given")
    if "\0" in value:
        checks.add(path, "must not hold a NUL character")
    return len(name) + len(value.encode())


def _gather(checks: Violations, check: Callable[[], object]) -> None:
    try:
        check()
    except HearthError as refusal:
        for field, description in refusal.field_violations:
            checks.add(field, description, reason=refusal.reason)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _short(name: str, prefix: str) -> str:
    short = name.removeprefix(prefix)
    return "" if short == "UNSPECIFIED" else short
