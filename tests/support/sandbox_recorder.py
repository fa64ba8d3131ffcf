"""A sandbox service between the pool and the real one: it passes every call on, writes down what was asked in which
order, and holds up what a test wants held up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2_grpc
from hearth.types.v1 import session_pb2

CALLS = ("Acquire", "Release", "RenewClaims", "GetEndpoint", "DeleteWorkspace")


@dataclasses.dataclass(slots=True)
class Call:
    """One call about one session. `begun` and `ended` number what happened at the service; 0: it did not end yet."""

    method: str
    session: session_pb2.SessionKey
    claim: tuple[int, int]
    reason: str
    begun: int
    ended: int = 0
    answer: Any = None

    def __str__(self) -> str:
        return f"{self.method} {self.reason}".strip()


class SandboxRecorder(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """What the pool asks. `calls` holds everything but renewals."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._real = sandbox_service_pb2_grpc.SandboxServiceStub(self._channel)
        self._number = 0
        self._held: dict[str, asyncio.Event] = {}
        self._refused: dict[tuple[str, str], asyncio.Event] = {}
        # Sessions whose claims do not stand any more, whatever the service says, and what is answered for them.
        self.after_acquire: dict[tuple[str, str], Callable[[], Awaitable[None]]] = {}
        self.lost: dict[tuple[str, str], sandbox_pb2.RenewalOutcome.ValueType] = {}
        self.calls: list[Call] = []

    async def close(self) -> None:
        """Close the connection to the real service."""
        for event in self._held.values():
            event.set()
        await self._channel.close()

    def about(self, session: session_pb2.SessionKey) -> list[Call]:
        """What was asked about a session, in its order."""
        return [call for call in self.calls if call.session == session]

    def told(self, session: session_pb2.SessionKey) -> list[str]:
        """The same in words, as `Acquire` and `Release CLEAN_TURN`."""
        return [str(call) for call in self.about(session)]

    def hold(self, method: str) -> asyncio.Event:
        """From now on calls of a method wait until the event is set."""
        event = self._held[method] = asyncio.Event()
        return event

    def release(self, method: str) -> None:
        """Let go of the calls of a method, and hold no others."""
        self._held.pop(method).set()

    def refused_renewal(self, session: session_pb2.SessionKey) -> asyncio.Event:
        """Set when a renewal of a claim of this session is refused."""
        return self._refused.setdefault((session.project, session.session), asyncio.Event())

    async def Acquire(self, request: Any, context: Any) -> Any:
        return await self._pass(self._real.Acquire, "Acquire", request, context)

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._pass(self._real.Release, "Release", request, context)

    async def RenewClaims(self, request: Any, context: Any) -> Any:
        answer = await self._real.RenewClaims(request, timeout=context.time_remaining())
        for renewal, result in zip(request.renewals, answer.results, strict=True):
            key = (renewal.session.project, renewal.session.session)
            result.outcome = self.lost.get(key, result.outcome)
            if result.outcome != sandbox_pb2.RENEWAL_OUTCOME_OK and key in self._refused:
                self._refused[key].set()
        return answer

    async def GetEndpoint(self, request: Any, context: Any) -> Any:
        return await self._pass(self._real.GetEndpoint, "GetEndpoint", request, context)

    async def DeleteWorkspace(self, request: Any, context: Any) -> Any:
        return await self._pass(self._real.DeleteWorkspace, "DeleteWorkspace", request, context)

    async def _pass(self, real: Callable[..., Awaitable[Any]], method: str, request: Any, context: Any) -> Any:
        reason = ""
        if method == "Release":
            reason = sandbox_pb2.ReleaseReason.Name(request.reason).removeprefix("RELEASE_REASON_")
        key = session_pb2.SessionKey(project=request.session.project, session=request.session.session)
        call = Call(method, key, (request.claim.epoch, request.claim.attempt), reason, self._next())
        self.calls.append(call)
        try:
            if method in self._held:
                await self._held[method].wait()
            call.answer = await real(request, timeout=context.time_remaining())
            if method == "Acquire" and (key.project, key.session) in self.after_acquire:
                # What happens between the answer and its arrival.
                await self.after_acquire.pop((key.project, key.session))()
        except grpc.aio.AioRpcError as error:
            # With its details, which say why.
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details())
        finally:
            call.ended = self._next()
        return call.answer

    def _next(self) -> int:
        self._number += 1
        return self._number


@asynccontextmanager
async def recorded(address: str) -> AsyncIterator[tuple[SandboxRecorder, str]]:
    """A recorder before the sandbox service at an address, and where it answers."""
    # What is for operators is asked of the real service itself.
    recorder = SandboxRecorder(address)  # type: ignore[abstract]
    server = grpc.aio.server()
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(recorder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield recorder, f"127.0.0.1:{port}"
    finally:
        await recorder.close()
        await server.stop(0.5)
