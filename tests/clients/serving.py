"""Servers of one method, which end calls in ways that are hard to get of a real one at a wanted moment."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from hearth import errors
from hearth.relay.v1 import relay_service_pb2
from services.chassis.errors import HearthError


@contextlib.asynccontextmanager
async def serving(handler: grpc.RpcMethodHandler[Any, Any], service: str, method: str) -> AsyncIterator[str]:
    """A server with one method; its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def serving_readers(subscribe: Any) -> contextlib.AbstractAsyncContextManager[str]:
    """A relay that does this for each reader; its address."""
    handler = grpc.unary_stream_rpc_method_handler(
        subscribe,
        request_deserializer=relay_service_pb2.SubscribeRequest.FromString,
        response_serializer=relay_service_pb2.SubscribeResponse.SerializeToString,
    )
    return serving(handler, "hearth.relay.v1.RelayService", "Subscribe")


async def aborted(context: grpc.aio.ServicerContext[Any, Any], error: HearthError) -> None:
    """End a call as a service does."""
    context.set_trailing_metadata(((errors.DETAILS_KEY, error.to_status().SerializeToString()),))
    await context.abort(error.code, error.message)
