"""Every streaming RPC of the real services ends when its token is gone, lacks the scope, or is for another project."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from hearth.history.v1 import history_service_pb2 as history
from hearth.relay.v1 import relay_service_pb2 as relay
from hearth.session.v1 import session_service_pb2 as sessions
from hearth.session.v1.session_service_pb2_grpc import SessionServiceStub
from hearth.types.v1 import session_pb2
from services.chassis.errors import from_rpc_error
from services.chassis.scopes import SCOPE_NAMES, SCOPES
from tests.security.guarded import OPERATOR, Guarded, entry, guarded
from tests.support import events
from tests.support.history_client import Client
from tests.support.rpcs import RPCS, Rpc
from tests.support.servers import Servers

MINE = "mine"
KEY = session_pb2.SessionKey(project=MINE, session="s")
# More than fits between a service and a reader that stopped reading.
LONG = session_pb2.SessionKey(project=MINE, session="long")
EVENTS, EVENT_BYTES = 64, 200_000
CONTENT = b"half of a file"

OPENING: dict[str, Sequence[Message]] = {
    "AppendStream": [history.AppendStreamRequest(number=1, sets=[events.append_set(KEY, events.user_message())])],
    "StreamEvents": [history.StreamEventsRequest(session=LONG)],
    "Publish": [relay.PublishRequest(number=1)],
    "Subscribe": [relay.SubscribeRequest(session=KEY, tail=True)],
    "PutAttachment": [
        sessions.PutAttachmentRequest(
            description=sessions.AttachmentDescription(
                session=KEY,
                request_id="r",
                name="f.txt",
                media_type="text/plain",
                size_bytes=2 * len(CONTENT),
                digest=hashlib.sha256(CONTENT * 2).hexdigest(),
            )
        ),
        sessions.PutAttachmentRequest(chunk=CONTENT),
    ],
}
STREAMS = [rpc for rpc in RPCS if rpc.streams_in or rpc.streams_out]
CHANGES: dict[str, tuple[dict[str, Any] | None, grpc.StatusCode, str]] = {
    "gone": (None, grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID"),
    "other project": (entry("n", "theirs"), grpc.StatusCode.PERMISSION_DENIED, "PROJECT_DENIED"),
    "without scope": ({}, grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(servers: Servers) -> AsyncIterator[Guarded]:
    async with guarded(servers.scratch(), {"HEARTH_AUTH_RECHECK": "0.3"}) as found:
        log = Client(found.channel("history", OPERATOR))
        for _ in range(EVENTS // 8):
            await log.accepted(LONG, *(events.custom(EVENT_BYTES) for _ in range(8)))
        yield found


class Opened:
    """A call of a streaming RPC that is open: the service has what was sent, and waits for more or for its reader."""

    def __init__(self, rpc: Rpc, channel: grpc.aio.Channel) -> None:
        self._rpc = rpc
        self._channel = channel
        self._sent = asyncio.Event()
        opening = [message.SerializeToString() for message in OPENING[rpc.name]]
        self.call = rpc.on(channel)(self._requests(opening) if rpc.streams_in else opening[0])

    async def _requests(self, opening: list[bytes]) -> AsyncIterator[bytes]:
        for request in opening:
            yield request
        self._sent.set()
        await asyncio.Event().wait()

    async def begin(self) -> None:
        """Return when it is."""
        if self._rpc.streams_out:
            assert await self.call.read() is not grpc.aio.EOF
            return
        await self._sent.wait()
        # Nothing tells that an upload has arrived but what is sent behind it on its connection and answered.
        await SessionServiceStub(self._channel).ListSessions(sessions.ListSessionsRequest(project=MINE))

    async def ended(self) -> grpc.aio.AioRpcError:
        """What it ends with, when everything that was on its way is read."""
        try:
            async with asyncio.timeout(10):
                await self._to_its_end()
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"{self._rpc} ended well")

    async def _to_its_end(self) -> None:
        if not self._rpc.streams_out:
            await self.call
            return
        while await self.call.read() is not grpc.aio.EOF:
            pass


def test_no_streaming_rpc_is_forgotten() -> None:
    assert {rpc.name for rpc in STREAMS} == set(OPENING)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("change", CHANGES)
async def test_it_ends_when_its_token_changes_and_the_others_go_on(stack: Guarded, change: str) -> None:
    said, code, reason = CHANGES[change]
    tokens = {f"{change} {rpc.name}": entry(rpc.name, MINE) for rpc in STREAMS}
    staying = {f"staying {rpc.name}": entry(f"staying {rpc.name}", MINE) for rpc in STREAMS}
    stack.grant(tokens | staying)
    opened = [Opened(rpc, stack.channel(rpc.process, f"{change} {rpc.name}")) for rpc in STREAMS]
    others = [Opened(rpc, stack.channel(rpc.process, f"staying {rpc.name}")) for rpc in STREAMS]
    for one in (*opened, *others):
        await one.begin()

    changed = {}
    for rpc in STREAMS:
        if said is not None:
            scopes = [scope for scope in SCOPE_NAMES if said or scope != SCOPES[rpc.path]]
            changed[f"{change} {rpc.name}"] = said or entry(rpc.name, MINE, scopes)
    stack.grant(changed | staying)
    for rpc, one in zip(STREAMS, opened, strict=True):
        error = await one.ended()
        assert (error.code(), from_rpc_error(error).reason) == (code, reason), rpc.path
    for other in others:
        assert not other.call.done(), other
        other.call.cancel()
