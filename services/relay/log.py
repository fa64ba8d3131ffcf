"""History as the relay sees it: pages of one log, heads of many, and a way back from the newest event."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, dependency_unavailable, from_rpc_error
from services.relay.buffer import Key
from services.relay.wire import Place, RawPage, RawSnapshot, parse_page, parse_snapshot

logger = logging.getLogger(__name__)

HEADS_MAX = 1000
_PAGE_SIZE = 5000
_BACK_PAGE_SIZE = 500

_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
# A defect over there is none of the reader's request, and may be gone at its next try.
_BROKEN = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


class Log:
    """Calls of HistoryService, each within `timeout` seconds.

    Each raises `Unavailable` when history does not answer, and else what history refused with, its reason and metadata
    unchanged.
    """

    def __init__(self, channel: grpc.aio.Channel, *, timeout: float) -> None:
        self._timeout = timeout
        method = f"/{history_service_pb2.DESCRIPTOR.services_by_name['HistoryService'].full_name}/"
        self._read = channel.unary_unary(
            method + "ReadEvents", history_service_pb2.ReadEventsRequest.SerializeToString, parse_page
        )
        self._snapshot = channel.unary_unary(
            method + "GetSnapshot", history_service_pb2.GetSnapshotRequest.SerializeToString, parse_snapshot
        )
        self._heads = channel.unary_unary(
            method + "GetHeads",
            history_service_pb2.GetHeadsRequest.SerializeToString,
            history_service_pb2.GetHeadsResponse.FromString,
        )

    async def page(self, key: Key, after: Place) -> RawPage:
        """The events that follow `after`, as many as fit into a page."""
        request = history_service_pb2.ReadEventsRequest(
            session=_session(key), after=after.cursor(), page_size=_PAGE_SIZE
        )
        try:
            return await self._read(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise _seen(error) from error

    async def back(self, key: Key, token: str) -> RawSnapshot:
        """The newest events, or with the token of such a page the ones just before it; ascending within the page."""
        request = history_service_pb2.GetSnapshotRequest(
            session=_session(key), page_size=_BACK_PAGE_SIZE, page_token=token
        )
        try:
            return await self._snapshot(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise _seen(error) from error

    async def heads(self, keys: Sequence[Key]) -> list[history_pb2.Head]:
        """Where the logs of `keys` stand, in their order; any number of them."""
        found: list[history_pb2.Head] = []
        for start in range(0, len(keys), HEADS_MAX):
            request = history_service_pb2.GetHeadsRequest(
                sessions=[_session(key) for key in keys[start : start + HEADS_MAX]]
            )
            try:
                response = await self._heads(request, timeout=self._timeout)
            except grpc.aio.AioRpcError as error:
                raise _seen(error) from error
            found += response.heads
        return found


def _session(key: Key) -> session_pb2.SessionKey:
    return session_pb2.SessionKey(project=key[0], session=key[1])


def _seen(error: grpc.aio.AioRpcError) -> HearthError:
    if error.code() in _BROKEN:
        logger.error("history failed", extra={"code": error.code().name, "cause": error.details()})
        return dependency_unavailable("history", "failed")
    if error.code() in _AWAY:
        return dependency_unavailable("history")
    return from_rpc_error(error)
