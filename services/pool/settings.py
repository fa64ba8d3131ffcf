"""Settings of the pool process."""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from hearth.channel import certificate_name
from hearth.secret import Secret
from services.chassis.settings import Address, PostgresSettings
from services.pool.control.gates import Policy
from services.pool.observing import BeatLimits
from services.pool.sealing import parse_keys
from services.pool.turns.limits import TurnLimits

# Always there, so that a fresh installation can hold a conversation.
BUILT_IN_AGENT = "scripted"
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - what an address is compared with


class PoolSettings(PostgresSettings):
    """What the pool reads besides the chassis. Durations are seconds."""

    listen: str = Field(default="127.0.0.1:7400", description="host:port to bind; port 0 takes a free one")

    # Of the entries the pool keeps nothing but their names: their variables may be secrets.
    agents: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(), description="JSON object: agents by name, as the sandbox service has them"
    )
    default_agent: str = Field(default=BUILT_IN_AGENT, description="agent of a spec that names none")
    providers: Annotated[list[str], NoDecode] = Field(
        default=["local"], description="providers that a spec may name, separated by commas, as the sandbox service has"
    )
    default_provider: str = Field(default="local", description="provider of a spec that names none")
    default_permission: Literal["allow", "ask", "deny"] = Field(
        default="deny", description="answer to an agent that asks for leave where the spec does not say"
    )

    secret_key: Secret = Field(
        default=Secret(),
        description="keys that seal credentials, 32 bytes in base64 each, separated by commas; the first one seals",
    )

    pool_entries: int = Field(default=1_000, ge=1, description="live agent sessions of this process, at most")
    local_warm_window: float = Field(default=60.0, ge=0, description="how long an idle local one is kept; 0 = not")
    daytona_warm_window: float = Field(default=120.0, ge=0, description="the same on Daytona")
    stop_window: float = Field(default=600.0, ge=0, description="how long one is kept after a Stop of its user")
    approval_window: float = Field(
        default=600.0, ge=0, description="how long a turn that waits for people keeps its agent; then it is paused"
    )
    local_warm_cap: int = Field(default=8, ge=0, description="turns that wait for people with a live agent, at most")
    daytona_warm_cap: int = Field(default=20, ge=0, description="the same on Daytona")
    queue_cap: int = Field(default=100, ge=1, description="inputs that may wait in one session")
    settled_retention: float = Field(
        default=0.0,
        ge=0,
        description="how long request ids, and commands, inputs and executions that are over, are kept; 0 = as long as"
        " the session lives. A request id that is sent again after that time is a new request",
    )
    interaction_expiry: float = Field(
        default=7 * 86400.0, gt=0, description="how long people may take to answer what an agent asks"
    )

    turn_limit: float = Field(default=7200.0, gt=0, description="a whole turn")
    idle_limit: float = Field(default=1800.0, gt=0, description="silence within a turn")
    first_response_limit: float = Field(default=120.0, gt=0, description="until the first output of a turn")
    tool_call_limit: float = Field(default=1800.0, gt=0, description="one tool call")
    open_timeout: float = Field(default=60.0, gt=0, description="until an agent has opened its session")
    cancel_timeout: float = Field(default=5.0, gt=0, description="until an agent has answered a Stop")
    history_patience: float = Field(default=600.0, gt=0, description="how long a turn waits to start without history")
    replica_address: str = Field(
        default="", description="host:port at which the other pool processes reach this one; empty: the one it binds"
    )
    replica_beat_every: float = Field(default=5.0, gt=0, description="how often a replica says that it lives")
    replica_beat_failing: float = Field(default=1.0, gt=0, description="the same while that does not succeed")
    replica_look_every: float = Field(default=2.0, gt=0, description="how often a replica looks at the others")
    replica_dead_after: float = Field(
        default=45.0, gt=0, description="a replica that was seen silent for so long is dead; its turns are lost"
    )
    replica_gap: float = Field(
        default=10.0, gt=0, description="the longest pause between two looks at the others; after it they begin anew"
    )
    spill_dir: str = Field(
        default="", description="directory on a disk for output that waits for history; empty takes TMPDIR or /var/tmp"
    )

    @field_validator("providers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("spill_dir")
    @classmethod
    def _writable(cls, value: str) -> str:
        if value and not (os.path.isdir(value) and os.access(value, os.W_OK | os.X_OK)):
            raise ValueError(f"{value} is no directory that can be written to")
        return value

    @field_validator("secret_key")
    @classmethod
    def _keys(cls, value: Secret) -> Secret:
        parse_keys(value.reveal())
        return value

    @field_validator("agents", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            parsed: object = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError("must be a JSON object of agents by name")
        return frozenset(parsed)

    @model_validator(mode="after")
    def _defaults_known(self) -> PoolSettings:
        if self.default_agent not in self.agent_names:
            known = ", ".join(sorted(self.agent_names))
            raise ValueError(f"HEARTH_DEFAULT_AGENT={self.default_agent} is not in HEARTH_AGENTS; known are {known}")
        if self.default_provider not in self.providers:
            raise ValueError(f"HEARTH_DEFAULT_PROVIDER={self.default_provider} is not among HEARTH_PROVIDERS")
        return self

    @field_validator("replica_address")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value:
            Address.parse(value)
        return value

    @model_validator(mode="after")
    def _beats_seen(self) -> PoolSettings:
        if 2 * self.replica_look_every > self.replica_gap:
            raise ValueError("HEARTH_REPLICA_GAP must be at least twice HEARTH_REPLICA_LOOK_EVERY")
        # Else a replica that missed one beat, or an outage that nobody noticed, would count as a death.
        if self.replica_gap + 2 * max(self.replica_beat_every, self.replica_beat_failing) > self.replica_dead_after:
            raise ValueError(
                "HEARTH_REPLICA_DEAD_AFTER must be at least HEARTH_REPLICA_GAP and two of HEARTH_REPLICA_BEAT_EVERY"
            )
        return self

    @property
    def beats(self) -> BeatLimits:
        """How the other replicas are watched."""
        return BeatLimits(self.replica_dead_after, self.replica_dead_after / 3, self.replica_gap)

    @property
    def trusted_for(self) -> float:
        """How long after a beat a replica believes that it still has what it holds: well before others give it up."""
        return self.replica_dead_after / 2

    def reached_at(self, bound: str) -> str:
        """Where other replicas reach this one, which has bound `bound`."""
        if self.replica_address:
            return self.replica_address
        address = Address.parse(bound)
        return str(Address(socket.gethostname(), address.port)) if address.host in _EVERYWHERE else bound

    @property
    def replica_name(self) -> str:
        """The name in the certificates of the other pool processes: the host of the address that stands for all of
        them, where it is set; else empty, which is the host of the address of each one."""
        return certificate_name(self.pool_address) if "pool_address" in self.model_fields_set else ""

    @property
    def secret_keys(self) -> list[bytes]:
        """The keys that open what is sealed; the first one seals. Empty: credentials cannot be used."""
        return parse_keys(self.secret_key.reveal())

    @property
    def agent_names(self) -> frozenset[str]:
        """Every agent that a spec may name."""
        return frozenset({BUILT_IN_AGENT, *self.agents})

    @property
    def permission(self) -> Policy:
        """The default answer to an agent that asks."""
        return Policy(self.default_permission)

    @property
    def limits(self) -> TurnLimits:
        """The limits of a turn whose spec sets none."""
        return TurnLimits(self.turn_limit, self.idle_limit, self.first_response_limit, self.tool_call_limit).clamped()

    def waiting_cap(self, provider: str) -> int:
        """How many turns may wait for people with a live agent on a provider; the next one is paused at once."""
        return {"local": self.local_warm_cap, "daytona": self.daytona_warm_cap}.get(provider, 0)

    def warm_window(self, provider: str) -> float:
        """How long an idle entry is kept on a provider."""
        return {"local": self.local_warm_window, "daytona": self.daytona_warm_window}.get(provider, 0.0)
