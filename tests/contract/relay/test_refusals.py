"""Subscribe refuses what is wrong at once, with a status, a reason and the field or the bounds."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from hearth.relay.v1 import relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_turns import append


async def refused(services: Services, **request: Any) -> HearthError:
    stub = relay_service_pb2_grpc.RelayServiceStub(services.relay)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Subscribe(relay_service_pb2.SubscribeRequest(**request), timeout=10):
            pass
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("session", "fields"),
    [
        (session_pb2.SessionKey(), ["session.project", "session.session"]),
        (session_pb2.SessionKey(project="p" * 129, session="s"), ["session.project"]),
        (session_pb2.SessionKey(project="p", session="a b"), ["session.session"]),
    ],
)
async def test_wrong_session(services: Services, session: session_pb2.SessionKey, fields: list[str]) -> None:
    error = await refused(services, session=session)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert [field for field, _ in error.field_violations] == fields


@pytest.mark.parametrize(
    ("cursor", "field"),
    [
        (session_pb2.Cursor(log_id="not-a-uuid", sequence=1), "after.log_id"),
        (session_pb2.Cursor(sequence=1, tag="xyz"), "after.tag"),
        (session_pb2.Cursor(sequence=2**63), "after.sequence"),
    ],
)
async def test_malformed_cursor(services: Services, cursor: session_pb2.Cursor, field: str) -> None:
    error = await refused(services, session=events.key(), after=cursor)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert [name for name, _ in error.field_violations] == [field]


async def test_cursor_above_the_head(services: Services) -> None:
    session = events.key()
    await append(services.history, session, events.custom(), events.custom())
    error = await refused(services, session=session, after=session_pb2.Cursor(sequence=3))
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_AHEAD")
    assert (error.metadata["oldest"], error.metadata["head"]) == ("1", "2")
    assert error.metadata["log_id"]


async def test_cursor_of_a_session_that_nobody_knows(services: Services) -> None:
    error = await refused(services, session=events.key(), after=session_pb2.Cursor(sequence=3))
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_AHEAD")


async def test_cursor_of_another_log(services: Services) -> None:
    session = events.key()
    await append(services.history, session, events.custom(), events.custom())
    async with reading(services.relay, session) as reader:
        await reader.until_ready()
    good = reader.events[0].cursor
    for wrong in (
        session_pb2.Cursor(log_id=events.new_id(), sequence=1, tag=good.tag),
        session_pb2.Cursor(log_id=good.log_id, sequence=1, tag="0" * 16),
        # At the head too, where nothing is left to be read.
        session_pb2.Cursor(log_id=good.log_id, sequence=2, tag="0" * 16),
        session_pb2.Cursor(log_id=events.new_id(), sequence=2),
    ):
        error = await refused(services, session=session, after=wrong)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LOG_REPLACED")
        assert {"log_id", "oldest", "head"} <= set(error.metadata)


async def test_a_request_that_does_not_parse(services: Services) -> None:
    raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = services.relay.unary_stream(
        "/hearth.relay.v1.RelayService/Subscribe"
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in raw(b"\xff\xff\xff", timeout=10):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
