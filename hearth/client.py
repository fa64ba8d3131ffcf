"""A client of a Hearth deployment: one object that sends, watches, stops, answers and reads back.

```python
async with Client(Addresses()) as hearth:
    key = session_key("acme", "chat-1")
    sent = await hearth.send(key, "hello")
    async for item in hearth.watch(key):
        ...
```

Every change takes a `request_id`, new where it is empty. When the answer was lost, repeat the call with the same one,
and it answers with what the first one made. What a service refuses is raised as a `hearth.errors.CallError`, of the
class for its code. For what has no method here there are the stubs: `sessions`, `histories`, `relays`, `sandboxes`,
`pools`. They raise the `grpc.aio.AioRpcError` that `hearth.errors.read_error` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Self

import grpc.aio

from hearth.admin import Admin
from hearth.channel import Token, certificate_name, kept, open_channel, tls_of, token_of
from hearth.errors import CallError, answered, read_error, status_is_lost
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.paging import CALL_SECONDS, pages
from hearth.pool.v1 import pool_service_pb2_grpc
from hearth.reducer import Transcript, is_ending
from hearth.relay.v1 import relay_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_service_pb2_grpc
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2, session_service_pb2_grpc
from hearth.tls import Tls
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from hearth.watch import RESUMABLE, Watch

UPLOAD_SECONDS = 300.0
CHUNK_BYTES = 512 * 1024
# How often a file is sent of which gRPC loses why it was refused: about every tenth time that it is, while it is sent.
_UPLOADS = 6


def _address(service: str, usual: str) -> str:
    return dataclasses.field(default_factory=lambda: os.environ.get(f"HEARTH_{service}_ADDRESS") or usual)


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of each service: `HEARTH_POOL_ADDRESS` and its siblings, else the usual ports of this machine."""

    pool: str = _address("POOL", "127.0.0.1:7400")
    history: str = _address("HISTORY", "127.0.0.1:7401")
    relay: str = _address("RELAY", "127.0.0.1:7402")
    sandbox: str = _address("SANDBOX", "127.0.0.1:7403")


def session_key(project: str, session: str) -> session_pb2.SessionKey:
    """The key of a conversation."""
    return session_pb2.SessionKey(project=project, session=session)


def text_content(text: str) -> list[content_pb2.ContentPart]:
    """A message that is one text."""
    return [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]


def content_of(content: str | Sequence[content_pb2.ContentPart]) -> Sequence[content_pb2.ContentPart]:
    """Parts of a message; a text is a message of its own."""
    return text_content(content) if isinstance(content, str) else content


def new_id() -> str:
    """A request id that nobody has used."""
    return str(uuid.uuid4())


def decided(interaction_id: str, *, allowed: bool) -> control_pb2.InteractionAnswer:
    """The answer to an agent that asks whether it may run a tool."""
    decision = event_pb2.DECISION_ALLOWED if allowed else event_pb2.DECISION_DENIED
    return control_pb2.InteractionAnswer(interaction_id=interaction_id, decision=decision)


def told(interaction_id: str, answer_json: str) -> control_pb2.InteractionAnswer:
    """The answer to a question, or the result of a tool that the client runs, as JSON text."""
    return control_pb2.InteractionAnswer(interaction_id=interaction_id, answer_json=answer_json)


class Client:
    """Connections to the services of one deployment; open it with `async with`.

    `token` is sent as a bearer token with each call. One that expires is given as a function without arguments, which
    is asked for each call and so should answer from memory. With `tls` connections use TLS; `root_certificates` (PEM)
    is short for `Tls(root_certificates)`. A call that is made in a span of OpenTelemetry carries its context.
    """

    def __init__(
        self,
        addresses: Addresses | None = None,
        *,
        token: Token = "",
        tls: Tls | None = None,
        root_certificates: bytes | None = None,
    ) -> None:
        self._addresses = addresses or Addresses()
        self._token = kept(token)
        self._tls = tls_of(tls, root_certificates)
        self._channels: list[grpc.aio.Channel] = []

    @classmethod
    def from_environment(cls, addresses: Addresses | None = None) -> Self:
        """A client as the environment describes it, like the `hearth` program: addresses, token and TLS.

        It reads HEARTH_POOL_ADDRESS and its siblings unless `addresses` are given, HEARTH_TOKEN, and what
        `Tls.from_environment` reads. Raises `hearth.tls.TlsError`.
        """
        return cls(addresses, token=os.environ.get("HEARTH_TOKEN", ""), tls=Tls.from_environment())

    async def __aenter__(self) -> Self:
        where = self._addresses
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self._open(where.pool))
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self._channels[-1])
        self.histories = history_service_pb2_grpc.HistoryServiceStub(self._open(where.history))
        self.relays = relay_service_pb2_grpc.RelayServiceStub(self._open(where.relay))
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self._open(where.sandbox))
        self.admin = Admin(self.sessions, self.pools, self.histories, self.sandboxes)
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        self._channels.clear()

    def _open(self, address: str) -> grpc.aio.Channel:
        channel = open_channel(address, token=self._token, tls=self._tls)
        self._channels.append(channel)
        return channel

    def replica(self, address: str) -> grpc.aio.Channel:
        """A channel to one process of the pool, at an address that `ListReplicas` told. Close it when done."""
        tls = self._tls
        if tls is not None and not tls.server_name:
            # By itself it may be known under a name of the moment, which no certificate holds.
            tls = dataclasses.replace(tls, server_name=certificate_name(self._addresses.pool))
        return open_channel(address, token=self._token, tls=tls)

    async def send(
        self,
        key: session_pb2.SessionKey,
        content: str | Sequence[content_pb2.ContentPart],
        *,
        request_id: str = "",
        spec: control_pb2.SessionSpec | None = None,
        on_busy: control_pb2.OnBusy.ValueType = control_pb2.ON_BUSY_UNSPECIFIED,
        steer_execution_id: str = "",
    ) -> session_service_pb2.SendInputResponse:
        """Give the agent a message; `on_busy` says what to do when it works already, unset is to wait in the queue.

        With STEER only the execution named is stopped for it, whichever runs where none is named.
        """
        return await answered(
            self.sessions.SendInput(
                session_service_pb2.SendInputRequest(
                    session=key,
                    request_id=request_id or new_id(),
                    content=content_of(content),
                    spec=spec,
                    on_busy=on_busy,
                    steer_execution_id=steer_execution_id,
                ),
                timeout=CALL_SECONDS,
            )
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
            request_id=request_id or new_id(),
            name=name,
            media_type=media_type,
            size_bytes=len(data),
            digest=hashlib.sha256(data).hexdigest(),
        )

        async def requests() -> AsyncIterator[session_service_pb2.PutAttachmentRequest]:
            yield session_service_pb2.PutAttachmentRequest(description=description)
            for start in range(0, len(data), CHUNK_BYTES):
                yield session_service_pb2.PutAttachmentRequest(chunk=data[start : start + CHUNK_BYTES])

        left = _UPLOADS
        while True:
            left -= 1
            try:
                return (await answered(self.sessions.PutAttachment(requests(), timeout=UPLOAD_SECONDS))).attachment
            except CallError as error:
                if not left or not status_is_lost(error):
                    raise

    async def stop(
        self, key: session_pb2.SessionKey, *, execution_id: str = "", seen_epoch: int = 0, request_id: str = ""
    ) -> control_pb2.Command:
        """Ask the execution to stop; without its id, whichever runs and is not newer than `seen_epoch`."""
        answer = await answered(
            self.sessions.StopExecution(
                session_service_pb2.StopExecutionRequest(
                    session=key,
                    request_id=request_id or new_id(),
                    execution_id=execution_id,
                    seen_epoch=seen_epoch,
                ),
                timeout=CALL_SECONDS,
            )
        )
        return answer.command

    async def kill(self, key: session_pb2.SessionKey, *, request_id: str = "") -> control_pb2.Session:
        """End whatever runs, empty the queue, delete the sandbox. The log stays, and the session may be used again."""
        answer = await answered(
            self.sessions.KillSession(
                session_service_pb2.KillSessionRequest(session=key, request_id=request_id or new_id()),
                timeout=CALL_SECONDS,
            )
        )
        return answer.session

    async def answer(
        self,
        key: session_pb2.SessionKey,
        answers: Sequence[control_pb2.InteractionAnswer],
        *,
        answered_by: str = "",
        request_id: str = "",
    ) -> session_service_pb2.AnswerInteractionsResponse:
        """Answer what the agent asked, see `decided` and `told`: all of the answers are taken, or none."""
        return await answered(
            self.sessions.AnswerInteractions(
                session_service_pb2.AnswerInteractionsRequest(
                    session=key, request_id=request_id or new_id(), answers=answers, answered_by=answered_by
                ),
                timeout=CALL_SECONDS,
            )
        )

    async def interactions(
        self, key: session_pb2.SessionKey, *, pending_only: bool = True
    ) -> AsyncIterator[control_pb2.Interaction]:
        """What the agent asked, oldest first; `pending_only`: what nobody has answered yet."""
        request = session_service_pb2.ListInteractionsRequest(session=key, pending_only=pending_only)
        async for page in pages(self.sessions.ListInteractions, request):
            for interaction in page.interactions:
                yield interaction

    async def inputs(self, key: session_pb2.SessionKey) -> AsyncIterator[control_pb2.Input]:
        """The queue: first what was promoted and has not reached the agent, then what waits, by rank."""
        request = session_service_pb2.ListInputsRequest(session=key)
        async for page in pages(self.sessions.ListInputs, request):
            for waiting in page.inputs:
                yield waiting

    async def update_input(
        self,
        key: session_pb2.SessionKey,
        input_id: str,
        content: str | Sequence[content_pb2.ContentPart],
        *,
        request_id: str = "",
    ) -> control_pb2.Input:
        """Replace the content of an input that waits."""
        answer = await answered(
            self.sessions.UpdateInput(
                session_service_pb2.UpdateInputRequest(
                    session=key, request_id=request_id or new_id(), input_id=input_id, content=content_of(content)
                ),
                timeout=CALL_SECONDS,
            )
        )
        return answer.input

    async def remove_input(
        self, key: session_pb2.SessionKey, input_id: str, *, request_id: str = ""
    ) -> control_pb2.Input:
        """Take an input out of the queue."""
        answer = await answered(
            self.sessions.RemoveInput(
                session_service_pb2.RemoveInputRequest(
                    session=key, request_id=request_id or new_id(), input_id=input_id
                ),
                timeout=CALL_SECONDS,
            )
        )
        return answer.input

    async def send_now(
        self, key: session_pb2.SessionKey, input_id: str, *, execution_id: str = "", request_id: str = ""
    ) -> session_service_pb2.SendInputNowResponse:
        """Run an input that waits before all others, stopping what runs; the execution named, where one is."""
        return await answered(
            self.sessions.SendInputNow(
                session_service_pb2.SendInputNowRequest(
                    session=key, request_id=request_id or new_id(), input_id=input_id, execution_id=execution_id
                ),
                timeout=CALL_SECONDS,
            )
        )

    async def resume_queue(
        self, key: session_pb2.SessionKey, *, request_id: str = ""
    ) -> session_service_pb2.ResumeQueueResponse:
        """Let a paused queue go on."""
        return await answered(
            self.sessions.ResumeQueue(
                session_service_pb2.ResumeQueueRequest(session=key, request_id=request_id or new_id()),
                timeout=CALL_SECONDS,
            )
        )

    async def sessions_of(self, project: str) -> AsyncIterator[control_pb2.Session]:
        """Sessions of a project, the one that changed last first."""
        request = session_service_pb2.ListSessionsRequest(project=project)
        async for page in pages(self.sessions.ListSessions, request):
            for found in page.sessions:
                yield found

    async def get_execution(self, key: session_pb2.SessionKey, execution_id: str) -> control_pb2.Execution:
        """One run of the agent, as it stands."""
        answer = await answered(
            self.sessions.GetExecution(
                session_service_pb2.GetExecutionRequest(session=key, execution_id=execution_id), timeout=CALL_SECONDS
            )
        )
        return answer.execution

    async def get_command(self, key: session_pb2.SessionKey, command_id: str) -> control_pb2.Command:
        """What became of a Stop or a steer so far."""
        answer = await answered(
            self.sessions.GetCommand(
                session_service_pb2.GetCommandRequest(session=key, command_id=command_id), timeout=CALL_SECONDS
            )
        )
        return answer.command

    async def get_session(self, key: session_pb2.SessionKey) -> control_pb2.Session:
        """The session as it stands."""
        answer = await answered(
            self.sessions.GetSession(session_service_pb2.GetSessionRequest(session=key), timeout=CALL_SECONDS)
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
        return Watch(
            self.relays,
            key,
            after=after,
            tail=tail,
            events_only=events_only,
            token=lambda: token_of(self._token),
        )

    async def follow(self, key: session_pb2.SessionKey, *, until_ended: str = "") -> AsyncIterator[Transcript]:
        """What is visible of a session from its beginning on: the same `Transcript` again after each change.

        `until_ended` is an execution; the iteration ends with its ending. Without one it goes on for ever.
        """
        transcript = Transcript()
        async with contextlib.aclosing(aiter(self.watch(key))) as items:
            async for item in items:
                transcript.apply(item)
                yield transcript
                event = item.event.event
                if until_ended and is_ending(event.type) and event.execution_id == until_ended:
                    return

    async def history(
        self, key: session_pb2.SessionKey, *, after: session_pb2.Cursor | None = None
    ) -> AsyncIterator[event_pb2.EventItem]:
        """The log after a cursor, up to the head of this moment. A stream that breaks is opened anew where it broke."""
        while True:
            delivered = False
            call = self.histories.StreamEvents(history_service_pb2.StreamEventsRequest(session=key, after=after))
            try:
                async for chunk in call:
                    for item in chunk.events:
                        after, delivered = item.cursor, True
                        yield item
                return
            except grpc.aio.AioRpcError as error:
                # One that brought nothing is told: the service is away, and when to ask again is the caller's to say.
                if not delivered or error.code() not in RESUMABLE:
                    raise read_error(error) from error
            finally:
                call.cancel()

    async def head(self, key: session_pb2.SessionKey) -> history_pb2.Head:
        """Where the log stands."""
        answer = await answered(
            self.histories.GetHeads(history_service_pb2.GetHeadsRequest(sessions=[key]), timeout=CALL_SECONDS)
        )
        return answer.heads[0]
