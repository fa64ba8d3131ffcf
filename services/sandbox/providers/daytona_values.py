"""What goes between the SDK and the provider: plain values, and errors that only the two of them know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hearth.secret import Secret
from services.sandbox.providers.port import ProviderError, ProviderRefused, ProviderUnavailable

ATTEMPT_LABEL = "hearth-attempt"
JANITOR_LABEL = "hearth-janitor"


class StateClash(ProviderUnavailable):
    """The sandbox is not in a state in which this can be asked; look what it is."""


class Rejected(ProviderRefused):
    """Status 400 or 403: a clash of states, or a refusal; only a look at the sandbox tells them apart."""


class VolumeMissing(ProviderError):
    """There is no such volume."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer of the API about a sandbox. `block_all` and `allow` are its network policy, None where not told."""

    id: str
    name: str
    state: str
    desired: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    reason: str = ""
    block_all: bool | None = None
    allow: str | None = None

    @property
    def attempt(self) -> str:
        """Which call of create made it."""
        return self.labels.get(ATTEMPT_LABEL, "")

    @property
    def destroyed(self) -> bool:
        """Whether it is gone, though still shown."""
        return self.state == "destroyed"


@dataclass(frozen=True, slots=True)
class Network:
    """A network policy as the API takes it."""

    block_all: bool
    allow: tuple[str, ...] = ()

    @property
    def allow_text(self) -> str:
        """As the API writes a list."""
        return ",".join(self.allow)


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of a volume at a path in the sandbox."""

    volume_id: str
    subpath: str
    path: str


@dataclass(frozen=True, slots=True)
class Making:
    """What to create. Sizes are in GiB, intervals in minutes; 0 and empty texts leave the choice to Daytona."""

    name: str
    labels: Mapping[str, str]
    snapshot: str = ""
    image: str = ""
    target: str = ""
    cpus: int = 0
    memory: int = 0
    disk: int = 0
    env: Mapping[str, Secret] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    network: Network | None = None
    auto_stop: int = 15
    auto_delete: int = 30
    ttl: int = 0


@dataclass(frozen=True, slots=True)
class Preview:
    """Where a port of a sandbox answers, and what lets one through."""

    url: str
    token: Secret


@dataclass(frozen=True, slots=True)
class Executed:
    """The end of a command: exit code (-1 where none was told) and what it wrote."""

    code: int
    output: str = field(repr=False)
