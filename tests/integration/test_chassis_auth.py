"""Who may call what, over a real server: tokens, scopes, projects, and streams whose rights are taken away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.secret import Secret
from hearth.types.v1 import session_pb2
from services.chassis.auth import current_caller, hash_token, require_project
from services.chassis.calls import open_channel
from services.chassis.errors import PermissionDenied, ResourceExhausted, Unauthenticated, from_rpc_error
from services.chassis.interceptors import Context
from services.chassis.scopes import SCOPES
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings


class History(history_service_pb2_grpc.HistoryServiceServicer):
    async def GetHeads(
        self, request: history_service_pb2.GetHeadsRequest, context: Context
    ) -> history_service_pb2.GetHeadsResponse:
        for key in request.sessions:
            require_project(key.project)
        return history_service_pb2.GetHeadsResponse(heads=[history_pb2.Head(execution_id=current_caller().name)])

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        yield history_service_pb2.StreamEventsResponse()
        await asyncio.Event().wait()

    async def AppendStream(
        self, request_iterator: AsyncIterator[history_service_pb2.AppendStreamRequest], context: Context
    ) -> AsyncIterator[history_service_pb2.AppendStreamResponse]:
        async for request in request_iterator:
            reply = history_service_pb2.AppendReply(number=request.number)
            yield history_service_pb2.AppendStreamResponse(replies=[reply])


class Secured:
    def __init__(self, address: str, file: Path) -> None:
        self.address = address
        self._file = file

    def grant(self, tokens: dict[str, tuple[str, Iterable[str]]]) -> None:
        """`tokens`: token → (project, scopes)."""
        entries = {
            hash_token(token): {"name": f"name of {token}", "project": project, "scopes": list(scopes)}
            for token, (project, scopes) in tokens.items()
        }
        self._file.write_text(json.dumps(entries))

    def write(self, tokens: dict[str, dict[str, Any]]) -> None:
        """`tokens`: token → entry."""
        self._file.write_text(json.dumps({hash_token(token): entry for token, entry in tokens.items()}))

    def channel(self, token: str) -> grpc.aio.Channel:
        return open_channel(self.address, ChassisSettings(token=Secret(token)))


@asynccontextmanager
async def serving(file: Path, **limits: float) -> AsyncIterator[Secured]:
    file.write_text("{}")
    settings = ChassisSettings.model_validate(
        {"auth_file": file, "auth_recheck": 0.2, "shutdown_grace": 4, "listen": "127.0.0.1:0", **limits}
    )

    @asynccontextmanager
    async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(
            History(),  # type: ignore[abstract]
            app.server,
        )
        yield

    async with started(settings, "test", build) as app:
        yield Secured(app.address, file)


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with serving(tmp_path / "tokens.json") as server:
        yield server


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def heads(channel: grpc.aio.Channel, project: str = "acme") -> Any:
    key = session_pb2.SessionKey(project=project, session="s")
    request = history_service_pb2.GetHeadsRequest(sessions=[key])
    return history_service_pb2_grpc.HistoryServiceStub(channel).GetHeads(request)


def stream(channel: grpc.aio.Channel) -> Any:
    request = history_service_pb2.StreamEventsRequest()
    return history_service_pb2_grpc.HistoryServiceStub(channel).StreamEvents(request)


async def test_who_is_known_and_may(secured: Secured) -> None:
    secured.grant({"good": ("acme", ["read"]), "every": ("*", ["read"])})
    async with secured.channel("good") as channel:
        assert (await heads(channel)).heads[0].execution_id == "name of good"
        refused = await refusal(heads(channel, "other"))
        assert isinstance(refused, PermissionDenied)
        assert refused.reason == "PROJECT_DENIED"
    async with secured.channel("every") as channel:
        await heads(channel, "other")


async def test_a_project_that_asks_too_much_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "tokens.json", project_rate=0.01) as server:
        server.grant({"one": ("acme", ["read"]), "two": ("other", ["read"]), "every": ("*", ["read"])})
        async with server.channel("one") as channel:
            await heads(channel)
            refused = await refusal(heads(channel))
            assert isinstance(refused, ResourceExhausted)
            assert refused.reason == "OVERLOADED"
            assert refused.retry_after is not None
            assert 0 < refused.retry_after <= 100
        for token, project in (("two", "other"), ("every", "acme"), ("every", "acme")):
            async with server.channel(token) as channel:
                await heads(channel, project)


async def test_a_project_has_so_many_streams_and_gets_one_when_one_ends(tmp_path: Path) -> None:
    async with serving(tmp_path / "tokens.json", project_streams=1) as server:
        server.grant({"one": ("acme", ["read"]), "two": ("other", ["read"])})
        async with server.channel("one") as mine, server.channel("two") as theirs:
            first = stream(mine)
            await first.read()
            refused = await refusal(stream(mine).read())
            assert isinstance(refused, ResourceExhausted)
            assert refused.reason == "OVERLOADED"
            other = stream(theirs)
            await other.read()
            first.cancel()
            async with asyncio.timeout(10):
                while True:
                    again = stream(mine)
                    try:
                        await again.read()
                        break
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                            raise
                        # The end of the first one is on its way.
                        await asyncio.sleep(0.02)
            again.cancel()
            other.cancel()


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer ", "Basic good", "good", "Bearer name of good"])
async def test_who_is_not_known(secured: Secured, sent: str | None) -> None:
    secured.grant({"good": ("acme", ["read"])})
    metadata = [("authorization", sent)] if sent is not None else []
    async with grpc.aio.insecure_channel(secured.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        refused = await refusal(stub.GetHeads(history_service_pb2.GetHeadsRequest(), metadata=metadata))
        assert isinstance(refused, Unauthenticated)
        assert refused.reason == "TOKEN_INVALID"
        await stub.GetHeads(history_service_pb2.GetHeadsRequest(), metadata=[("authorization", "bearer good")])


async def test_each_rpc_wants_its_scope_and_no_other(secured: Secured) -> None:
    every = ("read", "run", "admin", "internal")
    secured.grant({scope: ("*", [scope]) for scope in every})
    prefix = "/hearth.history.v1.HistoryService/"
    unary = [
        name for name in SCOPES if name.startswith(prefix) and not name.endswith("Stream") and "StreamEv" not in name
    ]
    assert len(unary) == 8
    for scope in every:
        async with secured.channel(scope) as channel:
            for name in unary:
                call: Any = channel.unary_unary(name)
                try:
                    await call(b"")
                except grpc.aio.AioRpcError as error:
                    denied = from_rpc_error(error).reason == "SCOPE_MISSING"
                else:
                    denied = False
                assert denied == (SCOPES[name] != scope), (name, scope)


async def test_streams_are_refused_too(secured: Secured) -> None:
    async with secured.channel("") as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        refused = await refusal(stub.StreamEvents(history_service_pb2.StreamEventsRequest()).read())
        assert refused.reason == "TOKEN_INVALID"
        call = stub.AppendStream()
        await call.write(history_service_pb2.AppendStreamRequest())
        assert (await refusal(call.read())).reason == "TOKEN_INVALID"


async def test_health_and_reflection_need_no_token(secured: Secured) -> None:
    async with grpc.aio.insecure_channel(secured.address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        async for answer in stub.ServerReflectionInfo(iter(requests)):
            assert answer.list_services_response.service


@pytest.mark.parametrize(
    ("now", "reason"),
    [(("other", ["read"]), "PROJECT_DENIED"), (("acme", ["run"]), "SCOPE_MISSING"), (None, "TOKEN_INVALID")],
)
async def test_a_stream_ends_when_its_token_is_for_another_project_or_scope(
    secured: Secured, now: tuple[str, list[str]] | None, reason: str
) -> None:
    secured.grant({"good": ("acme", ["read"])})
    async with secured.channel("good") as channel:
        ending = stream(channel)
        await ending.read()
        secured.grant({"good": now} if now is not None else {})
        async with asyncio.timeout(5):
            assert (await refusal(ending.read())).reason == reason


async def test_a_stream_goes_on_when_its_token_is_for_all_projects_by_then(secured: Secured) -> None:
    secured.grant({"good": ("acme", ["read"])})
    async with secured.channel("good") as channel:
        going_on = stream(channel)
        await going_on.read()
        secured.grant({"good": ("*", ["read", "run"])})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await going_on.read()


async def test_a_stream_of_all_projects_ends_when_its_token_is_for_one_by_then(secured: Secured) -> None:
    secured.grant({"good": ("*", ["read"])})
    async with secured.channel("good") as channel:
        ending = stream(channel)
        await ending.read()
        secured.grant({"good": ("acme", ["read"])})
        async with asyncio.timeout(5):
            assert (await refusal(ending.read())).reason == "PROJECT_DENIED"


async def test_a_message_is_as_large_as_its_project_may_send(tmp_path: Path) -> None:
    async with serving(tmp_path / "tokens.json", project_message_bytes=200) as server:
        entry = {"name": "n", "project": "acme", "scopes": ["read", "internal"]}
        tokens = {"one": entry, "every": {**entry, "project": "*"}}
        server.write(tokens)
        large = "x" * 300
        async with server.channel("one") as channel, server.channel("every") as everybody:
            refused = await refusal(heads(channel, large))
            assert isinstance(refused, ResourceExhausted)
            assert (refused.reason, refused.metadata["limit"]) == ("TOO_LARGE", "200")
            assert refused.retry_after is None
            assert "200 bytes" in refused.message
            await heads(everybody, large)
            await heads(channel)
            server.write({**tokens, "two": {**entry, "name": "m", "limits": {"message_bytes": 1000}}})
            assert (await refusal(heads(channel, large))).reason == "PROJECT_DENIED"


async def test_a_stream_ends_at_a_message_that_is_too_large_and_keeps_what_came_before(tmp_path: Path) -> None:
    async with serving(tmp_path / "tokens.json", project_message_bytes=200) as server:
        server.grant({"one": ("acme", ["internal"])})
        async with server.channel("one") as channel:
            call = history_service_pb2_grpc.HistoryServiceStub(channel).AppendStream()
            await call.write(history_service_pb2.AppendStreamRequest(number=1))
            answered: Any = await call.read()
            assert [reply.number for reply in answered.replies] == [1]
            sets = [history_pb2.AppendSet(session=session_pb2.SessionKey(project="acme", session="x" * 300))]
            await call.write(history_service_pb2.AppendStreamRequest(number=2, sets=sets))
            refused = await refusal(call.read())
            assert (refused.reason, refused.metadata["project"]) == ("TOO_LARGE", "acme")


async def test_a_stream_ends_when_its_right_is_taken(secured: Secured) -> None:
    secured.grant({"good": ("acme", ["read"]), "other": ("acme", ["read"])})
    async with secured.channel("good") as channel, secured.channel("other") as staying:
        request = history_service_pb2.StreamEventsRequest()
        ending = history_service_pb2_grpc.HistoryServiceStub(channel).StreamEvents(request)
        going_on = history_service_pb2_grpc.HistoryServiceStub(staying).StreamEvents(request)
        await ending.read()
        await going_on.read()
        secured.grant({"other": ("acme", ["read"])})
        async with asyncio.timeout(5):
            refused = await refusal(ending.read())
        assert isinstance(refused, Unauthenticated)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await going_on.read()
