"""Reading what a service answered: reasons and details where they are, and sense where they are not."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from hearth.errors import DETAILS_KEY, Resource, Unavailable, read_error
from hearth.types.v1 import session_pb2


def rpc_error(code: grpc.StatusCode, details: str | None, *trailing: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def test_everything_that_a_status_carries() -> None:
    status = status_pb2.Status(code=9, message="no")
    cursor = session_pb2.Cursor(log_id="l", sequence=7)
    for detail in (
        error_details_pb2.ErrorInfo(reason="LOG_REPLACED", domain="hearth.dev", metadata={"head": "9"}),
        error_details_pb2.BadRequest(
            field_violations=[error_details_pb2.BadRequest.FieldViolation(field="a.b", description="must be set")]
        ),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
        error_details_pb2.ResourceInfo(resource_type="session", resource_name="p/s"),
        cursor,
    ):
        status.details.add().Pack(detail)
    found = read_error(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "no", (DETAILS_KEY, status.SerializeToString())))
    assert (found.code, found.message, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "no", "LOG_REPLACED")
    assert found.metadata == {"head": "9"}
    assert found.field_violations == (("a.b", "must be set"),)
    assert found.retry_after == 1.5
    assert found.resource == Resource("session", "p/s")
    assert found.detail(session_pb2.Cursor) == cursor
    assert found.detail(session_pb2.SessionKey) is None
    assert str(found) == "LOG_REPLACED: no"


@pytest.mark.parametrize("trailing", [(), ((DETAILS_KEY, b"\xff\xff"),), (("other", "x"),)])
def test_a_status_that_is_not_ours(trailing: tuple[tuple[str, str | bytes], ...]) -> None:
    found = read_error(rpc_error(grpc.StatusCode.UNAVAILABLE, None, *trailing))
    assert (found.code, found.message, found.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "")
    assert found.retry_after is None
    assert str(found) == "UNAVAILABLE: UNAVAILABLE"


def test_a_call_that_a_service_cut_off_at_its_end_can_be_made_again() -> None:
    found = read_error(rpc_error(grpc.StatusCode.CANCELLED, "CANCELLED"))
    assert isinstance(found, Unavailable)
    assert found.code is grpc.StatusCode.CANCELLED
