"""Quotas of the organization, and rate limits with the headers of the real server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.support.daytona.problems import Problem, bad

# The classes of calls that the real server counts apart; every call counts in the first.
CLASSES = ("authenticated", "sandbox-create", "sandbox-lifecycle")


@dataclass(frozen=True, slots=True)
class Resources:
    """Of a sandbox: virtual processors, memory and disk in GiB."""

    cpu: int = 1
    memory: int = 1
    disk: int = 3


@dataclass(frozen=True, slots=True)
class Quotas:
    """What an organization may have. None: no bound. Processor and memory count while a sandbox runs, disk always."""

    cpu: int | None = None
    memory: int | None = None
    disk: int | None = None
    cpu_each: int | None = None
    memory_each: int | None = None
    disk_each: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How many calls of each class are answered per `window` seconds. None: no bound, no headers."""

    authenticated: int | None = None
    create: int | None = None
    lifecycle: int | None = None
    window: float = 60.0


def check_quota(quotas: Quotas, new: Resources, running: Iterable[Resources], all_: Iterable[Resources]) -> None:
    """Refuse what would exceed a quota."""
    running, kept = list(running), list(all_)
    for label, each, wanted in (
        ("CPU", quotas.cpu_each, new.cpu),
        ("Memory", quotas.memory_each, new.memory),
        ("Disk", quotas.disk_each, new.disk),
    ):
        if each is not None and wanted > each:
            raise bad(f"{label} request {wanted} exceeds maximum allowed per sandbox ({each}).")
    for label, most, used in (
        ("CPU", quotas.cpu, sum(one.cpu for one in running) + new.cpu),
        ("memory", quotas.memory, sum(one.memory for one in running) + new.memory),
        ("disk", quotas.disk, sum(one.disk for one in kept) + new.disk),
    ):
        if most is not None and used > most:
            raise Problem(403, f"Total {label} limit exceeded. Maximum allowed: {most}.")


class RateLimiter:
    """Counts calls in fixed windows."""

    def __init__(self, limits: RateLimits) -> None:
        self._most: dict[str, int] = {
            name: most
            for name, most in zip(CLASSES, (limits.authenticated, limits.create, limits.lifecycle), strict=True)
            if most is not None
        }
        self._window = limits.window
        self._began: dict[str, float] = {}
        self._used: dict[str, int] = {}

    def count(self, classes: Iterable[str]) -> Mapping[str, str]:
        """Count a call; the headers of its reply. Raises a 429 `Problem` when one of its classes is used up."""
        headers: dict[str, str] = {}
        over: float | None = None
        for name in classes:
            most = self._most.get(name)
            if most is None:
                continue
            now = time.monotonic()
            if now - self._began.get(name, -math.inf) >= self._window:
                self._began[name], self._used[name] = now, 0
            self._used[name] += 1
            left = max(0.0, self._began[name] + self._window - now)
            headers[f"X-RateLimit-Limit-{name}"] = str(most)
            headers[f"X-RateLimit-Remaining-{name}"] = str(max(0, most - self._used[name]))
            headers[f"X-RateLimit-Reset-{name}"] = str(math.ceil(left))
            if self._used[name] > most:
                over = max(over or 0.0, left)
                headers[f"Retry-After-{name}"] = str(math.ceil(left))
        if over is not None:
            headers["Retry-After"] = str(math.ceil(over))
            raise Problem(429, "ThrottlerException: Too Many Requests", headers=headers)
        return headers
