"""What the organization has beside sandboxes: volumes, secrets, snapshots, and the server's own settings."""

from __future__ import annotations

import secrets as random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.daytona.fleet import Fleet
from tests.support.daytona.problems import Problem, bad, timestamp
from tests.support.daytona.sandbox import ORGANIZATION, new_id
from tests.support.daytona.serving import Gate, body_of, reply


@dataclass(slots=True)
class Secret:
    """A secret: sandboxes see its placeholder, which the real service replaces on the way out."""

    id: str
    name: str
    value: str = field(repr=False)
    description: str = ""
    hosts: Sequence[str] = ()
    placeholder: str = field(default_factory=lambda: f"dtn_secret_{random.token_hex(12)}")
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)

    def shown(self) -> dict[str, Any]:
        """As the API shows it: never the value."""
        return {
            "id": self.id,
            "name": self.name,
            "description": self.description,
            "hosts": list(self.hosts),
            "placeholder": self.placeholder,
            "createdAt": timestamp(self.created),
            "updatedAt": timestamp(self.updated),
        }


class Secrets:
    """The secrets of the organization."""

    def __init__(self) -> None:
        self._secrets: dict[str, Secret] = {}

    def all(self) -> Sequence[Secret]:
        """Every secret, by name."""
        return sorted(self._secrets.values(), key=lambda secret: secret.name)

    def get(self, identifier: str) -> Secret:
        """By id. Raises a 404 `Problem`."""
        if identifier not in self._secrets:
            raise Problem(404, f"Secret with ID {identifier} not found")
        return self._secrets[identifier]

    def placeholder(self, name: str) -> str:
        """What a sandbox sees of the secret of this name. Refuses one that is not there."""
        for secret in self._secrets.values():
            if secret.name == name:
                return secret.placeholder
        raise bad(f"Secret {name} not found")

    def put(self, body: dict[str, Any]) -> Secret:
        """Make one."""
        name, value = body.get("name"), body.get("value")
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise bad("name and value must be strings")
        if any(secret.name == name for secret in self._secrets.values()):
            raise Problem(409, f"Secret with name {name} already exists")
        secret = Secret(new_id(), name, value, body.get("description") or "", body.get("hosts") or ())
        self._secrets[secret.id] = secret
        return secret

    def update(self, identifier: str, body: dict[str, Any]) -> Secret:
        """Change one; its id and placeholder stay."""
        secret = self.get(identifier)
        secret.value = body.get("value") or secret.value
        secret.description = body.get("description") or secret.description
        secret.hosts = body.get("hosts") or secret.hosts
        secret.updated = time.time()
        return secret

    def delete(self, identifier: str) -> None:
        """Remove one."""
        del self._secrets[self.get(identifier).id]


class OrganizationApi:
    """Handlers of volumes, secrets, snapshots and settings."""

    def __init__(self, fleet: Fleet, stored: Secrets, snapshots: Sequence[str] | None, default_snapshot: str) -> None:
        self._fleet = fleet
        self._volumes = fleet.volumes
        self._secrets = stored
        self._snapshots = snapshots
        self._default_snapshot = default_snapshot
        self._began = time.time()

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, below the prefix of the API."""
        return [
            web.get("/volumes", gate.guard("volume", self._list_volumes)),
            web.post("/volumes", gate.guard("volume", self._create_volume)),
            web.get("/volumes/by-name/{name}", gate.guard("volume", self._named_volume)),
            web.get("/volumes/{volume}", gate.guard("volume", self._get_volume)),
            web.delete("/volumes/{volume}", gate.guard("volume", self._delete_volume)),
            web.get("/secret/paginated", gate.guard("secret", self._list_secrets)),
            web.post("/secret", gate.guard("secret", self._create_secret)),
            web.get("/secret/{secret}", gate.guard("secret", self._get_secret)),
            web.patch("/secret/{secret}", gate.guard("secret", self._update_secret)),
            web.delete("/secret/{secret}", gate.guard("secret", self._delete_secret)),
            web.get("/snapshots", gate.guard("snapshot", self._list_snapshots)),
            web.get("/snapshots/{snapshot}", gate.guard("snapshot", self._get_snapshot)),
        ]

    async def _list_volumes(self, _: web.Request) -> web.StreamResponse:
        return reply([volume.shown() for volume in self._volumes.all()])

    async def _create_volume(self, request: web.Request) -> web.StreamResponse:
        name = (await body_of(request)).get("name")
        return reply(self._volumes.create(name if isinstance(name, str) else "").shown())

    async def _named_volume(self, request: web.Request) -> web.StreamResponse:
        return reply(self._volumes.by_name(request.match_info["name"]).shown())

    async def _get_volume(self, request: web.Request) -> web.StreamResponse:
        return reply(self._volumes.get(request.match_info["volume"]).shown())

    async def _delete_volume(self, request: web.Request) -> web.StreamResponse:
        used = {mount.volume for sandbox in self._fleet.all() for mount in sandbox.wanted.mounts}
        self._volumes.delete(request.match_info["volume"], used)
        return web.Response()

    async def _list_secrets(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("name", "")
        found = [secret.shown() for secret in self._secrets.all() if wanted in secret.name]
        return reply({"items": found, "total": len(found), "nextCursor": None})

    async def _create_secret(self, request: web.Request) -> web.StreamResponse:
        return reply(self._secrets.put(await body_of(request)).shown(), 201)

    async def _get_secret(self, request: web.Request) -> web.StreamResponse:
        return reply(self._secrets.get(request.match_info["secret"]).shown())

    async def _update_secret(self, request: web.Request) -> web.StreamResponse:
        return reply(self._secrets.update(request.match_info["secret"], await body_of(request)).shown())

    async def _delete_secret(self, request: web.Request) -> web.StreamResponse:
        self._secrets.delete(request.match_info["secret"])
        return web.Response(status=204)

    async def _list_snapshots(self, _: web.Request) -> web.StreamResponse:
        items = [self._snapshot(name) for name in self._snapshots or [self._default_snapshot]]
        return reply({"items": items, "total": len(items), "page": 1, "totalPages": 1})

    async def _get_snapshot(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["snapshot"]
        if self._snapshots is not None and name not in self._snapshots:
            raise Problem(404, f"Snapshot {name} not found")
        return reply(self._snapshot(name))

    def _snapshot(self, name: str) -> dict[str, Any]:
        began = timestamp(self._began)
        return {
            "id": name,
            "organizationId": ORGANIZATION,
            "general": False,
            "name": name,
            "imageName": name,
            "state": "active",
            "size": 1.0,
            "entrypoint": None,
            "cpu": 1,
            "gpu": 0,
            "mem": 1,
            "disk": 3,
            "errorReason": None,
            "createdAt": began,
            "updatedAt": began,
            "lastUsedAt": None,
            "sourceSandboxId": None,
        }
