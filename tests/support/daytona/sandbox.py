"""A sandbox as the stand-in keeps it, and as the API shows it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.daytona.limits import Resources
from tests.support.daytona.problems import timestamp
from tests.support.daytona.processes import Base
from tests.support.daytona.rules import Standing

ORGANIZATION = "11111111-1111-4111-8111-111111111111"
# Labels by which a sandbox's session is known, for the log.
SESSION_LABELS = ("hearth-project", "hearth-session")


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume, the path it is mounted at, the part of it that is mounted."""

    volume: str
    path: str
    subpath: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a create request asks for, with the server's defaults. Intervals are in minutes; -1: never."""

    name: str = ""
    snapshot: str = ""
    dockerfile: str = ""
    user: str = "daytona"
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    public: bool = False
    target: str = "us"
    resources: Resources = field(default_factory=Resources)
    network_block_all: bool = False
    network_allow_list: str | None = None
    domain_allow_list: str | None = None
    auto_stop: float = 15
    auto_pause: float = 0
    auto_archive: float = 7 * 24 * 60
    auto_delete: float = -1
    ttl: float = 0
    mounts: Sequence[Mount] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sandbox:
    """One sandbox. `number` counts them. Times are monotonic seconds unless they are said to be wall time."""

    number: int
    id: str
    name: str
    directory: Path
    address: str
    wanted: Wanted
    labels: dict[str, str]
    public: bool
    resources: Resources
    network_block_all: bool
    network_allow_list: str | None
    domain_allow_list: str | None
    auto_stop: float
    auto_pause: float
    auto_archive: float
    auto_delete: float
    ttl: float
    state: str = "creating"
    desired: str = "started"
    pending: bool = True
    error_reason: str | None = None
    recoverable: bool = False
    created: float = field(default_factory=time.monotonic)
    created_wall: float = field(default_factory=time.time)
    updated_wall: float = field(default_factory=time.time)
    active: float = field(default_factory=time.monotonic)
    active_wall: float = field(default_factory=time.time)
    stopped: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    preview_token: str = ""
    signing_key: str = field(default_factory=lambda: secrets.token_hex(16))
    base: Base | None = None
    work: asyncio.Task[None] | None = None
    unstick: asyncio.Event | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session(self) -> str:
        """The session that its labels name, or nothing."""
        return "/".join(self.labels[label] for label in SESSION_LABELS if label in self.labels)

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def standing(self) -> Standing:
        """What the rules look at."""
        return Standing(self.state, self.desired, self.pending, self.auto_delete == 0, self.recoverable)

    def touch(self) -> None:
        """It is in use: the clock of auto-stop starts anew."""
        self.active, self.active_wall = time.monotonic(), time.time()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.updated_wall = time.time()
        self.changed.set()
        self.changed = asyncio.Event()

    def environment(self) -> dict[str, str]:
        """What processes in it see."""
        return dict(self.env)


def new_id() -> str:
    """An id in the form of the real ones."""
    return str(uuid.uuid4())


def create(number: int, wanted: Wanted, directory: Path, address: str) -> Sandbox:
    """A sandbox in the making; nothing of it exists yet."""
    identifier = new_id()
    return Sandbox(
        number=number,
        id=identifier,
        name=wanted.name or identifier,
        directory=directory / identifier,
        address=address,
        wanted=wanted,
        labels=dict(wanted.labels),
        public=wanted.public,
        resources=wanted.resources,
        network_block_all=wanted.network_block_all,
        network_allow_list=wanted.network_allow_list,
        domain_allow_list=wanted.domain_allow_list,
        auto_stop=wanted.auto_stop,
        auto_pause=wanted.auto_pause,
        auto_archive=wanted.auto_archive,
        auto_delete=wanted.auto_delete,
        ttl=wanted.ttl,
        state="pending_build" if wanted.dockerfile else "creating",
    )


def item(sandbox: Sandbox, toolbox_url: str) -> dict[str, Any]:
    """As a listing shows it."""
    wanted = sandbox.wanted
    shown: dict[str, Any] = {
        "id": sandbox.id,
        "organizationId": ORGANIZATION,
        "name": sandbox.name,
        "target": wanted.target,
        "runnerId": "22222222-2222-4222-8222-222222222222",
        "sandboxClass": "container",
        "state": sandbox.state,
        "desiredState": sandbox.desired,
        "snapshot": wanted.snapshot or None,
        "user": wanted.user,
        "errorReason": sandbox.error_reason,
        "recoverable": sandbox.recoverable,
        "public": sandbox.public,
        "networkBlockAll": sandbox.network_block_all,
        "networkAllowList": sandbox.network_allow_list,
        "domainAllowList": sandbox.domain_allow_list,
        "cpu": sandbox.resources.cpu,
        "gpu": 0,
        "memory": sandbox.resources.memory,
        "disk": sandbox.resources.disk,
        "labels": sandbox.labels,
        "backupState": "None",
        "autoStopInterval": sandbox.auto_stop,
        "autoPauseInterval": sandbox.auto_pause,
        "autoArchiveInterval": sandbox.auto_archive,
        "autoDeleteInterval": sandbox.auto_delete,
        "createdAt": timestamp(sandbox.created_wall),
        "updatedAt": timestamp(sandbox.updated_wall),
        "lastActivityAt": timestamp(sandbox.active_wall),
        "daemonVersion": "0.190.0",
        "toolboxProxyUrl": toolbox_url,
    }
    return {name: value for name, value in shown.items() if value is not None}


def full(sandbox: Sandbox, toolbox_url: str) -> dict[str, Any]:
    """As a reply about this one sandbox shows it."""
    shown = item(sandbox, toolbox_url)
    shown["env"] = dict(sandbox.wanted.env)
    shown["kvm"] = False
    shown["volumes"] = [
        {"volumeId": mount.volume, "mountPath": mount.path, **({"subpath": mount.subpath} if mount.subpath else {})}
        for mount in sandbox.wanted.mounts
    ]
    if sandbox.wanted.dockerfile:
        shown["buildInfo"] = {
            "dockerfileContent": sandbox.wanted.dockerfile,
            "createdAt": timestamp(sandbox.created_wall),
            "updatedAt": timestamp(sandbox.created_wall),
            "snapshotRef": f"daytona-{sandbox.id}",
        }
    return shown
