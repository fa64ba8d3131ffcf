"""Errors as the client sees them: `application/problem+json` with the slugs of sandbox-agent 0.4.2, and a few more
where that daemon does not answer at all."""

from aiohttp import web


class Problem(Exception):
    """An answer with an error status. `slug` is the stable name of the error, `detail` a sentence for a person."""

    def __init__(self, status: int, slug: str, detail: str, **extra: str) -> None:
        super().__init__(detail)
        self.status = status
        self.slug = slug
        self.detail = detail
        self.extra = extra

    def response(self) -> web.Response:
        """The HTTP answer."""
        body = {
            "type": f"urn:sandbox-agent:error:{self.slug}",
            "title": self.slug.replace("_", " ").title(),
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }
        return web.json_response(body, status=self.status, content_type="application/problem+json")


def invalid_request(detail: str) -> Problem:
    """400: the request is malformed; nothing happened."""
    return Problem(400, "invalid_request", f"invalid request: {detail}")


def unsupported_agent(name: str) -> Problem:
    """400: no agent of this name is configured."""
    return Problem(400, "unsupported_agent", f"unsupported agent: {name}", agent=name)


def token_invalid() -> Problem:
    """401: no bearer token, or a wrong one."""
    return Problem(401, "token_invalid", "token invalid: missing or invalid bearer token")


def session_not_found(server_id: str) -> Problem:
    """404: there is no server of this id (in the words of the dialect, a session)."""
    return Problem(404, "session_not_found", f"session not found: {server_id}", sessionId=server_id)


def conflict(detail: str) -> Problem:
    """409: the server id or the request id is taken."""
    return Problem(409, "conflict", f"conflict: {detail}")


def agent_start_failed(detail: str) -> Problem:
    """500: the agent's command could not be started at all."""
    return Problem(500, "agent_start_failed", f"agent start failed: {detail}")


def tree_alive(detail: str) -> Problem:
    """500: processes of the agent outlived SIGKILL for longer than the daemon waits."""
    return Problem(500, "tree_alive", f"processes still alive: {detail}")


def stream_error(detail: str) -> Problem:
    """502: the agent is dead, broken, or does not read its input."""
    return Problem(502, "stream_error", f"stream error: {detail}")


def timeout(detail: str) -> Problem:
    """504: the agent did not answer `initialize` in time and was stopped."""
    return Problem(504, "timeout", f"timeout: {detail}")


def http_error(error: web.HTTPException) -> Problem:
    """What the HTTP layer itself refuses (unknown route, wrong method, body too large) in the same shape."""
    slug = {404: "invalid_request", 405: "method_not_allowed", 413: "payload_too_large"}.get(
        error.status, "invalid_request"
    )
    detail = "endpoint not found" if error.status == 404 else error.reason
    return Problem(error.status, slug, detail)
