"""One exception tree for every service, and its form on the wire.

Raise these anywhere below a servicer; the interceptor turns them into a `google.rpc.Status`. `from_rpc_error` reads one
back at the caller, so that a failure of another service is handled by class and reason, never by its text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Self, TypeVar

import asyncpg
import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from hearth import errors as wire

DOMAIN = "hearth.dev"
DETAILS_KEY = wire.DETAILS_KEY
# What a caller is told to wait when a database or the bus is away: long enough for a restart, short for a person.
DEPENDENCY_RETRY_SECONDS = 1.0

# A status travels as headers, of which callers take 8 KiB without question and 16 at most, in Base64 and with its text
# twice: what is longer would arrive as RESOURCE_EXHAUSTED, without a reason. All of these are bytes of UTF-8.
_MESSAGE_BYTES = 1000
_TEXT_BYTES = 300
_VIOLATIONS_BYTES = 2500

FieldViolation = tuple[str, str]
_M = TypeVar("_M", bound=Message)

Resource = wire.Resource


class HearthError(Exception):
    """An error that a caller may see.

    `message` says what happened and what to do about it. `reason` is a name of `hearth.types.v1.Reason` without its
    prefix. `field_violations` are (field path, description) pairs, `retry_after` is in seconds, `metadata` carries ids
    and numbers, never payloads. `details` are further messages for the status, such as a cursor.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        field_violations: Sequence[FieldViolation] = (),
        retry_after: float | None = None,
        resource: Resource | tuple[str, str, str] | None = None,
        details: Sequence[Message] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        # One error may be raised to many callers at once: what is true of one of them is said by `telling`.
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.field_violations = tuple(field_violations)
        self.retry_after = retry_after
        self.resource = Resource(*resource) if isinstance(resource, tuple) else resource
        self.details = tuple(details)

    def to_status(self) -> status_pb2.Status:
        """This error as `google.rpc.Status`, ErrorInfo first, other details only where they say something.

        It fits into the headers of an answer: long texts are cut, and of very many violations the first are told, with
        the number of the others.
        """
        status = status_pb2.Status(code=self.code.value[0], message=_cut(self.message, _MESSAGE_BYTES))
        metadata = {key: _cut(value) for key, value in self.metadata.items()}
        found: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=metadata)]
        if self.field_violations:
            found.append(_bad_request(self.field_violations))
        if self.retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(round(self.retry_after * 1e9))
            found.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.resource is not None:
            found.append(
                error_details_pb2.ResourceInfo(
                    resource_type=self.resource.type,
                    resource_name=_cut(self.resource.name),
                    description=_cut(self.resource.description),
                )
            )
        for detail in (*found, *self.details):
            if isinstance(detail, AnyMessage):
                status.details.append(detail)
            else:
                status.details.add().Pack(detail)
        return status

    def telling(self, metadata: Mapping[str, str]) -> Self:
        """The same error for one caller, with `metadata` besides its own."""
        return type(self)(
            self.message,
            reason=self.reason,
            metadata={**self.metadata, **metadata},
            field_violations=self.field_violations,
            retry_after=self.retry_after,
            resource=self.resource,
            details=self.details,
        )

    def detail(self, kind: type[_M]) -> _M | None:
        """The first of `details` that is a `kind`, unpacked; None when there is none."""
        for found in self.details:
            if isinstance(found, kind):
                return found
            if isinstance(found, AnyMessage):
                message = kind()
                if found.Unpack(message):
                    return message
        return None


def _bad_request(violations: Sequence[FieldViolation]) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    for number, (field, description) in enumerate(violations):
        if bad.ByteSize() > _VIOLATIONS_BYTES:
            bad.field_violations.add(description=f"{len(violations) - number} more of such problems")
            break
        bad.field_violations.add(field=_cut(field), description=_cut(description))
    return bad


def _cut(text: str, most: int = _TEXT_BYTES) -> str:
    """The beginning of a text that is longer than `most` bytes."""
    # Quick for what is short, which is nearly all.
    if len(text) * 4 <= most or len(encoded := text.encode("utf-8", "replace")) <= most:
        return text
    return encoded[: most - 3].decode("utf-8", "ignore") + "…"


class InvalidArgument(HearthError):
    """The request itself is wrong; sending it again changes nothing."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(HearthError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(HearthError):
    """What the request would make exists with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(HearthError):
    """The request is right, but not in the present state."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(HearthError):
    """The request lost a race and may be sent again."""

    code = grpc.StatusCode.ABORTED


class ResourceExhausted(HearthError):
    """A quota or cap is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(HearthError):
    """The service cannot answer now; the same request may be sent again."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(HearthError):
    """The time that the caller gave is over; the outcome may be unknown."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class PermissionDenied(HearthError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(HearthError):
    """The caller is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED


class OutOfRange(HearthError):
    """A position lies outside of what exists."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(HearthError):
    """This is not built yet."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(HearthError):
    """A defect of ours; the log holds the stack."""

    code = grpc.StatusCode.INTERNAL


class Cancelled(HearthError):
    """The caller gave up."""

    code = grpc.StatusCode.CANCELLED


class DataLoss(HearthError):
    """Stored data is missing or broken."""

    code = grpc.StatusCode.DATA_LOSS


_BY_CODE: dict[grpc.StatusCode, type[HearthError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        Aborted,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        PermissionDenied,
        Unauthenticated,
        OutOfRange,
        Unimplemented,
        Internal,
        Cancelled,
        DataLoss,
    )
}


def invalid(field: str, description: str, *, reason: str = "INVALID_FIELD") -> InvalidArgument:
    """The error for one wrong field: `field` is its path in the request, `description` says what it must be."""
    return InvalidArgument(f"{field}: {description}", reason=reason, field_violations=((field, description),))


def not_implemented(what: str) -> Unimplemented:
    """The error for what the contract has and this version does not; `what` is the subject of the sentence."""
    return Unimplemented(f"{what} is not built in this version", reason="NOT_IMPLEMENTED")


def dependency_unavailable(name: str, why: str = "does not answer") -> Unavailable:
    """The error for a database, bus or service that is away; `name` is what an operator calls it."""
    return Unavailable(
        f"{name} {why}; the request changed nothing that is known, send it again",
        reason="DEPENDENCY_UNAVAILABLE",
        metadata={"dependency": name},
        retry_after=DEPENDENCY_RETRY_SECONDS,
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> HearthError:
    """The exception that the called service raised, with everything its status carried.

    A status without our details (made by gRPC itself, by a proxy) becomes the class of its code, reason UNSPECIFIED.
    But CANCELLED, for which nobody asked who waits for the answer, is what gRPC makes of calls that reach a server
    while it ends.
    """
    found = wire.read_error(error)
    if found.code is grpc.StatusCode.CANCELLED and not found.reason:
        return dependency_unavailable("a service that this one calls", "ended before it answered")
    return _BY_CODE.get(found.code, Internal)(
        found.message,
        reason=found.reason or "UNSPECIFIED",
        metadata=found.metadata,
        field_violations=found.field_violations,
        retry_after=found.retry_after,
        resource=found.resource,
        details=found.details,
    )


# A server, or a connection to it, that is not able to work now. The broad classes are meant whole: a lack of memory,
# disk or connections; whatever an operator or a timeout of the server ends; trouble of its system.
_POSTGRES_AWAY: tuple[type[Exception], ...] = (
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    # A command on a connection to which the server has said goodbye, before its end was seen.
    asyncpg.InternalClientError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.LockNotAvailableError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
_VALKEY_AWAY = ("ConnectionError", "TimeoutError", "BusyLoadingError", "ReadOnlyError", "OutOfMemoryError")
# What a call to another service may fail with while that service is restarting: a server that refuses a storm of new
# calls answers CANCELLED, and a deadline that we set ourselves says only that it was too slow.
_SERVICE_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def as_hearth_error(error: Exception) -> HearthError | None:
    """What a caller should see for `error`; None means a defect: log it with its stack and answer `internal()`."""
    if isinstance(error, ExceptionGroup):
        seen = [as_hearth_error(inner) for inner in error.exceptions]
        return None if None in seen else seen[0]
    if isinstance(error, HearthError):
        return error
    if isinstance(error, NotImplementedError):
        return not_implemented("this RPC")
    dependency = _away(error)
    return dependency_unavailable(dependency) if dependency else None


def _away(error: Exception) -> str | None:
    """Which dependency does not answer, when that is what `error` means."""
    if isinstance(error, grpc.aio.AioRpcError):
        return "a service that this one calls" if error.code() in _SERVICE_AWAY else None
    if isinstance(error, asyncpg.InterfaceError):
        # asyncpg uses it for a connection or pool that is closed (the pool takes a broken one back while it is in use),
        # and for wrong use of it, which is ours to repair.
        return "Postgres" if any(word in str(error) for word in ("clos", "released back to the pool")) else None
    if isinstance(error, _POSTGRES_AWAY):
        return "Postgres"
    if isinstance(error, _valkey_away()):
        return "Valkey"
    return "a dependency" if isinstance(error, TimeoutError | ConnectionError) else None


def _valkey_away() -> tuple[type[Exception], ...]:
    # Half of the services have no Valkey, and its client takes a tenth of a second to load.
    loaded = sys.modules.get("redis.exceptions")
    return tuple(getattr(loaded, name) for name in _VALKEY_AWAY) if loaded is not None else ()


def internal() -> Internal:
    """The answer for a defect: it says nothing about the cause, which is in the log beside the trace id."""
    return Internal("an internal error; the service log holds it under this call's trace id", reason="INTERNAL")
