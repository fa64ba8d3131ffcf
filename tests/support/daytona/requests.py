"""What requests ask for: bodies and queries read into values, or refused."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.daytona import rules
from tests.support.daytona.limits import Resources
from tests.support.daytona.problems import bad
from tests.support.daytona.sandbox import Mount, Sandbox, Wanted

_INTERVALS = ("autoStopInterval", "autoPauseInterval", "autoArchiveInterval", "autoDeleteInterval", "ttlMinutes")
_DEFAULT_PAGE, _BIGGEST_PAGE = 100, 200


def wanted(
    body: Mapping[str, Any], default_snapshot: str, snapshots: Sequence[str] | None, placeholder: Callable[[str], str]
) -> Wanted:
    """What a create request wants.

    `snapshots` are those that exist (None: any). `placeholder` gives what a sandbox sees of a secret of this name.
    """
    build = body.get("buildInfo")
    snapshot = "" if build else body.get("snapshot") or default_snapshot
    if build and body.get("snapshot"):
        raise bad("Cannot specify a snapshot when using a build info entry")
    if snapshot and snapshots is not None and snapshot not in snapshots:
        raise bad(f"Snapshot {snapshot} not found. Did you add it through the Daytona Dashboard?")
    if snapshot and any(body.get(name) is not None for name in ("cpu", "memory", "disk", "gpu")):
        raise bad("Cannot specify Sandbox resources when using a snapshot")
    for name in _INTERVALS:
        if body.get(name) is not None and not isinstance(body[name], int | float):
            raise bad(f"{name} must be a number")
    _check_texts(body, "env")
    _check_texts(body, "labels")
    if body.get("networkAllowList"):
        rules.check_allow_list(body["networkAllowList"])
    mounts = [
        Mount(volume["volumeId"], volume["mountPath"], volume.get("subpath") or "")
        for volume in body.get("volumes") or []
    ]
    for mount in mounts:
        rules.check_mount_path(mount.path)
        rules.check_subpath(mount.subpath)
    return Wanted(
        name=body.get("name") or "",
        snapshot=snapshot,
        dockerfile=(build or {}).get("dockerfileContent", ""),
        user=body.get("user") or "daytona",
        env=body.get("env") or {},
        labels=body.get("labels") or {},
        public=bool(body.get("public")),
        target=body.get("target") or "us",
        resources=Resources(body.get("cpu") or 1, body.get("memory") or 1, body.get("disk") or 3),
        network_block_all=bool(body.get("networkBlockAll")),
        network_allow_list=body.get("networkAllowList"),
        domain_allow_list=body.get("domainAllowList"),
        auto_stop=_or(body.get("autoStopInterval"), 15),
        auto_pause=_or(body.get("autoPauseInterval"), 0),
        auto_archive=_or(body.get("autoArchiveInterval"), 7 * 24 * 60) or 30 * 24 * 60,
        auto_delete=_or(body.get("autoDeleteInterval"), -1),
        ttl=_or(body.get("ttlMinutes"), 0),
        mounts=mounts,
        secrets={
            variable: placeholder(name) for entry in body.get("secrets") or [] for variable, name in entry.items()
        },
    )


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing, and where the next begins."""

    sandboxes: Sequence[Sandbox]
    next_cursor: str | None


def page(request: web.Request, sandboxes: Sequence[Sandbox]) -> Page:
    """The page of sandboxes that a listing asks for."""
    query = request.query
    labels = _labels(query.get("labels", ""))
    states, snapshots = frozenset(query.getall("states", [])), frozenset(query.getall("snapshots", []))
    try:
        limit = int(query.get("limit", _DEFAULT_PAGE))
        after = int(base64.urlsafe_b64decode(query["cursor"])) if query.get("cursor") else 0
    except (ValueError, binascii.Error):
        raise bad("limit and cursor must be what a listing gave") from None
    if not 1 <= limit <= _BIGGEST_PAGE:
        raise bad(f"limit must be between 1 and {_BIGGEST_PAGE}")
    rest = [
        sandbox
        for sandbox in sandboxes
        if sandbox.number > after
        and labels.items() <= sandbox.labels.items()
        and (not states or sandbox.state in states)
        and (not snapshots or sandbox.wanted.snapshot in snapshots)
        and sandbox.id.startswith(query.get("id", ""))
        and sandbox.name.startswith(query.get("name", ""))
        and not (sandbox.state in rules.ERRORED and sandbox.desired == "destroyed")
    ]
    shown = rest[:limit]
    more = base64.urlsafe_b64encode(str(shown[-1].number).encode()).decode() if len(rest) > limit else None
    return Page(shown, more)


def interval(request: web.Request, name: str, least: int) -> float:
    """A number of minutes from the path."""
    try:
        value = float(request.match_info[name])
    except ValueError:
        raise bad("Validation failed (numeric string is expected)") from None
    if value < least:
        raise bad(f"{name} must not be less than {least}")
    return value


def port(request: web.Request) -> int:
    """A port from the path."""
    text = request.match_info["port"]
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise bad("Invalid port")
    return int(text)


def _labels(text: str) -> Mapping[str, str]:
    if not text:
        return {}
    try:
        labels = json.loads(text)
    except json.JSONDecodeError:
        labels = None
    if not isinstance(labels, dict):
        raise bad("Invalid labels JSON")
    return labels


def _check_texts(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise bad(f"{name} must be an object of strings")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
