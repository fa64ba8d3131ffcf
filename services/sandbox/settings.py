"""Settings of the sandbox service. Durations are seconds, prices US dollars per hour of one sandbox."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode

from hearth.secret import Secret
from services.chassis.settings import PREFIX, PostgresSettings
from services.sandbox.claims import LeaseLimits
from services.sandbox.compatibility import AgentCommand
from services.sandbox.drift import Limits
from services.sandbox.logins import AUTH_PATHS
from services.sandbox.providers.daytona_options import API_URL, MOUNT, PORT, SANDBOX_AGENT, VOLUME, DaytonaOptions
from services.sandbox.providers.local import AGENTD, HOST
from services.sandbox.tiers import Tier, auto_stop_problem
from services.sandbox.transitions import Deadlines

_BUILT = ("local", "daytona")
# Of a deadline for work at a provider: what the provider itself takes before it gives up.
_SHARE_OF_DEADLINE = 0.75


class Agent(BaseModel):
    """An entry of HEARTH_AGENTS. `env` is name → value, or a list of names to take from this process's environment;
    `state_paths` are paths below HOME that must survive the sandbox, `auth_paths` files below it that must not."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(min_length=1)
    env: dict[str, Secret] | list[str] = Field(default_factory=dict)
    state_paths: list[str] = Field(default_factory=list)
    auth_paths: list[str] = Field(default_factory=list)

    @field_validator("state_paths", "auth_paths")
    @classmethod
    def _below_home(cls, value: list[str]) -> list[str]:
        for path in value:
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts:
                raise ValueError(f"{path!r} must be a path below HOME")
        return value

    def resolved(self) -> AgentCommand:
        """With the values of named variables; a name that is not set is left out."""
        env = self.env
        if isinstance(env, list):
            env = {name: Secret(os.environ[name]) for name in env if name in os.environ}
        auth = tuple(dict.fromkeys([*AUTH_PATHS, *self.auth_paths]))
        return AgentCommand(tuple(self.command), env, tuple(self.state_paths), auth)


# Safe path: the agent's directory is the user's, and must not stand in for our modules.
_BUILT_IN_AGENTS = {"scripted": Agent(command=[sys.executable, "-P", "-m", "hearth.agents.scripted"])}


class SandboxSettings(PostgresSettings):
    """What the sandbox service reads beside what every service reads."""

    listen: str = Field(default="127.0.0.1:7403", description="host:port to bind; port 0 takes a free one")

    providers: Annotated[list[str], NoDecode] = Field(
        default=["local"], description="providers that are switched on, separated by commas"
    )
    default_provider: str = Field(default="local", description="provider of a spec that names none")
    agents: Annotated[dict[str, Agent], NoDecode] = Field(
        default_factory=dict, description="JSON object: name to {command, env, state_paths}; `scripted` is built in"
    )

    local_root: Path = Field(default=Path(".hearth/sandboxes"), description="directory of local sandboxes")
    local_host: str = Field(
        default=HOST,
        description="IP on which daemons of local sandboxes listen; with 0.0.0.0 pools on other machines reach them by"
        " the name of this one",
    )
    local_inherit: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="variables of this process that local sandboxes inherit, separated by commas"
    )
    local_daemon: list[str] = Field(
        default=list(AGENTD), min_length=1, description="JSON list: the program that serves a local sandbox"
    )
    local_warm_window: float = Field(default=60.0, ge=0, description="how long a sandbox is kept running; 0 = not")
    local_warm_cap: int = Field(default=8, ge=0, description="how many are kept running")
    local_park_stopped: bool = Field(default=True, description="keep the disk of what is not kept running")
    local_price_running: float = Field(default=0.0, ge=0)
    local_price_stopped: float = Field(default=0.0, ge=0)

    daytona_api_url: str = Field(default=API_URL, description="where Daytona's API is")
    daytona_api_key: Secret = Field(default=Secret(), description="key of Daytona's API")
    daytona_target: str = Field(default="", description="region of sandboxes; empty leaves the choice to Daytona")
    daytona_snapshot: str = Field(default="", description="snapshot of a sandbox whose spec names none")
    daytona_image: str = Field(default="", description="image of such a sandbox, in place of a snapshot")
    daytona_volume: str = Field(
        default=VOLUME, description="name of the volume with the workspaces; `none`: they die with their sandbox"
    )
    daytona_mount: str = Field(
        default=MOUNT, pattern="^/.*[^/]$", description="directory in a sandbox below which its workspace is mounted"
    )
    daytona_daemon: list[str] = Field(
        default=list(SANDBOX_AGENT), min_length=1, description="JSON list: command line of the daemon in a sandbox"
    )
    daytona_port: int = Field(default=PORT, ge=1024, le=65535, description="port of the daemon in a sandbox")
    daytona_auto_stop_minutes: int = Field(default=15, gt=0, description="Daytona stops what is idle for that long")
    daytona_auto_delete_minutes: int = Field(
        default=30, gt=0, description="Daytona deletes what is stopped for so long"
    )
    daytona_warm_window: float = Field(default=120.0, ge=0, description="as HEARTH_LOCAL_WARM_WINDOW")
    daytona_warm_cap: int = Field(default=20, ge=0, description="as HEARTH_LOCAL_WARM_CAP")
    daytona_park_stopped: bool = Field(default=True, description="as HEARTH_LOCAL_PARK_STOPPED")
    daytona_price_running: float = Field(default=0.17, ge=0)
    daytona_price_stopped: float = Field(default=0.0009, ge=0)

    create_deadline: float = Field(default=120.0, gt=0, description="for creating an instance")
    start_deadline: float = Field(default=60.0, gt=0, description="for starting an instance and its daemon")
    stop_deadline: float = Field(default=30.0, gt=0, description="for stopping an instance")
    delete_deadline: float = Field(default=30.0, gt=0, description="for deleting an instance")
    look_again: float = Field(default=1.0, ge=0, description="pause before a second look for a missing instance")
    probe_timeout: float = Field(default=3.0, gt=0, description="a daemon that takes longer to answer is lost")
    activity_refresh: float = Field(default=240.0, gt=0, description="how often a provider is told of a running turn")

    stop_window: float = Field(default=600.0, ge=0, description="as the pool has it: kept running after a user's Stop")

    lease: float = Field(default=90.0, gt=0, description="a claim that nobody renews for that long is ended")
    lease_read_interval: float = Field(default=5.0, gt=0, description="how often the leases are read")
    lease_gap: float = Field(default=10.0, gt=0, description="after a longer gap in reading, watching begins anew")
    worker_gone: float = Field(
        default=2.0, gt=0, description="a process whose lock is seen free for that long is dead; its work is taken over"
    )
    reconcile_interval: float = Field(default=30.0, gt=0, description="between comparisons with the providers")
    keep_gone_rows: float = Field(default=7 * 86_400.0, ge=0, description="how long rows of gone sandboxes are kept")

    @field_validator("providers", "local_inherit", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("providers")
    @classmethod
    def _are_built(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in _BUILT:
                raise ValueError(f"{name!r} is no provider of this version; it has {', '.join(_BUILT)}")
        if not value:
            raise ValueError("must name at least one provider")
        return value

    @field_validator("agents", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            parsed: Any = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError("must be a JSON object of agents by name")
        for name, entry in parsed.items():
            if not name or "/" in name or not name.isprintable():
                raise ValueError(f"{name!r}: a name must be printable and without '/'")
            try:
                Agent.model_validate(entry)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                path = ".".join(str(part) for part in first["loc"])
                raise ValueError(f"agent {name!r}: {path}: {first['msg']}") from None
        return parsed

    @model_validator(mode="after")
    def _fit_together(self) -> SandboxSettings:
        if self.default_provider not in self.providers:
            raise ValueError(
                f"{PREFIX}DEFAULT_PROVIDER={self.default_provider} is not among {PREFIX}PROVIDERS="
                f"{','.join(self.providers)}"
            )
        for name, tier in self.tiers().items():
            minutes = getattr(self, f"{name}_auto_stop_minutes", None)
            if minutes is not None:
                problem = auto_stop_problem(
                    minutes * 60.0, refresh=self.activity_refresh, parked=tier.longest_parked(self.stop_window)
                )
                if problem:
                    raise ValueError(f"{PREFIX}{name.upper()}_AUTO_STOP_MINUTES={minutes:g} {problem}")
        if "daytona" in self.providers:
            self._check_daytona()
        if self.lease_gap <= self.lease_read_interval:
            raise ValueError(
                f"{PREFIX}LEASE_GAP must be longer than {PREFIX}LEASE_READ_INTERVAL, else no lease ever lapses"
            )
        return self

    def _check_daytona(self) -> None:
        if importlib.util.find_spec("daytona") is None:
            raise ValueError(
                f"{PREFIX}PROVIDERS has daytona, whose SDK is not installed: pip install 'hearth[daytona]'"
            )
        if not self.daytona_api_key:
            raise ValueError(f"{PREFIX}DAYTONA_API_KEY must be set where {PREFIX}PROVIDERS has daytona")
        if self.daytona_snapshot and self.daytona_image:
            raise ValueError(f"of {PREFIX}DAYTONA_SNAPSHOT and {PREFIX}DAYTONA_IMAGE only one may be set")

    def daytona_options(self) -> DaytonaOptions:
        """For the provider; it gives up a little before the worker that waits for it does."""
        return DaytonaOptions(
            api_url=self.daytona_api_url.rstrip("/"),
            api_key=self.daytona_api_key,
            target=self.daytona_target,
            snapshot=self.daytona_snapshot,
            image=self.daytona_image,
            volume="" if self.daytona_volume == "none" else self.daytona_volume,
            daemon=tuple(self.daytona_daemon),
            mount=self.daytona_mount,
            port=self.daytona_port,
            auto_stop_minutes=self.daytona_auto_stop_minutes,
            auto_delete_minutes=self.daytona_auto_delete_minutes,
            create_seconds=self.create_deadline * _SHARE_OF_DEADLINE,
            start_seconds=self.start_deadline * _SHARE_OF_DEADLINE,
            stop_seconds=self.stop_deadline * _SHARE_OF_DEADLINE,
            delete_seconds=self.delete_deadline * _SHARE_OF_DEADLINE,
            daemon_seconds=self.start_deadline / 2,
        )

    def agent_commands(self) -> dict[str, AgentCommand]:
        """The built-in agents, and those of HEARTH_AGENTS over them."""
        return {name: agent.resolved() for name, agent in {**_BUILT_IN_AGENTS, **self.agents}.items()}

    def tiers(self) -> dict[str, Tier]:
        """The tiers of each provider that is switched on, by the provider's name."""
        return {
            name: Tier(
                window=getattr(self, f"{name}_warm_window"),
                cap=getattr(self, f"{name}_warm_cap"),
                park_stopped=getattr(self, f"{name}_park_stopped"),
                price_running=getattr(self, f"{name}_price_running"),
                price_stopped=getattr(self, f"{name}_price_stopped"),
            )
            for name in self.providers
        }

    def deadlines(self) -> Deadlines:
        """For the workers of transitions."""
        return Deadlines(
            self.create_deadline, self.start_deadline, self.stop_deadline, self.delete_deadline, self.look_again
        )

    def lease_limits(self) -> LeaseLimits:
        """For the watcher of leases."""
        return LeaseLimits(self.lease, self.lease_gap)

    def drift_limits(self) -> Limits:
        """For the comparison with the providers."""
        return Limits(young=self.create_deadline)
