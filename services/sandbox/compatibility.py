"""May this sandbox serve that request? What was baked in at creation, what was given to the daemon, and the next step.

Two digests, because two things can be out of date: what only a new sandbox changes, and what a restart of the daemon
applies. Neither holds a value of a secret; a new value comes with a new generation.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hearth.secret import Secret, revealed
from services.sandbox.claims import Claim
from services.sandbox.logins import AUTH_PATHS
from services.sandbox.rows import Row
from services.sandbox.states import Desired, Observed


@dataclass(frozen=True, slots=True)
class SecretVariable:
    """A secret variable. `value` travels to the daemon and nowhere else; `generation` grows when it changes."""

    name: str
    generation: int
    value: Secret


@dataclass(frozen=True, slots=True)
class Spec:
    """What a sandbox must be. Sizes of 0 and empty texts leave the choice to the provider.

    `network` is OPEN, BLOCKED, ALLOW_LIST or empty; `allow` holds CIDR addresses.
    """

    provider: str
    agent: str
    snapshot: str = ""
    image: str = ""
    target: str = ""
    cpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    network: str = ""
    allow: tuple[str, ...] = ()
    env: Mapping[str, Secret] = field(default_factory=dict)
    secrets: tuple[SecretVariable, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """How the deployment starts an agent: program and arguments, variables, and what it writes below HOME: state that
    must be kept, logins that must not be."""

    command: tuple[str, ...]
    env: Mapping[str, Secret] = field(default_factory=dict)
    state_paths: tuple[str, ...] = ()
    auth_paths: tuple[str, ...] = AUTH_PATHS


def fingerprint(spec: Spec, baked: Mapping[str, str]) -> str:
    """Lower-case hex SHA-256 of what creation bakes in: `spec`, and what the provider itself puts there (`baked`: what
    it chooses where the spec leaves it the choice, its volume). The order of names does not matter.

    The network policy is not in it: a provider may be able to change that, see `network_policy` and `next_step`.
    """
    return _digest(
        {
            "provider": spec.provider,
            "agent": spec.agent,
            "snapshot": spec.snapshot,
            "image": spec.image,
            "target": spec.target,
            "resources": [spec.cpus, spec.memory_mib, spec.disk_mib],
            "env": sorted(spec.env),
            "secrets": sorted([secret.name, secret.generation] for secret in spec.secrets),
            "baked": dict(baked),
        }
    )


def network_policy(spec: Spec) -> str:
    """What it may reach, in one spelling: `OPEN`, `BLOCKED`, `ALLOW_LIST` with its addresses in order, or empty where
    the spec leaves it to the provider. An empty list of addresses blocks everything."""
    if spec.network != "ALLOW_LIST":
        return spec.network
    allowed = sorted({address.strip() for address in spec.allow})
    return " ".join(["ALLOW_LIST", *allowed]) if allowed else "BLOCKED"


def daemon_fingerprint(spec: Spec, agents: Mapping[str, AgentCommand]) -> str:
    """Lower-case hex SHA-256 of what the daemon is started with, but for secret values and the token."""
    return _digest(
        {
            "env": revealed(spec.env),
            "secrets": sorted([secret.name, secret.generation] for secret in spec.secrets),
            "agents": {name: [list(agent.command), revealed(agent.env)] for name, agent in agents.items()},
        }
    )


def _digest(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Step(enum.Enum):
    """What an Acquire does next."""

    CREATE = "create"
    WAIT = "wait"
    SETTLE = "settle"
    ATTACH = "attach"
    ANSWER = "answer"
    RESTART = "restart"
    START = "start"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an Acquire asks for, reduced to what is compared."""

    claim: Claim
    holder: str
    fingerprint: str
    daemon_fingerprint: str
    network: str = ""
    # Whether the policy of an existing instance can be changed to it.
    converges: bool = False


def next_step(row: Row | None, wanted: Wanted) -> Step:  # noqa: PLR0911 - a table, read from the top
    """The next step from `row`, the sandbox of the session as it was just read (None: it has none).

    ANSWER: this very claim has its sandbox, so it is told the same again. WAIT: somebody works on it. SETTLE: who
    worked on it is taken for dead, so first look what there is. REPLACE: delete, then see again.
    """
    if row is None:
        return Step.CREATE
    if row.in_transition:
        return Step.WAIT
    if row.desired is Desired.GONE:
        return Step.REPLACE
    if row.overdue:
        return Step.SETTLE
    if row.claim == wanted.claim and row.holder == wanted.holder and row.reachable:
        return Step.ANSWER
    same_network = row.network == wanted.network
    if row.fingerprint != wanted.fingerprint or not (same_network or wanted.converges):
        return Step.REPLACE
    if row.observed is Observed.RUNNING:
        # A holder is given a live daemon only if the daemon answers to nobody else and runs what is asked for. Under
        # another policy it is started anew: connections that the old policy allowed end with the processes.
        kept = row.holder == wanted.holder and row.daemon_fingerprint == wanted.daemon_fingerprint and same_network
        return Step.ATTACH if kept and row.reachable else Step.RESTART
    if row.observed is Observed.STOPPED:
        return Step.START
    return Step.REPLACE
