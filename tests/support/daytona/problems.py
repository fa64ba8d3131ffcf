"""Refusals, with the bodies of the real server, toolbox and proxy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from aiohttp import web

API, DAEMON, PROXY = "DAYTONA_API", "DAYTONA_DAEMON", "DAYTONA_PROXY"


class Problem(Exception):
    """A refusal: status, message, for the daemon also a code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        source: str = API,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.source = source
        self.headers = dict(headers or {})

    def body(self, method: str, path: str) -> dict[str, Any]:
        """As the part that refuses writes it."""
        body: dict[str, Any] = {
            "path": path,
            "timestamp": timestamp(),
            "statusCode": self.status,
            "message": self.message,
            "source": self.source,
        }
        if self.source == API:
            body["error"] = reason(self.status)
        else:
            body["method"] = method
        if self.code:
            body["code"] = self.code
        return body

    def response(self, request: web.Request) -> web.Response:
        """As an HTTP response."""
        return web.json_response(
            self.body(request.method, request.path), status=self.status, headers=self.headers, dumps=dumps
        )


def reason(status: int) -> str:
    """The words for a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def timestamp(at: float | None = None) -> str:
    """A time in the form of the API; `at` in seconds since the epoch, else now."""
    when = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dumps(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def not_found(reference: str) -> Problem:
    """No such sandbox."""
    return Problem(404, f"Sandbox with ID or name {reference} not found")


def not_running() -> Problem:
    """What proxies answer for a sandbox that does not run."""
    why = "no IP address found. Is the Sandbox started?"
    return Problem(400, f"bad request: {why}", code="SANDBOX_NOT_RUNNING", source=PROXY)


def bad(message: str) -> Problem:
    """A request that can never be fulfilled."""
    return Problem(400, message)


def conflict(message: str) -> Problem:
    """A request that clashes with the state of things."""
    return Problem(409, message)
