"""Who calls, and what they may: bearer tokens from a file of hashes, bound to a project and to scopes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.chassis.errors import HearthError, PermissionDenied, Unauthenticated
from services.chassis.interceptors import Context, Continuation, Handler, Streams, Wrapped, as_handler, as_run
from services.chassis.limits import Limits
from services.chassis.scopes import SCOPE_NAMES, SCOPES, Scope, is_open
from services.chassis.settings import EXIT_USAGE, StartupError

logger = logging.getLogger(__name__)

ANY_PROJECT = "*"
_HASH_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. `project` is `*` for one that may act in every project."""

    name: str
    project: str
    scopes: frozenset[Scope]


ANONYMOUS = Caller("anonymous", ANY_PROJECT, frozenset(SCOPE_NAMES))

_current: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)
# Of the stream being served, to ask again what it may do.
_token: ContextVar[str | None] = ContextVar("token", default=None)


def current_caller() -> Caller:
    """The caller of the RPC that is being served; without an auth file it is anonymous and may do everything."""
    return _current.get()


def require_project(project: str) -> None:
    """Refuse a caller whose token is bound to another project. Every handler calls it with the project it was given."""
    caller = _current.get()
    if caller.project not in (ANY_PROJECT, project):
        raise PermissionDenied(
            f"the token of {caller.name!r} is not for project {project!r}; use a token of that project",
            reason="PROJECT_DENIED",
            metadata={"project": project},
        )


def hash_token(token: str) -> str:
    """The form in which the auth file names a token: SHA-256 of its UTF-8 bytes, in lower-case hex."""
    return hashlib.sha256(token.encode()).hexdigest()


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    scopes: list[Scope]


class TokenFile:
    """A JSON object from token hash to `{"name", "project", "scopes"}`; read again when the file changes."""

    def __init__(self, path: Path) -> None:
        """Read `path`; a `StartupError` says what is wrong with it."""
        self._path = path
        self._stamp = self._stat()
        try:
            self._callers = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"HEARTH_AUTH_FILE {path}: {error}", exit_code=EXIT_USAGE) from None

    def find(self, token: str) -> Caller | None:
        """The caller whose token this is. Compares with every hash, so that the time taken tells nothing."""
        self._reload()
        wanted = hash_token(token)
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, wanted):
                found = caller
        return found

    def _reload(self) -> None:
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._callers = self._read()
            logger.info("auth file read again", extra={"tokens": len(self._callers)})
        except (OSError, ValueError) as error:
            # A half-written file must not lock everybody out; it is read again once it changes.
            logger.error("auth file cannot be read, the former tokens stay", extra={"cause": str(error)})

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def _read(self) -> dict[str, Caller]:
        raw = json.loads(self._path.read_text("utf-8"))
        try:
            entries = TypeAdapter(dict[str, _Entry]).validate_python(raw)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        for key in entries:
            if len(key) != _HASH_LENGTH or not set(key) <= set("0123456789abcdef"):
                raise ValueError("each key must be the SHA-256 of a token, 64 lower-case hex digits")
        return {key: Caller(entry.name, entry.project, frozenset(entry.scopes)) for key, entry in entries.items()}


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses who may not make a call, and tells the handler who does.

    The rights of a stream are checked again every `recheck` seconds while it is open; lost rights end it.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        streams: Streams,
        *,
        recheck: float,
        scopes: Mapping[str, Scope] = SCOPES,
        limits: Limits | None = None,
    ) -> None:
        self._tokens = tokens
        self._streams = streams
        self._recheck = recheck
        self._scopes = scopes
        self._limits = limits
        self._wrapped = Wrapped()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or self._tokens is None or is_open(method):
            return handler
        token = _bearer(handler_call_details)
        try:
            caller = self._check(method, token)
            if self._limits is not None and caller.project != ANY_PROJECT:
                self._limits.call(caller.project, self._scopes[method])
        except HearthError as refusal:
            return _refusing(handler, refusal)
        # This runs in the task that runs the handler, so the handler sees it.
        _current.set(caller)
        if handler.response_streaming:
            _token.set(token)
            return self._wrapped.of(method, handler, self._rechecked)
        return handler

    def _check(self, method: str, token: str | None) -> Caller:
        assert self._tokens is not None
        caller = self._tokens.find(token) if token else None
        if caller is None:
            raise Unauthenticated(
                "no known token; send the metadata `authorization: Bearer <token>`", reason="TOKEN_INVALID"
            )
        scope = self._scopes.get(method)
        if scope is None or scope not in caller.scopes:
            raise PermissionDenied(
                f"the token of {caller.name!r} lacks the scope that this call needs: {scope or 'none may call it'}",
                reason="SCOPE_MISSING",
                metadata={"scope": scope or ""},
            )
        return caller

    def _rechecked(self, method: str, handler: Handler) -> Handler:
        run = as_run(handler)

        async def rechecked(request: Any, context: Context) -> None:
            token = _token.get()
            task = asyncio.current_task()
            assert task is not None
            loop = asyncio.get_running_loop()

            def again() -> None:
                try:
                    self._check(method, token)
                except HearthError as refusal:
                    self._streams.end(task, refusal)
                else:
                    timers[0] = loop.call_later(self._recheck, again)

            project = _current.get().project
            limits = self._limits if project != ANY_PROJECT else None
            if limits is not None:
                limits.open_stream(project)
            timers = [loop.call_later(self._recheck, again)]
            try:
                await run(request, context)
            finally:
                timers[0].cancel()
                if limits is not None:
                    limits.close_stream(project)

        return as_handler(handler, rechecked)


def _bearer(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer":
                return token.strip()
    return None


def _refusing(handler: Handler, refusal: HearthError) -> Handler:
    async def refuse(_request: Any, _context: Context) -> None:
        raise refusal

    return as_handler(handler, refuse)
