"""Who may publish and subscribe, and how a commit's trace goes on over the bus."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from hearth.relay.v1 import relay_service_pb2, relay_service_pb2_grpc
from services.chassis.auth import hash_token
from services.chassis.errors import HearthError, from_rpc_error
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_stack import relay_stack
from tests.support.relay_turns import append
from tests.support.servers import Servers
from tests.support.waiting import eventually

# What the client library makes of a refusal that arrives while it writes; what the service said is lost then.
_LOST = (grpc.StatusCode.INTERNAL, "Internal error from Core")
_ATTEMPTS = 10


async def refusal(channel: grpc.aio.Channel, method: str, token: str, project: str) -> HearthError | None:
    """What came of a call, asked again as long as the client library does not say."""
    for _ in range(_ATTEMPTS):
        error = await refusal_as_seen(channel, method, token, project)
        if error is None or (error.code, error.message) != _LOST:
            return error
    raise AssertionError(f"{method}: the refusal was lost {_ATTEMPTS} times")


async def refusal_as_seen(channel: grpc.aio.Channel, method: str, token: str, project: str) -> HearthError | None:
    stub = relay_service_pb2_grpc.RelayServiceStub(channel)
    metadata = (("authorization", f"Bearer {token}"),)
    session = events.key(project=project)
    try:
        if method == "Subscribe":
            subscribed = stub.Subscribe(
                relay_service_pb2.SubscribeRequest(session=session), metadata=metadata, timeout=10
            )
            await subscribed.read()
            subscribed.cancel()
        else:
            request = relay_service_pb2.PublishRequest(number=1)
            request.batches.add(session=session, execution_id=events.new_id(), epoch=1)
            published = stub.Publish(metadata=metadata, timeout=10)
            # A call that was refused meanwhile takes no request; one fed by an iterator would then be cancelled here.
            with suppress(asyncio.InvalidStateError):
                await published.write(request)
            await published.read()
            published.cancel()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_scopes_and_projects(servers: Servers, migrated_dsn: str, tmp_path: Path) -> None:
    auth = tmp_path / "tokens.json"
    entries = {
        "reader": {"name": "reader", "project": "mine", "scopes": ["read"]},
        "pool": {"name": "pool", "project": "*", "scopes": ["internal"]},
        "tied": {"name": "tied", "project": "mine", "scopes": ["internal"]},
    }
    auth.write_text(json.dumps({hash_token(token): entry for token, entry in entries.items()}))
    async with relay_stack(servers, migrated_dsn, HEARTH_AUTH_FILE=str(auth)) as stack:
        expected = {
            ("Subscribe", "reader", "mine"): None,
            ("Subscribe", "reader", "theirs"): "PROJECT_DENIED",
            ("Subscribe", "pool", "mine"): "SCOPE_MISSING",
            ("Subscribe", "nobody", "mine"): "TOKEN_INVALID",
            ("Publish", "pool", "theirs"): None,
            ("Publish", "tied", "theirs"): "PROJECT_DENIED",
            ("Publish", "reader", "mine"): "SCOPE_MISSING",
        }
        for (method, token, project), reason in expected.items():
            error = await refusal(stack.channel(), method, token, project)
            assert (error.reason if error else None) == reason, (method, token, project)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_notice_goes_on_with_the_trace_of_its_commit(
    servers: Servers, migrated_dsn: str, tmp_path: Path, size: int
) -> None:
    trace_file = tmp_path / "spans.jsonl"
    async with relay_stack(servers, migrated_dsn, HEARTH_TRACE_FILE=str(trace_file)) as stack:
        session = events.key()
        async with reading(stack.channel(), session) as reader:
            await reader.until_ready()
            for sequence in (1, 2):
                await append(stack.channel(stack.history), session, events.custom(size))
                await reader.until_sequence(sequence)
    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    commits = {span["span_id"]: span for span in spans if span["name"] == "history.commit"}
    notices = [span for span in spans if span["name"] == "process hearth:live"]
    calls = [span for span in spans if span["name"].endswith("RelayService/Subscribe")]
    assert len(calls) == 1
    assert [span["attributes"]["hearth.sequence"] for span in notices] == [1, 2]
    for span in notices:
        assert span["trace_id"] == commits[span["parent_id"]]["trace_id"]
        assert span["service"] == "hearth-relay"
        assert span["attributes"]["hearth.session"] == session.session
        # A reader has a trace of its own, which this one is linked to.
        assert [link["span_id"] for link in span["links"]] == [call["span_id"] for call in calls]
        assert span["links"][0]["trace_id"] == calls[0]["trace_id"] != span["trace_id"]


async def test_a_reader_s_span_ends_while_its_stream_goes_on(
    servers: Servers, migrated_dsn: str, tmp_path: Path
) -> None:
    trace_file = tmp_path / "spans.jsonl"
    async with relay_stack(servers, migrated_dsn, HEARTH_TRACE_FILE=str(trace_file)) as stack:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        stub = relay_service_pb2_grpc.RelayServiceStub(stack.channel())
        call = stub.Subscribe(
            relay_service_pb2.SubscribeRequest(session=events.key()),
            metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),),
        )
        await call.read()
        await eventually(lambda: trace_file.exists() and trace_id in trace_file.read_text(), timeout=15)
        assert not call.done()
        call.cancel()
