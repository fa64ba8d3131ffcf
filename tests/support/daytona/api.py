"""The API of sandboxes: what is under `/api/sandbox`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from tests.support.daytona import requests, rules, sandbox
from tests.support.daytona.fleet import Fleet
from tests.support.daytona.limits import Resources, check_quota
from tests.support.daytona.organization import Secrets
from tests.support.daytona.problems import Problem, bad
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import Gate, body_of, reply, transition_fault

_LONGEST_SIGNED_SECONDS = 86400


@dataclass(frozen=True, slots=True)
class Urls:
    """Where things are, without a trailing slash."""

    toolbox: str
    preview: str


@dataclass(slots=True)
class Signed:
    """Tokens of signed preview URLs: for which sandbox and port, until when (monotonic)."""

    tokens: dict[str, tuple[str, int, float]]

    def make(self, sandbox_id: str, port: int, seconds: float) -> str:
        """A new token."""
        token = secrets.token_hex(8)
        self.tokens[token] = (sandbox_id, port, time.monotonic() + seconds)
        return token

    def find(self, token: str, port: int) -> str | None:
        """The sandbox that a token opens at this port, if any."""
        sandbox_id, allowed, until = self.tokens.get(token, ("", 0, 0.0))
        return sandbox_id if allowed == port and time.monotonic() < until else None


class SandboxApi:
    """Handlers. `patience`: seconds for which create, start and recover wait for the sandbox before they answer."""

    def __init__(
        self,
        fleet: Fleet,
        stored: Secrets,
        signed: Signed,
        urls: Urls,
        *,
        patience: float,
        snapshots: Sequence[str] | None,
        default_snapshot: str,
    ) -> None:
        self._fleet = fleet
        self._secrets = stored
        self._signed = signed
        self._urls = urls
        self._patience = patience
        self._snapshots = snapshots
        self._default_snapshot = default_snapshot

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, below the prefix of the API."""
        counted, one = ("authenticated", "sandbox-lifecycle"), "/sandbox/{sandbox}"
        create = ("authenticated", "sandbox-create")
        return [
            web.post("/sandbox", gate.guard("create", self._create, classes=create)),
            web.get("/sandbox", gate.guard("list", self._list)),
            web.get(one, gate.guard("get", self._get)),
            web.delete(one, gate.guard("delete", self._delete, classes=counted)),
            web.post(f"{one}/start", gate.guard("start", self._start, classes=counted)),
            web.post(f"{one}/stop", gate.guard("stop", self._stop, classes=counted)),
            web.post(f"{one}/recover", gate.guard("start", self._recover, classes=counted)),
            web.post(f"{one}/archive", gate.guard("stop", self._archive, classes=counted)),
            web.post(f"{one}/resize", gate.guard("start", self._resize, classes=counted)),
            web.post(f"{one}/pause", gate.guard("stop", self._unsupported, classes=counted)),
            web.post(f"{one}/fork", gate.guard("create", self._unsupported, classes=counted)),
            web.put(f"{one}/labels", gate.guard("labels", self._labels)),
            web.post(f"{one}/last-activity", gate.guard("activity", self._activity)),
            web.post(f"{one}/network-settings", gate.guard("network", self._network)),
            web.post(f"{one}/public/{{flag}}", gate.guard("network", self._public)),
            *(
                web.post(f"{one}/{name}/{{interval}}", gate.guard("labels", self._interval))
                for name in ("autostop", "autopause", "autoarchive", "autodelete", "ttl")
            ),
            web.get(f"{one}/ports/{{port}}/preview-url", gate.guard("preview_url", self._preview_url)),
            web.get(f"{one}/ports/{{port}}/signed-preview-url", gate.guard("preview_url", self._sign)),
            web.post(
                f"{one}/ports/{{port}}/signed-preview-url/{{token}}/expire", gate.guard("preview_url", self._expire)
            ),
            web.get(f"{one}/toolbox-proxy-url", gate.guard("toolbox_url", self._toolbox_url)),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        wanted = requests.wanted(body, self._default_snapshot, self._snapshots, self._secrets.placeholder)
        made = self._fleet.create(wanted, transition_fault(request))
        if not wanted.dockerfile:
            await self._until_started(made)
        return self._shown(made)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        page = requests.page(request, self._fleet.all())
        items = [sandbox.item(one, self._urls.toolbox) for one in page.sandboxes]
        return reply({"items": items, "nextCursor": page.next_cursor})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return self._shown(self._named(request))

    async def _start(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        restored = found.state in ("archived", "archiving")
        self._fleet.start(found, transition_fault(request))
        if not restored:
            await self._until_started(found)
        return self._shown(found)

    async def _recover(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        self._fleet.recover(found, transition_fault(request))
        await self._until_started(found)
        return self._shown(found)

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        self._fleet.stop(found, transition_fault(request))
        return self._shown(found)

    async def _archive(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        self._fleet.archive(found)
        return self._shown(found)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        self._fleet.delete(found, transition_fault(request))
        return self._shown(found)

    async def _resize(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        body = await body_of(request)
        rules.check_resize(found.standing)
        had = found.resources
        new = Resources(body.get("cpu") or had.cpu, body.get("memory") or had.memory, body.get("disk") or had.disk)
        if new.disk < had.disk:
            raise bad("Sandbox disk size cannot be decreased")
        if new.disk > had.disk and found.state != "stopped":
            raise bad("Disk resize can only be performed on a stopped sandbox")
        others = [one for one in self._fleet.all() if one is not found]
        running = [one.resources for one in others if one.state in rules.CHARGED]
        check_quota(self._fleet.setting.quotas, new, running, [one.resources for one in others])
        found.resources = new
        found.notify()
        return self._shown(found)

    async def _unsupported(self, request: web.Request) -> web.StreamResponse:
        self._named(request)
        raise Problem(422, "Operation is not supported for sandboxes of class container")

    async def _labels(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        labels = (await body_of(request)).get("labels")
        if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
            raise bad("labels must be an object of strings")
        found.labels = dict(labels)
        found.notify()
        return reply({"labels": found.labels})

    async def _activity(self, request: web.Request) -> web.StreamResponse:
        self._named(request).touch()
        return web.Response(status=201)

    async def _network(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        body = await body_of(request)
        allowed, domains, block = (
            body.get(name) for name in ("networkAllowList", "domainAllowList", "networkBlockAll")
        )
        if allowed:
            rules.check_allow_list(allowed)
        if block is not None:
            found.network_block_all = bool(block)
            found.network_allow_list = found.domain_allow_list = None
        if allowed is not None:
            found.network_allow_list = allowed or None
        if domains is not None:
            found.domain_allow_list = domains or None
        found.notify()
        return self._shown(found)

    async def _public(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        found.public = request.match_info["flag"] == "true"
        found.notify()
        return self._shown(found)

    async def _interval(self, request: web.Request) -> web.StreamResponse:
        found = self._named(request)
        which = request.path.rsplit("/", 2)[1]
        minutes = requests.interval(request, "interval", -1 if which == "autodelete" else 0)
        if which == "autostop":
            found.auto_stop = minutes
        elif which == "autopause":
            found.auto_pause = minutes
        elif which == "autoarchive":
            found.auto_archive = minutes or 30 * 24 * 60
        elif which == "autodelete":
            found.auto_delete = minutes
        else:
            found.ttl = minutes
        found.notify()
        return self._shown(found)

    async def _preview_url(self, request: web.Request) -> web.StreamResponse:
        found, port = self._named(request), requests.port(request)
        url = f"{self._urls.preview}/{port}-{found.id}"
        return reply({"sandboxId": found.id, "url": url, "token": found.preview_token})

    async def _sign(self, request: web.Request) -> web.StreamResponse:
        found, port = self._named(request), requests.port(request)
        text = request.query.get("expiresInSeconds", "60")
        if not text.isdigit() or not 1 <= int(text) <= _LONGEST_SIGNED_SECONDS:
            raise bad("expiresInSeconds must be between 1 second and 24 hours")
        token = self._signed.make(found.id, port, int(text))
        url = f"{self._urls.preview}/{port}-{token}"
        return reply({"sandboxId": found.id, "port": port, "token": token, "url": url})

    async def _expire(self, request: web.Request) -> web.StreamResponse:
        self._named(request)
        self._signed.tokens.pop(request.match_info["token"], None)
        return web.Response()

    async def _toolbox_url(self, request: web.Request) -> web.StreamResponse:
        self._named(request)
        return reply({"url": self._urls.toolbox})

    async def _until_started(self, found: Sandbox) -> None:
        await self._fleet.wait(found, ("started", "error", "build_failed", "destroyed"), self._patience)
        if found.state in rules.ERRORED:
            raise bad(f"Sandbox failed to start: {found.error_reason}")

    def _named(self, request: web.Request) -> Sandbox:
        return self._fleet.find(request.match_info["sandbox"])

    def _shown(self, found: Sandbox) -> web.Response:
        return reply(sandbox.full(found, self._urls.toolbox))
