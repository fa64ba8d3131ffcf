"""RelayService as gRPC sees it: requests in, responses out, nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from hearth.relay.v1 import relay_service_pb2
from hearth.types.v1 import session_pb2
from services.chassis import fields
from services.chassis.auth import require_project
from services.chassis.clock import Clock
from services.chassis.interceptors import shutting_down
from services.relay.hubs import Hubs
from services.relay.ingress import Ingress
from services.relay.log import Log
from services.relay.metrics import Metrics
from services.relay.reader import Reader, Wish
from services.relay.settings import RelaySettings
from services.relay.surroundings import Surroundings
from services.relay.wire import Place

_TAG = re.compile(r"[0-9a-f]{16}")

Context = grpc.aio.ServicerContext[Any, Any]


class RelayService:
    """The two RPCs."""

    def __init__(
        self,
        *,
        hubs: Hubs,
        ingress: Ingress,
        log: Log,
        surroundings: Surroundings,
        metrics: Metrics,
        clock: Clock,
        settings: RelaySettings,
    ) -> None:
        self._hubs = hubs
        self._metrics = metrics
        self._ingress = ingress
        self._log = log
        self._surroundings = surroundings
        self._clock = clock
        self._settings = settings

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`. Responses of Subscribe are handed over serialized, as many readers get the same bytes."""
        name = relay_service_pb2.DESCRIPTOR.services_by_name["RelayService"].full_name
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Publish": grpc.stream_stream_rpc_method_handler(
                self.publish,
                relay_service_pb2.PublishRequest.FromString,
                relay_service_pb2.PublishResponse.SerializeToString,
            ),
            "Subscribe": grpc.unary_stream_rpc_method_handler(
                self.subscribe, relay_service_pb2.SubscribeRequest.FromString, None
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)

    async def publish(
        self, requests: AsyncIterator[relay_service_pb2.PublishRequest], _context: Context
    ) -> AsyncIterator[relay_service_pb2.PublishResponse]:
        """See RelayService.Publish."""
        async for request in requests:
            for project in {batch.session.project for batch in request.batches}:
                require_project(project)
            begun = self._clock.monotonic()
            response = await self._ingress.publish(request)
            frames = sum(len(batch.frames) for batch in request.batches)
            self._metrics.published(self._clock.monotonic() - begun, frames, response.results)
            yield response

    async def subscribe(self, request: relay_service_pb2.SubscribeRequest, context: Context) -> None:
        """See RelayService.Subscribe."""
        wish = wish_of(request)
        require_project(request.session.project)
        if self._hubs.draining:
            raise shutting_down()
        reader = Reader(
            wish,
            context.write,
            hubs=self._hubs,
            log=self._log,
            surroundings=self._surroundings,
            metrics=self._metrics,
            clock=self._clock,
            settings=self._settings,
        )
        try:
            await reader.run()
        finally:
            if reader.cut_off:
                self._metrics.cut(reader.cut_off)


def wish_of(request: relay_service_pb2.SubscribeRequest) -> Wish:
    """What is asked for, or `InvalidArgument` that names every wrong field. Pure."""
    checks = fields.Violations()
    project = checks.take(fields.key_part, "session.project", request.session.project)
    session = checks.take(fields.key_part, "session.session", request.session.session)
    after = Place() if not request.tail else None
    if request.WhichOneof("start") == "after":
        after = _place(request.after, checks)
    checks.raise_if_any()
    return Wish((project, session), after, not request.events_only)


def _place(cursor: session_pb2.Cursor, checks: fields.Violations) -> Place:
    log_id = checks.take(fields.uuid_text, "after.log_id", cursor.log_id) if cursor.log_id else ""
    if cursor.sequence > 2**63 - 1:
        checks.add("after.sequence", f"must be between 0 and {2**63 - 1}")
    if cursor.tag and _TAG.fullmatch(cursor.tag) is None:
        checks.add("after.tag", "must be empty or 16 lower-case hexadecimal digits")
    return Place(log_id, cursor.sequence, cursor.tag)
