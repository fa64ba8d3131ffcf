"""What the service needs of a place where sandboxes run.

Every method but `check`, `workspace` and `close` may be given up by its caller at any await; what it did by then is
found again by `get` and `list`. References are a provider id, or the name while no id is known.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hearth.secret import Secret
from services.chassis.clock import Clock
from services.sandbox.compatibility import AgentCommand, Spec
from services.sandbox.rows import Key

_T = TypeVar("_T")

_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 5.0


class InstanceState(enum.Enum):
    """What a provider says of an instance. That it is gone is said by `InstanceNotFound`."""

    CREATING = "creating"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DELETING = "deleting"
    ERROR = "error"
    UNKNOWN = "unknown"

    @property
    def settled(self) -> bool:
        """Whether it stays so until somebody does something."""
        return self in (InstanceState.RUNNING, InstanceState.STOPPED, InstanceState.ERROR)


class ProviderError(Exception):
    """The provider did not do what it was asked; the text is for an operator and holds no secret."""


class InstanceNotFound(ProviderError):
    """There is no such instance, and the provider is sure of it."""


class NameTaken(ProviderError):
    """An instance of this name exists."""


class ProviderRefused(ProviderError):
    """It will never do this: a quota, an image that is not there, something it cannot do. `field` names the part of
    the spec that it is about, where it is one."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ProviderUnavailable(ProviderError):
    """It may do it later. `retry_after` is in seconds. `throttled`: it was asked too often, and did nothing."""

    def __init__(self, message: str, *, retry_after: float | None = None, throttled: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.throttled = throttled


class StillAlive(ProviderError):
    """Processes of the instance could not be shown dead."""


class DaemonFailed(ProviderError):
    """The agent daemon could not be started in the instance."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as the provider shows it. `age` is in seconds since its creation, by the provider's clock."""

    provider_id: str
    name: str
    state: InstanceState
    labels: Mapping[str, str]
    age: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What to create: under a unique name, with labels, for a session whose workspace it will have."""

    name: str
    labels: Mapping[str, str]
    key: Key
    spec: Spec


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """How to start the daemon: the token it shall accept, the agents it may run, the variables they get.

    `secrets` are variables too, whose values must not be written to any disk. `agent` is the one that the sandbox is
    for; a daemon that cannot give each agent variables of its own runs with those of this one.
    """

    token: Secret
    key: Key
    agents: Mapping[str, AgentCommand]
    env: Mapping[str, Secret]
    secrets: Mapping[str, Secret]
    agent: str = ""

    def variables_of(self, agent: AgentCommand) -> dict[str, Secret]:
        """What an agent is given beside its secrets, which go before what the deployment says for all."""
        given = {**agent.env, **self.env}
        return {name: value for name, value in given.items() if name not in self.secrets}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon answers: base URL without a trailing slash, headers to send beside the token."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Provider(Protocol):
    """A place where sandboxes run."""

    @property
    def name(self) -> str:
        """Its name in specs, rows and settings."""
        ...

    @property
    def sets_network(self) -> bool:
        """Whether `set_network` can change the policy of an instance; if not, another policy needs another instance."""
        ...

    def check(self, spec: Spec) -> None:
        """Raise `ProviderRefused` for a spec that it can never fulfil."""
        ...

    def baked(self, spec: Spec) -> Mapping[str, str]:
        """What creation bakes in beyond what `spec` says itself: the provider's own choice where the spec leaves one
        (snapshot, target), and what it adds (volume). A change of one needs a new instance. Names no secret."""
        ...

    def workspace(self, key: Key) -> str:
        """The directory, in any sandbox of the session, in which the agent works. Always the same."""
        ...

    async def create(self, request: CreateRequest) -> Instance:
        """Make an instance and return it running, without a daemon. Raises `NameTaken`."""
        ...

    async def get(self, reference: str) -> Instance:
        """The instance now. Raises `InstanceNotFound`."""
        ...

    async def list(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        """All instances that carry these labels."""
        ...

    async def start(self, reference: str) -> None:
        """Start a stopped instance; return when it runs. A running one stays as it is."""
        ...

    async def stop(self, reference: str) -> None:
        """Stop it, keep its disk; return when it is seen stopped. A stopped one stays as it is."""
        ...

    async def delete(self, reference: str) -> None:
        """Delete it whatever its state; return when it is seen gone. One that is gone already is no error."""
        ...

    async def refresh_activity(self, reference: str) -> None:
        """Tell the provider that it is in use, where the provider stops what looks idle."""
        ...

    async def restart_daemon(self, reference: str, daemon: DaemonRequest) -> Address:
        """Kill every process in the instance but its own base, look again that none is left, and only then start the
        daemon. Raises `StillAlive` when death cannot be shown, `DaemonFailed` when the daemon does not start."""
        ...

    async def endpoint(self, reference: str) -> Address:
        """Where the daemon answers, looked up anew."""
        ...

    async def set_network(self, reference: str, mode: str, allow: Sequence[str]) -> None:
        """Change what a running instance may reach; `mode` as in `Spec.network`, never empty. When it returns, the
        policy is in force."""
        ...

    async def delete_workspace(self, key: Key) -> None:
        """Delete the workspace of a session; none is no error."""
        ...

    async def close(self) -> None:
        """Let go of connections. Sandboxes run on."""
        ...


async def within(seconds: float, clock: Clock, operation: Callable[[], Awaitable[_T]]) -> _T:
    """The result of `operation`, tried again with growing pauses while the provider is unavailable.

    Raises what `operation` raises, and `ProviderUnavailable` when `seconds` are over.
    """
    pause, last = _FIRST_RETRY_SECONDS, ""
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await operation()
                except ProviderUnavailable as trouble:
                    last = str(trouble)
                    await clock.sleep(max(pause, trouble.retry_after or 0.0))
                    pause = min(pause * 2, _LONGEST_RETRY_SECONDS)
    except TimeoutError:
        raise ProviderUnavailable(f"no success within {seconds:g} s{': ' + last if last else ''}") from None
