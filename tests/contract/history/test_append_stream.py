"""AppendStream: replies in order, and once a request fails nothing behind it overtakes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from hearth.history.v1 import history_service_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.support import events
from tests.support.history_client import APPENDED, DUPLICATE, Client, ids
from tests.support.offering import offer

Request = history_service_pb2.AppendStreamRequest
if TYPE_CHECKING:
    Call: TypeAlias = grpc.aio.StreamStreamCall[Any, history_service_pb2.AppendStreamResponse]


async def replies(call: Call, count: int) -> list[history_service_pb2.AppendReply]:
    """The next replies of a stream."""
    found: list[history_service_pb2.AppendReply] = []
    while len(found) < count:
        response = await call.read()
        assert isinstance(response, history_service_pb2.AppendStreamResponse), found
        found += response.replies
    return found


async def failure(call: Call) -> HearthError:
    """The error that a stream ends with; replies before it are dropped."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended well")


async def test_pipelined_requests_are_answered_in_order(history: Client) -> None:
    sessions = [events.key() for _ in range(8)]
    call = history.stub.AppendStream()
    sent: dict[str, list[str]] = {session.session: [] for session in sessions}
    total = 60

    async def write() -> None:
        for number in range(1, total + 1):
            sets = []
            for session in sessions[number % 3 :]:
                event = events.user_message()
                sent[session.session].append(event.event_id)
                sets.append(events.append_set(session, event))
            await call.write(Request(number=number, sets=sets))
        await call.done_writing()

    _, found = await asyncio.gather(write(), replies(call, total))
    assert [reply.number for reply in found] == list(range(1, total + 1))
    assert {result.outcome for reply in found for each in reply.sets for result in each.results} == {APPENDED}
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    for session in sessions:
        assert ids(await history.read(session)) == sent[session.session]


async def test_one_stream_spans_lanes_and_replicas_agree(history: Client, other: Client) -> None:
    session = events.key()
    shared = [events.user_message() for _ in range(40)]

    async def push(client: Client) -> None:
        call = client.stub.AppendStream()
        for number, event in enumerate(shared, 1):
            await call.write(Request(number=number, sets=[events.append_set(session, event)]))
        await call.done_writing()
        found = await replies(call, len(shared))
        assert [each.results[0].sequence for reply in found for each in reply.sets] == list(range(1, 41))

    await asyncio.gather(push(history), push(other), push(history))
    assert ids(await history.read(session)) == [event.event_id for event in shared]


async def test_a_malformed_request_ends_the_stream_behind_the_replies_before_it(history: Client) -> None:
    session = events.key()
    call = history.stub.AppendStream()
    for number in (1, 2):
        await call.write(Request(number=number, sets=[events.append_set(session, events.user_message())]))
    behind = Request(number=4, sets=[events.append_set(session, events.user_message())])
    await offer(call, Request(number=3).SerializeToString(), behind.SerializeToString(), last=False)
    assert [reply.number for reply in await replies(call, 2)] == [1, 2]
    error = await failure(call)
    assert (error.reason, error.field_violations[0][0]) == ("INVALID_FIELD", "sets")
    assert error.metadata["first_unacknowledged"] == "3"
    assert len(await history.read(session)) == 2


async def test_requests_are_numbered_without_holes(history: Client) -> None:
    session = events.key()
    for first, second in ((0, None), (2, None), (1, 1), (1, 3)):
        call = history.stub.AppendStream()
        requests = [
            Request(number=number, sets=[events.append_set(session, events.user_message())]).SerializeToString()
            for number in (first, second)
            if number is not None
        ]
        await offer(call, *requests, last=False)
        error = await failure(call)
        assert error.field_violations[0][0] == "number"
        assert error.metadata["first_unacknowledged"] == ("1" if second is None else "2")


async def test_bytes_that_are_no_request_end_the_stream(history: Client) -> None:
    call: Any = history.channel.stream_stream("/hearth.history.v1.HistoryService/AppendStream")()
    await call.write(b"\x0a\xff\xff")
    error = await failure(call)
    assert (error.code, error.metadata["first_unacknowledged"]) == (grpc.StatusCode.INVALID_ARGUMENT, "1")


async def test_a_producer_that_vanishes_leaves_whole_requests(history: Client) -> None:
    session = events.key()
    sent = [[events.user_message() for _ in range(10)] for _ in range(20)]
    call = history.stub.AppendStream()
    for number, batch in enumerate(sent, 1):
        await call.write(Request(number=number, sets=[events.append_set(session, *batch, atomic=True)]))
    call.cancel()
    stored = len(await history.read(session))
    again = history.stub.AppendStream()
    for number, batch in enumerate(sent, 1):
        await again.write(Request(number=number, sets=[events.append_set(session, *batch, atomic=True)]))
    found = await replies(again, len(sent))
    await again.done_writing()
    outcomes = [result.outcome for reply in found for each in reply.sets for result in each.results]
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[:stored] == [DUPLICATE] * stored
    assert ids(await history.read(session)) == [event.event_id for batch in sent for event in batch]


async def test_a_stream_may_be_empty(history: Client) -> None:
    call = history.stub.AppendStream()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
