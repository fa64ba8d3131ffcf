"""Who calls, and what they may: bearer tokens from a file of hashes, bound to a project and to scopes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from hearth.channel import MAX_MESSAGE_BYTES
from hearth.secret import Secret
from services.chassis.errors import HearthError, PermissionDenied, ResourceExhausted, Unauthenticated
from services.chassis.interceptors import Context, Continuation, Handler, Run, Streams, Wrapped, as_handler, as_run
from services.chassis.limits import UNBOUNDED, Limits, Quota
from services.chassis.scopes import SCOPE_NAMES, SCOPES, Scope, is_open
from services.chassis.settings import EXIT_USAGE, StartupError

logger = logging.getLogger(__name__)

ANY_PROJECT = "*"
_HASH_LENGTH = 64

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. `project` is `*` for one that may act in every project; `quota` is what its project may ask."""

    name: str
    project: str
    scopes: frozenset[Scope]
    quota: Quota = UNBOUNDED


ANONYMOUS = Caller("anonymous", ANY_PROJECT, frozenset(SCOPE_NAMES))

_NO_TOKEN = Secret()

_current: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)
# Of the stream being served, to ask again what it may do.
_token: ContextVar[Secret] = ContextVar("token", default=_NO_TOKEN)


def current_caller() -> Caller:
    """The caller of the RPC that is being served; without an auth file it is anonymous and may do everything."""
    return _current.get()


def require_project(project: str) -> None:
    """Refuse a caller whose token is bound to another project. Every handler calls it with the project it was given."""
    caller = _current.get()
    if caller.project not in (ANY_PROJECT, project):
        raise _denied(caller, project)


def hash_token(token: str) -> str:
    """The form in which the auth file names a token: SHA-256 of its UTF-8 bytes, in lower-case hex."""
    return hashlib.sha256(token.encode()).hexdigest()


class _Limits(BaseModel):
    """What an entry says of its project; None says nothing, 0 that there is no limit."""

    model_config = ConfigDict(extra="forbid")

    rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    streams: int | None = Field(default=None, ge=0)
    message_bytes: int | None = Field(default=None, ge=0, le=MAX_MESSAGE_BYTES)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    scopes: list[Scope]
    limits: _Limits = _Limits()

    @model_validator(mode="after")
    def _of_one_project(self) -> _Entry:
        if self.project == ANY_PROJECT and self.limits != _Limits():
            raise ValueError(f"the token of {self.name!r} is for all projects, which have no limits together")
        return self


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError, with what is wrong, for what cannot be an entry of the auth file."""
    try:
        _Entry.model_validate(entry)
    except ValidationError as error:
        raise ValueError(_first_of(error)) from None


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]))


class TokenFile:
    """A JSON object from token hash to `{"name", "project", "scopes", "limits"}`; read again when the file changes.

    `limits` may be left out. It has `rate`, `streams` and `message_bytes`, each of which stands for the whole project
    in place of what `quota` says; of several tokens of a project the smallest counts, and 0 is no limit.
    """

    def __init__(self, path: Path, quota: Quota = UNBOUNDED) -> None:
        """Read `path`; a `StartupError` says what is wrong with it."""
        self._path = path
        self._quota = quota
        self._stamp = self._stat()
        # What was told last of a file that cannot be read, and with which stamp.
        self._told: tuple[object, str] | None = None
        try:
            self._callers = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"HEARTH_AUTH_FILE {path}: {error}", exit_code=EXIT_USAGE) from None

    def find(self, token: Secret) -> Caller | None:
        """The caller whose token this is. Compares with every hash, so that the time taken tells nothing."""
        self._reload()
        wanted = hash_token(token.reveal())
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, wanted):
                found = caller
        return found

    def _reload(self) -> None:
        stamp = None
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._callers = self._read()
        except (OSError, ValueError) as error:
            # A half-written file must not lock everybody out. It is tried at each call until it can be read: what kept
            # it from that, as its rights or a lack of descriptors, may go without a trace in its stamp.
            if self._told != (stamp, str(error)):
                self._told = (stamp, str(error))
                logger.error("auth file cannot be read, the former tokens stay", extra={"cause": str(error)})
        else:
            self._stamp, self._told = stamp, None
            logger.info("auth file read again", extra={"tokens": len(self._callers)})

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
            raise ValueError(_first_of(error)) from None
        for key in entries:
            if len(key) != _HASH_LENGTH or not set(key) <= set("0123456789abcdef"):
                raise ValueError("each key must be the SHA-256 of a token, 64 lower-case hex digits")
        quotas = self._quotas(entries.values())
        return {
            key: Caller(entry.name, entry.project, frozenset(entry.scopes), quotas.get(entry.project, UNBOUNDED))
            for key, entry in entries.items()
        }

    def _quotas(self, entries: Iterable[_Entry]) -> dict[str, Quota]:
        """By project; one bound to all of them has none."""
        said: dict[str, list[_Limits]] = {}
        for entry in entries:
            if entry.project != ANY_PROJECT:
                said.setdefault(entry.project, []).append(entry.limits)
        return {
            project: Quota(
                rate=_smallest((one.rate for one in limits), self._quota.rate),
                streams=_smallest((one.streams for one in limits), self._quota.streams),
                message_bytes=_smallest((one.message_bytes for one in limits), self._quota.message_bytes),
            )
            for project, limits in said.items()
        }


def _smallest(said: Iterable[_N | None], default: _N) -> _N:
    """Of what entries say the smallest that is a limit, 0 where they all say that there is none."""
    numbers = [one for one in said if one is not None]
    return min((one for one in numbers if one), default=numbers[0]) if numbers else default


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses who may not make a call, and tells the handler who does.

    The rights of a stream, of either direction, are checked again every `recheck` seconds while it is open; lost rights
    end it, and a token that is for another project by then.
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
            if self._limits is not None:
                self._limits.call(caller.project, self._scopes[method], caller.quota)
        except HearthError as refusal:
            return _refusing(handler, refusal)
        # This runs in the task that runs the handler, so the handler sees it.
        _current.set(caller)
        _token.set(token)
        return self._wrapped.of(method, handler, self._guarded)

    def _guarded(self, method: str, handler: Handler) -> Handler:
        streams = handler.request_streaming or handler.response_streaming
        run = self._rechecked(method, as_run(handler)) if streams else as_run(handler)
        return as_handler(handler, run, parse=_bounded(handler))

    def _check(self, method: str, token: Secret) -> Caller:
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

    def _rechecked(self, method: str, run: Run) -> Run:
        async def rechecked(request: Any, context: Context) -> Any:
            token, began = _token.get(), _current.get()
            task = asyncio.current_task()
            assert task is not None
            loop = asyncio.get_running_loop()

            def again() -> None:
                try:
                    caller = self._check(method, token)
                    if caller.project not in (ANY_PROJECT, began.project):
                        raise _denied(caller, began.project)
                except HearthError as refusal:
                    self._streams.end(task, refusal)
                else:
                    timers[0] = loop.call_later(self._recheck, again)

            if self._limits is not None:
                self._limits.open_stream(began.project, began.quota)
            timers = [loop.call_later(self._recheck, again)]
            try:
                return await run(request, context)
            finally:
                timers[0].cancel()
                if self._limits is not None:
                    self._limits.close_stream(began.project)

        return rechecked


def _denied(caller: Caller, project: str) -> PermissionDenied:
    return PermissionDenied(
        f"the token of {caller.name!r} is not for project {project!r}; use a token of that project",
        reason="PROJECT_DENIED",
        metadata={"project": project},
    )


def _bounded(handler: Handler) -> Callable[[bytes], Any] | None:
    """The handler's deserializer, which does not read what is more than the project of the caller may send at once."""
    parse = handler.request_deserializer
    if parse is None:
        return None

    def bounded(data: bytes) -> Any:
        caller = _current.get()
        most = caller.quota.message_bytes
        if most and len(data) > most:
            raise ResourceExhausted(
                f"a message of project {caller.project!r} may have {most} bytes, this one has {len(data)}; split it, or"
                " ask the operator for more",
                reason="TOO_LARGE",
                metadata={"project": caller.project, "limit": str(most), "size": str(len(data))},
            )
        return parse(data)

    return bounded


def _bearer(details: grpc.HandlerCallDetails) -> Secret:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer":
                return Secret(token.strip())
    return _NO_TOKEN


def _refusing(handler: Handler, refusal: HearthError) -> Handler:
    async def refuse(_request: Any, _context: Context) -> None:
        raise refusal

    return as_handler(handler, refuse)
