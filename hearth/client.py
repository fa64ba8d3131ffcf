"""A client of a Hearth deployment: one object that sends, watches, stops and reads back.

```python
async with Client(Addresses()) as hearth:
    key = session_key("acme", "chat-1")
    sent = await hearth.send(key, "hello")
    async for item in hearth.watch(key):
        ...
```

For what has no method here there are the stubs: `sessions`, `histories`, `relays`, `sandboxes`, `pools`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Self

import grpc.aio

from hearth.channel import open_channel
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.pool.v1 import pool_service_pb2_grpc
from hearth.relay.v1 import relay_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_service_pb2_grpc
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2, session_service_pb2_grpc
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from hearth.watch import Watch

CALL_SECONDS = 30.0
UPLOAD_SECONDS = 300.0
CHUNK_BYTES = 512 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of each service. The defaults are those of a stack on this machine."""

    pool: str = "127.0.0.1:7400"
    history: str = "127.0.0.1:7401"
    relay: str = "127.0.0.1:7402"
    sandbox: str = "127.0.0.1:7403"


def session_key(project: str, session: str) -> session_pb2.SessionKey:
    """The key of a conversation."""
    return session_pb2.SessionKey(project=project, session=session)


def text_content(text: str) -> list[content_pb2.ContentPart]:
    """A message that is one text."""
    return [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]


class Client:
    """Connections to the services of one deployment; open it with `async with`. `token` is sent as a bearer token."""

    def __init__(self, addresses: Addresses, *, token: str = "") -> None:
        self._addresses = addresses
        self._token = token
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> Self:
        where = self._addresses
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self._open(where.pool))
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self._channels[-1])
        self.histories = history_service_pb2_grpc.HistoryServiceStub(self._open(where.history))
        self.relays = relay_service_pb2_grpc.RelayServiceStub(self._open(where.relay))
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self._open(where.sandbox))
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        self._channels.clear()

    def _open(self, address: str) -> grpc.aio.Channel:
        self._channels.append(open_channel(address, token=self._token))
        return self._channels[-1]

    async def send(
        self,
        key: session_pb2.SessionKey,
        content: str | Sequence[content_pb2.ContentPart],
        *,
        request_id: str = "",
        spec: control_pb2.SessionSpec | None = None,
        on_busy: control_pb2.OnBusy.ValueType = control_pb2.ON_BUSY_UNSPECIFIED,
    ) -> session_service_pb2.SendInputResponse:
        """Give the agent a message. When the answer was lost, repeat it with the same `request_id`; empty = new."""
        return await self.sessions.SendInput(
            session_service_pb2.SendInputRequest(
                session=key,
                request_id=request_id or str(uuid.uuid4()),
                content=text_content(content) if isinstance(content, str) else content,
                spec=spec,
                on_busy=on_busy,
            ),
            timeout=CALL_SECONDS,
        )

    async def attach(
        self,
        key: session_pb2.SessionKey,
        data: bytes,
        *,
        name: str,
        media_type: str = "application/octet-stream",
        request_id: str = "",
    ) -> content_pb2.AttachmentPart:
        """Upload a file for the messages of a session; what it returns goes into one."""
        description = session_service_pb2.AttachmentDescription(
            session=key,
            request_id=request_id or str(uuid.uuid4()),
            name=name,
            media_type=media_type,
            size_bytes=len(data),
            digest=hashlib.sha256(data).hexdigest(),
        )

        async def requests() -> AsyncIterator[session_service_pb2.PutAttachmentRequest]:
            yield session_service_pb2.PutAttachmentRequest(description=description)
            for start in range(0, len(data), CHUNK_BYTES):
                yield session_service_pb2.PutAttachmentRequest(chunk=data[start : start + CHUNK_BYTES])

        answer = await self.sessions.PutAttachment(requests(), timeout=UPLOAD_SECONDS)
        return answer.attachment

    async def stop(
        self, key: session_pb2.SessionKey, *, execution_id: str = "", seen_epoch: int = 0, request_id: str = ""
    ) -> control_pb2.Command:
        """Ask the execution to stop; without its id, whichever runs and is not newer than `seen_epoch`."""
        answer = await self.sessions.StopExecution(
            session_service_pb2.StopExecutionRequest(
                session=key,
                request_id=request_id or str(uuid.uuid4()),
                execution_id=execution_id,
                seen_epoch=seen_epoch,
            ),
            timeout=CALL_SECONDS,
        )
        return answer.command

    async def get_session(self, key: session_pb2.SessionKey) -> control_pb2.Session:
        """The session as it stands."""
        answer = await self.sessions.GetSession(
            session_service_pb2.GetSessionRequest(session=key), timeout=CALL_SECONDS
        )
        return answer.session

    def watch(
        self,
        key: session_pb2.SessionKey,
        *,
        after: session_pb2.Cursor | None = None,
        tail: bool = False,
        events_only: bool = False,
    ) -> Watch:
        """Everything after a cursor, then live, over reconnects. See `Watch`."""
        return Watch(self.relays, key, after=after, tail=tail, events_only=events_only)

    async def history(
        self, key: session_pb2.SessionKey, *, after: session_pb2.Cursor | None = None
    ) -> AsyncIterator[event_pb2.EventItem]:
        """The log after a cursor, up to the head of this moment."""
        call = self.histories.StreamEvents(history_service_pb2.StreamEventsRequest(session=key, after=after))
        try:
            async for chunk in call:
                for item in chunk.events:
                    yield item
        finally:
            call.cancel()

    async def head(self, key: session_pb2.SessionKey) -> history_pb2.Head:
        """Where the log stands."""
        answer = await self.histories.GetHeads(
            history_service_pb2.GetHeadsRequest(sessions=[key]), timeout=CALL_SECONDS
        )
        return answer.heads[0]
