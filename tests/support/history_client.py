"""The calls of history in the short form that tests want."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.support import events

APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
CONFLICT = history_pb2.APPEND_OUTCOME_CONFLICT
QUARANTINED = history_pb2.APPEND_OUTCOME_QUARANTINED
ALREADY_ENDED = history_pb2.APPEND_OUTCOME_ALREADY_ENDED
RETRY = history_pb2.APPEND_OUTCOME_RETRY
INVALID = history_pb2.APPEND_OUTCOME_INVALID
SET_ABORTED = history_pb2.APPEND_OUTCOME_SET_ABORTED

Key = session_pb2.SessionKey


class Client:
    """History behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = history_service_pb2_grpc.HistoryServiceStub(channel)

    async def append(self, session: Key, *new: event_pb2.Event, atomic: bool = False) -> list[history_pb2.AppendResult]:
        """Append events of one session; the answers."""
        request = history_service_pb2.AppendEventsRequest(sets=[events.append_set(session, *new, atomic=atomic)])
        response = await self.stub.AppendEvents(request)
        return list(response.sets[0].results)

    async def append_sets(self, *sets: history_pb2.AppendSet) -> list[history_pb2.AppendSetResult]:
        """Append sets in one request; the answers."""
        response = await self.stub.AppendEvents(history_service_pb2.AppendEventsRequest(sets=sets))
        return list(response.sets)

    async def accepted(self, session: Key, *new: event_pb2.Event, atomic: bool = False) -> list[int]:
        """Append events that must all be appended; their sequences."""
        results = await self.append(session, *new, atomic=atomic)
        assert [result.outcome for result in results] == [APPENDED] * len(new), results
        return [result.sequence for result in results]

    async def page(
        self, session: Key, after: session_pb2.Cursor | None = None, page_size: int = 0
    ) -> history_service_pb2.ReadEventsResponse:
        """One page."""
        request = history_service_pb2.ReadEventsRequest(session=session, after=after, page_size=page_size)
        return await self.stub.ReadEvents(request)

    async def read(
        self, session: Key, page_size: int = 0, *, after: session_pb2.Cursor | None = None
    ) -> list[event_pb2.EventItem]:
        """The whole log, or what follows a cursor, page by page, checked to be contiguous."""
        items: list[event_pb2.EventItem] = []
        more, first = True, after.sequence + 1 if after is not None else 1
        while more:
            page = await self.page(session, after, page_size)
            items += page.events
            more = page.more
            after = page.events[-1].cursor if page.events else None
        assert [item.cursor.sequence for item in items] == list(range(first, first + len(items)))
        return items

    async def chunks(
        self, session: Key, after: session_pb2.Cursor | None = None
    ) -> list[history_service_pb2.StreamEventsResponse]:
        """All chunks of a stream."""
        request = history_service_pb2.StreamEventsRequest(session=session, after=after)
        return [chunk async for chunk in self.stub.StreamEvents(request)]

    async def heads(self, *sessions: Key) -> list[history_pb2.Head]:
        """Where logs stand."""
        response = await self.stub.GetHeads(history_service_pb2.GetHeadsRequest(sessions=sessions))
        return list(response.heads)

    async def snapshot(
        self, session: Key, page_size: int = 0, page_token: str = ""
    ) -> history_service_pb2.GetSnapshotResponse:
        """A snapshot page."""
        request = history_service_pb2.GetSnapshotRequest(session=session, page_size=page_size, page_token=page_token)
        return await self.stub.GetSnapshot(request)

    async def mark_incomplete(self, session: Key, execution_id: str, reason: str) -> history_pb2.LedgerEntry:
        """Mark an execution."""
        request = history_service_pb2.MarkIncompleteRequest(session=session, execution_id=execution_id, reason=reason)
        return (await self.stub.MarkIncomplete(request)).execution

    async def quarantined(self, session: Key, execution_id: str = "") -> list[history_pb2.QuarantinedEvent]:
        """All that was kept aside, page by page."""
        found: list[history_pb2.QuarantinedEvent] = []
        token = ""
        while True:
            response = await self.stub.ListQuarantined(
                history_service_pb2.ListQuarantinedRequest(
                    session=session, execution_id=execution_id, page_size=2, page_token=token
                )
            )
            found += response.events
            token = response.next_page_token
            if not token:
                return found

    async def trim(self, session: Key, through: int) -> history_pb2.Bounds:
        """Remove old events."""
        request = history_service_pb2.TrimLogRequest(session=session, through=through)
        return (await self.stub.TrimLog(request)).bounds

    async def delete(self, session: Key) -> None:
        """Remove a log."""
        await self.stub.DeleteLog(history_service_pb2.DeleteLogRequest(session=session))


async def refused(call: object) -> HearthError:
    """The error that an awaitable of the client ends with."""
    try:
        answer = await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError(f"not refused: {answer}")


def ids(items: Sequence[event_pb2.EventItem]) -> list[str]:
    """Event ids in the order delivered."""
    return [item.event.event_id for item in items]
