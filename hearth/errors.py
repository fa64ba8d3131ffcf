"""What a Hearth service answers when it refuses a call, as one typed exception.

Decide by `code` and `reason`, never by the text: reasons are the names of `hearth.types.v1.Reason`, and
`docs/errors.md` says for each what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"

_M = TypeVar("_M", bound=Message)


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


def read_error(error: grpc.aio.AioRpcError) -> CallError:
    """Everything that the status of a failed call carries."""
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
    return CallError(
        error.code(),
        error.details() or error.code().name,
        reason=reason,
        metadata=metadata,
        field_violations=tuple(violations),
        retry_after=retry_after,
        resource=resource,
        details=tuple(further),
    )


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
