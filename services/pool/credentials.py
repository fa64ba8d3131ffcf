"""Credentials of a project: what a spec binds, what may be given to an agent, and whether an agent has it still.

Values exist in two places only: sealed in a row, and in a `Given` on its way to the sandbox and to the agent. Nothing
here prints one, and nothing keeps a digest of one.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from services.chassis.errors import FailedPrecondition, HearthError, NotFound

# A turn that ends at its limit may still use what it was given, by a clock that is not ours.
LEASE_MARGIN = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """Where a spec wants a credential. `server` is the MCP server that gets it, empty: the agent's environment."""

    field: str
    credential: str
    target: str
    server: str = ""


def bindings(spec: sessions.SessionSpec) -> list[Binding]:
    """Every binding of a spec, with the path of its field."""
    found = [
        Binding(f"spec.credentials[{index}]", one.credential, one.target) for index, one in enumerate(spec.credentials)
    ]
    for number, server in enumerate(spec.mcp_servers):
        transport = server.WhichOneof("transport")
        if transport is None:
            continue
        found += [
            Binding(
                f"spec.mcp_servers[{number}].{transport}.credentials[{index}]", one.credential, one.target, server.name
            )
            for index, one in enumerate(getattr(server, transport).credentials)
        ]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Credential:
    """A row of `pool.credential`. `value_generation` is that of the value: no other value of any credential has it."""

    name: str
    generation: int
    value_generation: int
    sealed: bytes = dataclasses.field(repr=False)
    expires_at: datetime | None
    updated_at: datetime


def place_of(project: str, name: str, value_generation: int) -> bytes:
    """What a value is sealed for."""
    return "\0".join(("credential", project, name, str(value_generation))).encode()


def refusal(wanted: Iterable[Binding], known: Mapping[str, datetime | None], now: datetime) -> HearthError | None:
    """Why an agent cannot be given what a spec wants; None when it can. `known`: name → when it ends."""
    for binding in wanted:
        name = binding.credential
        if name not in known:
            return NotFound(
                f"the project has no credential {name!r}; store it with PutCredential",
                reason="CREDENTIAL_NOT_FOUND",
                metadata={"credential": name},
                field_violations=(
                    (f"{binding.field}.credential", "names a credential that the project does not have"),
                ),
                resource=("credential", name, ""),
            )
        ends = known[name]
        if ends is not None and ends <= now:
            return FailedPrecondition(
                f"the credential {name!r} has expired; store a new value with PutCredential",
                reason="CREDENTIAL_EXPIRED",
                metadata={"credential": name},
                field_violations=((f"{binding.field}.credential", "names a credential that has expired"),),
                resource=("credential", name, ""),
            )
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    binding: Binding
    generation: int
    value: Secret
    expires_at: datetime | None


class Given:
    """The values that an agent is given, each in its place. It says nothing of them in any text."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[_Value] = ()) -> None:
        self._values = tuple(values)

    @classmethod
    def of(cls, values: Iterable[tuple[Binding, int, Secret, datetime | None]]) -> Given:
        """From (binding, generation of the value, value, when it ends)."""
        return cls([_Value(*one) for one in values])

    def __repr__(self) -> str:
        return f"<{len(self._values)} credentials>"

    def __reduce__(self) -> str:
        raise TypeError("credentials are not written down")

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def lease(self) -> datetime | None:
        """When the first of them ends; None: never."""
        return min((one.expires_at for one in self._values if one.expires_at is not None), default=None)

    def slots(self) -> list[sandbox_pb2.SecretSlot]:
        """Those that are variables of the agent."""
        return [
            sandbox_pb2.SecretSlot(env_name=one.binding.target, value=one.value.reveal(), generation=one.generation)
            for one in self._values
            if not one.binding.server
        ]

    def of_server(self, name: str) -> dict[str, Secret]:
        """Those of an MCP server, by the variable or header that holds each."""
        return {one.binding.target: one.value for one in self._values if one.binding.server == name}

    def same_as(self, other: Given) -> bool:
        """Whether both are the same values in the same places, compared in constant time."""
        return hmac.compare_digest(self._material(), other._material())

    def _material(self) -> bytes:
        lines = sorted(
            [one.binding.server, one.binding.target, one.binding.credential, one.generation, one.value.reveal()]
            for one in self._values
        )
        return json.dumps(lines).encode()

    def __iter__(self) -> Iterator[str]:
        """The names of them."""
        return (one.binding.credential for one in self._values)


NOTHING = Given()


class Stale(Enum):
    """Why an agent cannot go on with the credentials that it was started with."""

    EXPIRED = "credentials-expired"
    ROTATED = "credentials-rotated"
    EXPIRING = "credentials-expiring"


def covers(lease: datetime | None, now: datetime, turn_limit: float) -> bool:
    """Whether a lease outlives a turn that starts now, with a margin. `turn_limit` is in seconds."""
    return lease is None or lease > now + timedelta(seconds=turn_limit + LEASE_MARGIN)


def stale(installed: Given, present: Given, now: datetime, turn_limit: float) -> Stale | None:
    """Whether an agent that was started with `installed` may take a turn that is to have `present`."""
    lease = installed.lease
    if lease is not None and lease <= now:
        return Stale.EXPIRED
    if not installed.same_as(present):
        return Stale.ROTATED
    # The same values, so what is known of their end today counts, not what was known when they were installed.
    if not covers(present.lease, now, turn_limit):
        return Stale.EXPIRING
    return None
