"""Follow one session for as long as wanted: the reader's half of the cursor rule.

Only an event that was delivered moves the cursor. Whatever breaks the stream, the next one starts after the last event
that reached the caller, so no event is lost and none comes twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable

import grpc.aio

from hearth.errors import read_error
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.secret import Secret
from hearth.types.v1 import session_pb2

# The server says something at least every 15 s; three times that without a byte means that the connection is dead.
SILENCE_SECONDS = 45.0
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
# Codes that say nothing about the request: the connection, the server or its proxy went away.
RESUMABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})
# A limit of calls or streams, over which many readers get that come back at once.
_LATER = "OVERLOADED"


class Watch:
    """The items of one session, over reconnects. Iterate it once; `cursor` is where a later watch would resume.

    `after` None starts at the beginning, `tail` at what comes from now on. After a reconnect the relay sends again what
    it has buffered of unfinished messages; an item `reset`, made here, comes first and voids the frames held so far.
    A service that has too much to do is asked again when it says. Errors that a reconnect cannot heal (`CURSOR_AHEAD`,
    `LOG_REPLACED`, `CURSOR_EXPIRED`, rights) are raised as `hearth.errors.CallError`. `token` tells the token that the
    stub would send now: a stream that ended because its token did is opened anew if there is another one by then.
    """

    def __init__(
        self,
        stub: relay_service_pb2_grpc.RelayServiceAsyncStub,
        session: session_pb2.SessionKey,
        *,
        after: session_pb2.Cursor | None = None,
        tail: bool = False,
        events_only: bool = False,
        token: Callable[[], Secret] | None = None,
    ) -> None:
        self._stub = stub
        self._session = session
        self._events_only = events_only
        self._tail = tail and after is None
        self.cursor = after if after is not None else session_pb2.Cursor()
        self.reconnects = 0
        self._token = token
        self._held: relay_pb2.FrameItem | None = None

    async def __aiter__(self) -> AsyncGenerator[relay_pb2.Item]:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            at_least = 0.0
            sent = self._token() if self._token is not None else Secret()
            call = self._stub.Subscribe(self._request())
            if self._held is not None:
                held, self._held = self._held, None
                yield relay_pb2.Item(reset=relay_pb2.Reset(execution_id=held.execution_id, epoch=held.epoch))
            try:
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        response = await call.read()
                    if not isinstance(response, relay_service_pb2.SubscribeResponse):
                        break
                    for item in response.items:
                        backoff = FIRST_BACKOFF_SECONDS
                        self._advance(item)
                        yield item
            except TimeoutError:
                pass
            except grpc.aio.AioRpcError as error:
                renewed = error.code() is grpc.StatusCode.UNAUTHENTICATED and self._token and self._token() != sent
                told = read_error(error)
                if error.code() not in RESUMABLE and told.reason != _LATER and not renewed:
                    raise told from error
                at_least = told.retry_after or 0.0
            finally:
                call.cancel()
            self.reconnects += 1
            await asyncio.sleep(at_least + backoff * random.uniform(0.5, 1.5))  # noqa: S311 - spreads reconnects
            backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    def _advance(self, item: relay_pb2.Item) -> None:
        if item.HasField("frame"):
            self._held = item.frame
        elif item.HasField("event"):
            self.cursor = item.event.cursor
            self._tail = False
        elif item.HasField("ready") and self._tail:
            # Nothing was delivered yet: what `tail` meant is fixed here, so that a reconnect means the same place.
            self.cursor = item.ready.cursor
            self._tail = False

    def _request(self) -> relay_service_pb2.SubscribeRequest:
        request = relay_service_pb2.SubscribeRequest(session=self._session, events_only=self._events_only)
        if self._tail:
            request.tail = True
        else:
            request.after.CopyFrom(self.cursor)
        return request
