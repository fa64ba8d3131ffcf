"""The values that the store reads and writes: one row of a sandbox, and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from hearth.secret import Secret
from services.sandbox.claims import NO_CLAIM, Claim, Standing
from services.sandbox.states import Desired, How, Observed, Tenure

NAME_PREFIX = "hearth-"
# The network policy of a sandbox whose policy nobody can tell: it is being changed, or is older than its column.
UNKNOWN_NETWORK = "?"


class Key(NamedTuple):
    """A session: the pair is the key, never the session alone."""

    project: str
    session: str


def instance_name(sandbox_id: str) -> str:
    """The unique name of a sandbox's instance at its provider."""
    return NAME_PREFIX + sandbox_id


@dataclass(frozen=True, slots=True)
class Row:
    """One sandbox. `version` moves with every change but a renewal; a change names the version it was decided on.

    A row in transition names its `worker`; `overdue` says that, by the database's clock, its deadline had passed when
    the row was read, so the worker is taken for dead. `key` is None only where the session is not known. `token` is
    the daemon's; None means that nobody knows what the daemon would accept. `network` is what it may reach now.
    """

    sandbox_id: str
    key: Key | None
    provider: str
    agent: str
    fingerprint: str
    daemon_fingerprint: str
    desired: Desired
    observed: Observed
    tenure: Tenure
    provider_id: str = ""
    holder: str | None = None
    claim: Claim = NO_CLAIM
    how: How | None = None
    token: Secret | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    version: int = 1
    worker: str | None = None
    overdue: bool = False
    renewals: int = 0
    created_at: datetime | None = None
    changed_at: datetime | None = None
    last_error: str = ""
    network: str = UNKNOWN_NETWORK

    @property
    def name(self) -> str:
        """Name of the instance at the provider."""
        return instance_name(self.sandbox_id)

    @property
    def reference(self) -> str:
        """What the provider is asked for: its own id once it told one, else the name."""
        return self.provider_id or self.name

    @property
    def in_transition(self) -> bool:
        """Whether somebody works on it, as far as can be told."""
        return self.worker is not None and not self.overdue

    @property
    def reachable(self) -> bool:
        """Whether it is settled, running, and its daemon's address and token are known."""
        return self.worker is None and self.observed is Observed.RUNNING and bool(self.token) and bool(self.url)


@dataclass(frozen=True, slots=True)
class View:
    """A session as one statement saw it. `admitted`: that statement made the asked claim the standing one."""

    standing: Standing | None
    row: Row | None
    admitted: bool = False
