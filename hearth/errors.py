"""What a Hearth service answers when it refuses a call, as one typed exception.

Decide by `code` and `reason`, never by the text: reasons are the names of `hearth.types.v1.Reason`, and
`docs/errors.md` says for each what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """The thing an error is about, as `google.rpc.ResourceInfo` names it."""

    type: str
    name: str
    description: str = ""


class CallError(Exception):
    """A call that a service refused or that never reached it.

    `reason` is empty when the status came from gRPC or a proxy and not from Hearth. `metadata` holds ids and numbers,
    `field_violations` are (field path, description) pairs, `retry_after` is in seconds, `details` are further messages.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: tuple[tuple[str, str], ...] = (),
        retry_after: float | None = None,
        resource: Resource | None = None,
        details: tuple[AnyMessage, ...] = (),
    ) -> None:
        super().__init__(f"{reason or code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field_violations = field_violations
        self.retry_after = retry_after
        self.resource = resource
        self.details = details

    def detail(self, kind: type[_M]) -> _M | None:
        """The first of `details` that is a `kind`, unpacked; None when there is none."""
        for packed in self.details:
            message = kind()
            if packed.Unpack(message):
                return message
        return None


class InvalidArgument(CallError):
    """The request is wrong whatever the state; `field_violations` name what."""


class NotFound(CallError):
    """There is no such thing, or not for this token."""


class AlreadyExists(CallError):
    """The id was used before for something else."""


class FailedPrecondition(CallError):
    """The state does not allow it; `reason` and `metadata` say which state."""


class OutOfRange(CallError):
    """A cursor that the log does not hold; start again from the bounds in `metadata`."""


class Aborted(CallError):
    """Another request was faster."""


class PermissionDenied(CallError):
    """The token does not have the project or the scope."""


class Unauthenticated(CallError):
    """No token, or one that does not count any more."""


class ResourceExhausted(CallError):
    """Over a limit; `retry_after` says when to come again, where that helps."""


class Unavailable(CallError):
    """The service, or something that it needs, is away. Repeating with the same `request_id` is safe.

    Its code is CANCELLED where the call reached a process while that ended.
    """


class DeadlineExceeded(CallError):
    """No answer in time. The work may be done; repeating with the same `request_id` is safe."""


class DataLoss(CallError):
    """What was stored cannot be read."""


class Unimplemented(CallError):
    """The service does not know this."""


_CLASSES: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}

# What gRPC tells of a call that the service ended while it was being written to. What the service said is lost.
_STATUS_LOST = "Internal error from Core"

# What fails a call: a stub raises the one, `hearth.Client` the other; `read_error` takes both.
FAILED_CALLS = (grpc.aio.AioRpcError, CallError)


async def answered(call: Awaitable[_T]) -> _T:
    """The answer to a call; what it fails with is raised as `CallError`."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise read_error(error) from error


def read_error(error: grpc.aio.AioRpcError | CallError) -> CallError:
    """Everything that the status of a failed call carries, in the class for its code; what was read stays as it is."""
    if isinstance(error, CallError):
        return error
    status = _status_of(error)
    reason, metadata = "", dict[str, str]()
    violations: list[tuple[str, str]] = []
    retry_after: float | None = None
    resource: Resource | None = None
    further: list[AnyMessage] = []
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry, about = error_details_pb2.RetryInfo(), error_details_pb2.ResourceInfo()
        if packed.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(bad):
            violations += [(violation.field, violation.description) for violation in bad.field_violations]
        elif packed.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        elif packed.Unpack(about):
            resource = Resource(about.resource_type, about.resource_name, about.description)
        else:
            further.append(packed)
    return _CLASSES.get(error.code(), CallError)(
        error.code(),
        error.details() or error.code().name,
        reason=reason,
        metadata=metadata,
        field_violations=tuple(violations),
        retry_after=retry_after,
        resource=resource,
        details=tuple(further),
    )


def status_is_lost(error: CallError) -> bool:
    """Whether the call ended for a reason that gRPC lost on this side; made again, it tells the reason."""
    return error.code is grpc.StatusCode.INTERNAL and error.message == _STATUS_LOST


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
