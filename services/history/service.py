"""HistoryService: gRPC in and out, nothing else.

The calls that carry events take and give serialized bytes where that saves parsing what only passes through; see
`register`. On the wire they are the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import grpc
import grpc.aio

from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis import fields, telemetry
from services.chassis.auth import require_project
from services.chassis.errors import NotFound, invalid
from services.history import reader, replies, wire
from services.history.appending import AppendCall
from services.history.committer import Committer
from services.history.reader import Reader, place_of
from services.history.retention import Retention
from services.history.store import Store
from services.history.validate import Key, check_request
from services.history.work import Order

_MAX_HEADS = 1_000
_DEFAULT_QUARANTINE = 100
_MAX_QUARANTINE = 1_000
_QUARANTINE_BYTES = 1024 * 1024
_MAX_REASON = 255
_MAX_ROW_DIGITS = 19

Context = grpc.aio.ServicerContext[Any, Any]


class HistoryServicer:
    """One method for each RPC, named as it."""

    def __init__(self, committer: Committer, store: Store, reader: Reader, retention: Retention) -> None:
        self._committer = committer
        self._store = store
        self._reader = reader
        self._retention = retention

    async def AppendEvents(self, request: wire.RawAppend, _context: Context) -> bytes:
        sets = check_request(request.sets)
        for found in sets:
            if found.key[0]:
                require_project(found.key[0])
        submission = self._committer.submit(sets, Order(), telemetry.inject())
        decided = await submission.done
        return history_service_pb2.AppendEventsResponse(sets=replies.set_results(decided)).SerializeToString()

    async def AppendStream(self, requests: AsyncIterator[wire.RawAppend], _context: Context) -> AsyncIterator[bytes]:
        async with AppendCall(self._committer, requests) as call:
            async for response in call.responses():
                yield response

    async def ReadEvents(self, request: history_service_pb2.ReadEventsRequest, _context: Context) -> bytes:
        key = _readable(request.session)
        rows = fields.page_size(request.page_size, default=reader.DEFAULT_PAGE, maximum=reader.MAX_PAGE)
        return await self._reader.page(key, place_of(request.after), rows)

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, _context: Context
    ) -> AsyncIterator[bytes]:
        key = _readable(request.session)
        async for chunk in self._reader.stream(key, place_of(request.after)):
            yield chunk

    async def GetSnapshot(self, request: history_service_pb2.GetSnapshotRequest, _context: Context) -> bytes:
        key = _readable(request.session)
        rows = fields.page_size(request.page_size, default=reader.DEFAULT_SNAPSHOT, maximum=reader.MAX_SNAPSHOT)
        return await self._reader.snapshot(key, rows, request.page_token)

    async def GetHeads(
        self, request: history_service_pb2.GetHeadsRequest, _context: Context
    ) -> history_service_pb2.GetHeadsResponse:
        if not 1 <= len(request.sessions) <= _MAX_HEADS:
            raise invalid("sessions", f"must hold 1 to {_MAX_HEADS} keys")
        keys = [_readable(session, f"sessions[{index}]") for index, session in enumerate(request.sessions)]
        return history_service_pb2.GetHeadsResponse(heads=await self._reader.heads(keys))

    async def MarkIncomplete(
        self, request: history_service_pb2.MarkIncompleteRequest, _context: Context
    ) -> history_service_pb2.MarkIncompleteResponse:
        key = _readable(request.session)
        execution_id = fields.uuid_text("execution_id", request.execution_id)
        if not 1 <= len(request.reason) <= _MAX_REASON or not request.reason.isprintable():
            raise invalid("reason", f"must be 1 to {_MAX_REASON} printable characters")
        execution = await self._store.mark_incomplete(key, execution_id, request.reason)
        if execution is None:
            raise NotFound(
                f"the log knows no execution {execution_id}",
                reason="EXECUTION_NOT_FOUND",
                metadata={"execution_id": execution_id},
            )
        return history_service_pb2.MarkIncompleteResponse(execution=replies.ledger_entry(execution_id, execution))

    async def ListQuarantined(
        self, request: history_service_pb2.ListQuarantinedRequest, _context: Context
    ) -> history_service_pb2.ListQuarantinedResponse:
        key = _readable(request.session)
        execution_id = fields.uuid_text("execution_id", request.execution_id) if request.execution_id else ""
        size = fields.page_size(request.page_size, default=_DEFAULT_QUARANTINE, maximum=_MAX_QUARANTINE)
        after = _row_after(request.page_token)
        rows = await self._store.quarantined(key, execution_id, after, rows=size, size=_QUARANTINE_BYTES)
        token = str(rows[-1].id) if rows else ""
        return history_service_pb2.ListQuarantinedResponse(
            events=[replies.quarantined(row) for row in rows], next_page_token=token
        )

    async def TrimLog(
        self, request: history_service_pb2.TrimLogRequest, _context: Context
    ) -> history_service_pb2.TrimLogResponse:
        key = _readable(request.session)
        through = fields.number("through", request.through)
        bounds = await self._retention.trim(key, through)
        return history_service_pb2.TrimLogResponse(bounds=replies.bounds(bounds))

    async def DeleteLog(
        self, request: history_service_pb2.DeleteLogRequest, _context: Context
    ) -> history_service_pb2.DeleteLogResponse:
        await self._retention.delete(_readable(request.session))
        return history_service_pb2.DeleteLogResponse()


def _readable(session: session_pb2.SessionKey, field: str = "session") -> Key:
    """The key, checked, of a project that the caller may use."""
    key = fields.session_key(session.project, session.session, field=field)
    require_project(key[0])
    return key


def _row_after(page_token: str) -> int:
    if not page_token:
        return 0
    # Python does not take a number of any length apart.
    if not page_token.isascii() or not page_token.isdigit() or len(page_token) > _MAX_ROW_DIGITS:
        raise invalid("page_token", "must be the next_page_token of the page before, unchanged")
    return fields.number("page_token", int(page_token))


def register(servicer: HistoryServicer, server: grpc.aio.Server) -> None:
    """Serve `servicer` under the contract's names.

    The generated function makes the handlers; those that carry events get codecs that leave the events alone.
    """
    found = _Handlers()
    generated = history_service_pb2_grpc.add_HistoryServiceServicer_to_server
    generated(cast("history_service_pb2_grpc.HistoryServiceServicer", servicer), cast("grpc.Server", found))
    handlers = dict(found.handlers)
    handlers["AppendEvents"] = grpc.unary_unary_rpc_method_handler(
        cast("Any", servicer.AppendEvents), cast("Any", wire.parse_append), None
    )
    handlers["AppendStream"] = grpc.stream_stream_rpc_method_handler(
        cast("Any", servicer.AppendStream), cast("Any", wire.parse_append_stream), None
    )
    for name in ("ReadEvents", "GetSnapshot"):
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            handlers[name].unary_unary, handlers[name].request_deserializer, None
        )
    handlers["StreamEvents"] = grpc.unary_stream_rpc_method_handler(
        handlers["StreamEvents"].unary_stream, handlers["StreamEvents"].request_deserializer, None
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(found.name, handlers),))
    server.add_registered_method_handlers(found.name, handlers)


class _Handlers:
    """Stands in for a server, to take what the generated code registers."""

    def __init__(self) -> None:
        self.name = ""
        self.handlers: Mapping[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """The same handlers come again, by name, right after."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Take them."""
        self.name, self.handlers = service_name, method_handlers
