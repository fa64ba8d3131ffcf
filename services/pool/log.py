"""The event log as seen from the pool: what it says about an execution, and the conversation so far."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from services.pool.control.executions import ENDING_TYPES, Winner
from services.pool.rows import Key

logger = logging.getLogger(__name__)

_PAGE = 500
_READ_SECONDS = 10.0


class Log:
    """Reads of the history service. Errors are `HearthError`s."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = history_service_pb2_grpc.HistoryServiceStub(channel)

    async def ending(self, key: Key, execution_id: str, *, timeout: float) -> Winner | None:
        """The ending of the newest execution of a log, if it is this one and has ended.

        None also when history does not answer within `timeout` seconds: what cannot be known counts as running.
        """
        try:
            heads = await self._stub.GetHeads(
                history_service_pb2.GetHeadsRequest(sessions=[key.message()]), timeout=timeout
            )
            head = heads.heads[0]
            if not head.ended or head.execution_id != execution_id:
                return None
            snapshot = await self._stub.GetSnapshot(
                history_service_pb2.GetSnapshotRequest(session=key.message(), page_size=1), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            logger.info(
                "history was not asked whether an execution ended",
                extra={"session": str(key), "execution": execution_id, "cause": error.code().name},
            )
            return None
        entry = snapshot.execution
        if entry.execution_id != execution_id or not entry.HasField("ending"):
            return None
        return winner_of(entry.ending)

    async def failure_code(self, key: Key, winner: Winner) -> str:
        """The reason of a failure that somebody else wrote; empty when it cannot be read."""
        request = history_service_pb2.ReadEventsRequest(
            session=key.message(), after=session_pb2.Cursor(sequence=winner.sequence - 1), page_size=1
        )
        try:
            page = await self._stub.ReadEvents(request, timeout=_READ_SECONDS)
        except grpc.aio.AioRpcError as error:
            logger.warning("failure cannot be read", extra={"session": str(key), "cause": error.code().name})
            return ""
        for item in page.events:
            if item.event.event_id == winner.event_id:
                return item.event.execution_failed.code
        return ""

    async def newest_first(self, key: Key) -> AsyncIterator[event_pb2.Event]:
        """The events of a log from its head backwards. Raises `HearthError`."""
        token = ""
        while True:
            request = history_service_pb2.GetSnapshotRequest(session=key.message(), page_size=_PAGE, page_token=token)
            try:
                page = await self._stub.GetSnapshot(request, timeout=_READ_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise _failed(error) from None
            for item in reversed(page.events):
                yield item.event
            token = page.next_page_token
            if not token:
                return

    async def delete(self, key: Key) -> None:
        """Delete a log for good. Raises `HearthError`."""
        try:
            await self._stub.DeleteLog(history_service_pb2.DeleteLogRequest(session=key.message()))
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None


def winner_of(ending: history_pb2.Ending) -> Winner:
    """An ending as history tells it."""
    return Winner(ending.event_id, ending.type, ending.epoch, ending.sequence)


def winner_by(result: history_pb2.AppendResult, event: event_pb2.Event) -> Winner | None:
    """Which ending stands after appending the ending `event`; None when history took neither it nor any other."""
    if result.HasField("winner") and result.winner.type in ENDING_TYPES:
        return winner_of(result.winner)
    stored = (history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE)
    if result.outcome in stored and result.sequence > 0:
        return Winner(event.event_id, event.type, event.epoch, result.sequence, event.execution_failed.code)
    return None


def _failed(error: grpc.aio.AioRpcError) -> HearthError:
    return from_rpc_error(error)
