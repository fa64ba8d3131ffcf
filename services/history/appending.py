"""One AppendStream call: requests in, replies in the same order, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Self

from hearth.history.v1 import history_service_pb2
from services.chassis import telemetry
from services.chassis.auth import require_project
from services.chassis.errors import HearthError, as_hearth_error, internal, invalid
from services.history import replies, wire
from services.history.committer import Committer
from services.history.ledger import Decision
from services.history.validate import check_request
from services.history.work import Order

logger = logging.getLogger(__name__)

# Requests that one stream may have unanswered. Beyond it the next one is not read, and gRPC makes the producer wait.
_WINDOW_REQUESTS = 256
_WINDOW_BYTES = 16 * 1024 * 1024
# Replies joined into one message, and results of events in all of them from which on none is added: one that says
# everything that is wrong with its event takes almost a kilobyte.
_MAX_REPLIES = 128
_MANY_RESULTS = 1_000


class _Pending(NamedTuple):
    """A request whose reply is due. `decided` fails when the request does."""

    number: int
    size: int
    decided: asyncio.Future[list[list[Decision]]]


class AppendCall:
    """Reads requests in the background while replies are written. For `async with`: leaving it stops the reading.

    A request that was read and not answered when the call ends may be committed or not; its events say so when they
    are sent again.
    """

    def __init__(self, committer: Committer, requests: AsyncIterator[wire.RawAppend]) -> None:
        self._committer = committer
        self._requests = requests
        self._order = Order(telemetry.inject())
        self._pending: deque[_Pending] = deque()
        self._size = 0
        self._read = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read_all(), name="append-stream-requests")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def responses(self) -> AsyncIterator[bytes]:
        """Serialized responses. Raises the failure of the first request that failed, with its number."""
        while True:
            if not self._pending:
                if self._ended:
                    return
                self._changed.clear()
                await self._changed.wait()
                continue
            yield await self._next_response()

    async def _next_response(self) -> bytes:
        """Wait for the oldest reply and take along what is there already behind it."""
        response = history_service_pb2.AppendStreamResponse()
        results = 0
        while self._pending and len(response.replies) < _MAX_REPLIES and results < _MANY_RESULTS:
            pending = self._pending[0]
            if response.replies and (not pending.decided.done() or pending.decided.exception() is not None):
                break
            try:
                decided = await pending.decided
            except HearthError as error:
                # The producer is told from which request on to send again.
                raise error.telling({"first_unacknowledged": str(pending.number)}) from error
            self._pending.popleft()
            self._size -= pending.size
            self._room.set()
            response.replies.add(number=pending.number, sets=replies.set_results(decided))
            results += sum(map(len, decided))
        return response.SerializeToString()

    async def _read_all(self) -> None:
        try:
            async for request in self._requests:
                self._take(request)
                if len(self._pending) >= _WINDOW_REQUESTS or self._size >= _WINDOW_BYTES:
                    self._room.clear()
                await self._room.wait()
        except Exception as error:  # noqa: BLE001 - it becomes the status of the call, behind the replies that are due
            self._refuse(error)
        finally:
            self._ended = True
            self._changed.set()

    def _take(self, request: wire.RawAppend) -> None:
        number = self._read + 1
        if request.number != number:
            raise invalid("number", f"must be {number}: requests of a stream are numbered 1, 2, 3 ...")
        sets = check_request(request.sets)
        for found in sets:
            if found.key[0]:
                require_project(found.key[0])
        submission = self._committer.submit(sets, self._order)
        size = sum(len(event) for found in request.sets for event in found.events)
        self._put(_Pending(number, size, submission.done))

    def _put(self, pending: _Pending) -> None:
        self._read = pending.number
        self._size += pending.size
        self._pending.append(pending)
        self._changed.set()

    def _refuse(self, error: Exception) -> None:
        """The request that was being read fails, in its turn."""
        seen = as_hearth_error(error)
        if seen is None:
            logger.error("a request of a stream failed by a defect", exc_info=error)
            seen = internal()
        failed: asyncio.Future[list[list[Decision]]] = asyncio.get_running_loop().create_future()
        failed.set_exception(seen)
        failed.exception()
        self._put(_Pending(self._read + 1, 0, failed))
