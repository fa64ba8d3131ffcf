"""Who may call history for which project, and how the trace of a turn goes through a commit to the bus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from hearth.history.v1 import history_service_pb2
from hearth.relay.v1 import bus_pb2
from hearth.secret import Secret
from hearth.types.v1 import session_pb2
from services.chassis.auth import hash_token
from services.chassis.errors import from_rpc_error
from services.chassis.pubsub import PubSub
from tests.conftest import StartService
from tests.support import events
from tests.support.history_client import Client, refused
from tests.support.waiting import eventually

TRACES = [f"{number:032x}" for number in (1, 2, 3)]


class WithToken(Client):
    """A client that sends a token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        super().__init__(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        for name in ("AppendEvents", "ReadEvents", "StreamEvents", "GetSnapshot", "GetHeads", "DeleteLog", "TrimLog"):
            method: Any = getattr(self.stub, name)
            setattr(self.stub, name, lambda request, method=method: method(request, metadata=metadata))
        self.metadata = metadata


async def test_tokens_reach_their_own_project_only(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    scopes = {
        "reader": ("mine", ["read"]),
        "writer": ("mine", ["internal"]),
        "pool": ("*", ["internal", "read"]),
        "admin": ("mine", ["admin"]),
    }
    auth = scratch / "auth.json"
    auth.write_text(
        json.dumps(
            {
                hash_token(name): {"name": name, "project": project, "scopes": found}
                for name, (project, found) in scopes.items()
            }
        )
    )
    env = {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url, "HEARTH_AUTH_FILE": str(auth)}
    service = await start_service("services.history", **env)
    mine, other = events.key(project="mine"), events.key(project="other")
    async with grpc.aio.insecure_channel(service.address) as channel:
        reader, writer, pool, admin = (WithToken(channel, name) for name in scopes)
        await writer.accepted(mine, events.user_message())
        await pool.accepted(other, events.user_message())
        assert len(await reader.read(mine)) == len(await pool.read(other)) == 1
        for call in (
            reader.page(other),
            reader.chunks(other),
            reader.snapshot(other),
            reader.heads(mine, other),
            writer.append(other, events.user_message()),
            writer.append_sets(
                events.append_set(mine, events.user_message()), events.append_set(other, events.user_message())
            ),
            writer.delete(other),
            admin.trim(other, 1),
        ):
            error = await refused(call)
            assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PROJECT_DENIED")
        stream: Any = writer.stub.AppendStream(metadata=writer.metadata)
        for number, session in enumerate((mine, other), 1):
            sets = [events.append_set(session, events.user_message())]
            await stream.write(history_service_pb2.AppendStreamRequest(number=number, sets=sets))
        assert (await stream.read()).replies[0].number == 1
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.read()
        denied = from_rpc_error(refusal.value)
        assert (denied.reason, denied.metadata["first_unacknowledged"]) == ("PROJECT_DENIED", "2")
        assert (await refused(writer.page(mine))).reason == "SCOPE_MISSING"
        assert (await refused(reader.append(mine, events.user_message()))).reason == "SCOPE_MISSING"
        assert (await refused(Client(channel).page(mine))).reason == "TOKEN_INVALID"
        assert len(await reader.read(mine)) == 2
        assert len(await pool.read(other)) == 1


def traceparent(trace_id: str) -> str:
    return f"00-{trace_id}-b7ad6b7169203331-01"


async def test_a_turn_s_trace_goes_through_the_commit_to_the_bus(
    start_service: StartService, migrated_dsn: str, valkey_url: str, scratch: Path
) -> None:
    trace_file = scratch / "spans.jsonl"
    service = await start_service(
        "services.history",
        HEARTH_POSTGRES_DSN=migrated_dsn,
        HEARTH_VALKEY_URL=valkey_url,
        HEARTH_TRACE_FILE=str(trace_file),
        HEARTH_HISTORY_LANES="1",
    )
    sessions = [events.key() for _ in TRACES]
    heard: dict[bytes, bus_pb2.Notice] = {}

    def take(channel: bytes, data: bytes) -> None:
        heard[channel] = bus_pb2.Notice.FromString(data[1:])

    bus = await PubSub.connect(Secret(valkey_url), take)
    for session in sessions:
        await bus.subscribe(channel_of(session))
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = Client(channel).stub
        alone = history_service_pb2.AppendEventsRequest(sets=[events.append_set(sessions[0], events.user_message())])
        await stub.AppendEvents(alone, metadata=(("traceparent", traceparent(TRACES[0])),))
        await eventually(lambda: channel_of(sessions[0]) in heard)
        assert heard.pop(channel_of(sessions[0])).traceparent[3:35] == TRACES[0]

        call = stub.AppendStream()
        sets = [events.append_set(session, events.user_message()) for session in sessions]
        for made, trace_id in zip(sets, TRACES, strict=True):
            made.traceparent = traceparent(trace_id)
        await call.write(history_service_pb2.AppendStreamRequest(number=1, sets=sets))
        await call.read()
        await eventually(lambda: len(heard) == len(sessions))
        for session, trace_id in zip(sessions, TRACES, strict=True):
            assert heard[channel_of(session)].traceparent[3:35] == trace_id
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    await bus.close()
    await service.terminate()

    spans = [json.loads(line) for line in await asyncio.to_thread(lambda: trace_file.read_text().splitlines())]
    single, shared = (span for span in spans if span["name"] == "history.commit")
    assert single["trace_id"] == TRACES[0]
    assert single["attributes"]["hearth.events"] == 1
    (rpc,) = (span for span in spans if span["name"].endswith("AppendEvents"))
    assert single["parent_id"] == rpc["span_id"]
    assert shared["parent_id"] is None
    assert {link["trace_id"] for link in shared["links"]} >= set(TRACES)
    appended = [span for span in spans if span["name"] == "history.append"]
    assert sorted(span["trace_id"] for span in appended) == TRACES
    assert {link["span_id"] for span in appended for link in span["links"]} == {shared["span_id"]}


def channel_of(session: session_pb2.SessionKey) -> bytes:
    return f"hearth:live:{session.project}/{session.session}".encode()
