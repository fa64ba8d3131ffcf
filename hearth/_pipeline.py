"""One bidirectional stream kept open for as long as there is something to say, and its next one when it breaks.

What is said, in which order, and what goes again after a loss is decided by a `Side`; this is the thin part that does
the calls and the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from hearth.errors import CallError, read_error

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0

# What gRPC raises from a write on a call that ended meanwhile.
_STREAM_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)

R_contra = TypeVar("R_contra", contravariant=True)


class ProtocolViolation(Exception):
    """The service answered something that the contract does not allow; the stream is not trusted any further."""


class Side(Protocol[R_contra]):
    """The pure half of a stream. `now` is always of one monotonic clock, in seconds."""

    @property
    def pending(self) -> bool:
        """Whether a stream is needed: something was not sent or not answered."""
        ...

    @property
    def waiting_since(self) -> float | None:
        """When the oldest request without an answer was sent."""
        ...

    def take(self, now: float) -> bytes | None:
        """The next request, serialized; None when nothing may be sent now."""
        ...

    def next_time(self, now: float) -> float | None:
        """When `take` may have something without anything else happening; None when never."""
        ...

    def received(self, response: R_contra, now: float) -> None:
        """An answer came. Raises `ProtocolViolation`."""
        ...

    def lost(self, error: CallError | None, now: float) -> None:
        """The stream ended: what was not answered goes again on the next one."""
        ...


class Pipeline:
    """Runs the stream of one side. `wake` must be called after each change from outside."""

    def __init__(
        self,
        name: str,
        side: Side[Any],
        open_call: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        *,
        monotonic: Callable[[], float],
        answer_timeout: float,
        changed: Callable[[], None] | None = None,
    ) -> None:
        """`changed` is called after each answer and each loss."""
        self._name = name
        self._side = side
        self._open_call = open_call
        self._monotonic = monotonic
        self._answer_timeout = answer_timeout
        self._changed = changed
        self._awake = asyncio.Event()
        self._idle = asyncio.Event()
        self.losses = 0

    def wake(self) -> None:
        """Something may be sent, or the time of something changed, or nothing is left."""
        self._awake.set()
        if not self._side.pending:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until everything was sent and answered."""
        while self._side.pending:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Keep the stream until cancelled."""
        failures = 0
        while True:
            while not self._side.pending:
                self._awake.clear()
                await self._awake.wait()
            answered, error = await self._stream()
            self._side.lost(error, self._monotonic())
            self._side_changed()
            self.losses += 1
            failures = 0 if answered else failures + 1
            delay = min(FIRST_BACKOFF_SECONDS * 2 ** min(failures, 10), MAX_BACKOFF_SECONDS)
            delay *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads reconnects, nothing secret
            if error is not None:
                delay = max(delay, error.retry_after or 0.0)
                log = logger.warning if failures in (1, 10) else logger.debug
                log(
                    "stream lost",
                    extra={"stream": self._name, "code": error.code.name, "reason": error.reason, "tries": failures},
                )
            await asyncio.sleep(delay)

    async def _stream(self) -> tuple[bool, CallError | None]:
        """One stream to its end: whether it answered anything, and the error it ended with."""
        try:
            call = self._open_call()
        except Exception as error:
            # A channel that was closed under us says so here, by an exception that gRPC does not export.
            logger.exception("stream not opened", extra={"stream": self._name})
            return False, CallError(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__} while opening the stream")
        answers = [0]
        reading = asyncio.create_task(self._read(call, answers), name=f"{self._name} reader")
        writing = asyncio.create_task(self._write(call), name=f"{self._name} writer")
        outcome: CallError | None = None
        failed: list[BaseException] = []
        try:
            outcome = await self._watch(reading, writing)
        finally:
            for task in (reading, writing):
                task.cancel()
            call.cancel()
            await asyncio.wait((reading, writing))
            failed = [found for task in (writing, reading) if not task.cancelled() and (found := task.exception())]
        for found in failed:
            outcome = self._describe(found, outcome)
        return answers[0] > 0, outcome

    async def _watch(self, reading: asyncio.Task[None], writing: asyncio.Task[None]) -> CallError | None:
        while True:
            # When a write fails the status is on its way to the reader, which alone can tell it.
            watched = {reading} if writing.done() else {reading, writing}
            await asyncio.wait(watched, timeout=self._answer_timeout / 4, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return None
            if writing.done() and not isinstance(writing.exception(), _STREAM_ENDED):
                return None
            since = self._side.waiting_since
            if since is not None and self._monotonic() - since > self._answer_timeout:
                return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the service takes requests and answers none")

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any], answers: list[int]) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                return
            self._side.received(response, self._monotonic())
            answers[0] += 1
            self._side_changed()

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        while True:
            now = self._monotonic()
            request = self._side.take(now)
            if request is not None:
                await call.write(request)
                continue
            self._awake.clear()
            until = self._side.next_time(now)
            if until is None:
                await self._awake.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, until - now)):
                        await self._awake.wait()

    def _side_changed(self) -> None:
        self.wake()
        if self._changed is not None:
            self._changed()

    def _describe(self, found: BaseException, error: CallError | None) -> CallError:
        if isinstance(found, grpc.aio.AioRpcError):
            return read_error(found)
        if isinstance(found, asyncio.InvalidStateError):
            return error or CallError(grpc.StatusCode.UNAVAILABLE, "the stream takes no more requests")
        logger.error("stream broken by a defect", exc_info=found, extra={"stream": self._name})
        return CallError(grpc.StatusCode.INTERNAL, f"{type(found).__name__} while using the stream")
