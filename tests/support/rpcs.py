"""Every RPC of Hearth, from the descriptors of its protos: a new one is found without being named anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from hearth.history.v1 import history_service_pb2
from hearth.pool.v1 import pool_service_pb2, replica_service_pb2
from hearth.relay.v1 import relay_service_pb2
from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_service_pb2

# The process that serves each package.
_FILES = {
    "pool": (session_service_pb2, pool_service_pb2, replica_service_pb2),
    "history": (history_service_pb2,),
    "relay": (relay_service_pb2,),
    "sandbox": (sandbox_service_pb2,),
}


class Rpc:
    """One RPC: `path` as gRPC names it, `process` that serves it, the class of its request."""

    def __init__(self, process: str, method: MethodDescriptor) -> None:
        self.process = process
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        self.name = method.name
        self.request: type[Message] = message_factory.GetMessageClass(method.input_type)
        self.response: type[Message] = message_factory.GetMessageClass(method.output_type)
        self.streams_in = bool(method.client_streaming)
        self.streams_out = bool(method.server_streaming)

    def __repr__(self) -> str:
        return self.path

    def on(self, channel: grpc.aio.Channel) -> Callable[..., Any]:
        """The call of it: takes bytes (or an iterator of them) as request, gives parsed responses."""
        way = f"{'stream' if self.streams_in else 'unary'}_{'stream' if self.streams_out else 'unary'}"
        made: Callable[..., Any] = getattr(channel, way)(
            self.path, request_serializer=None, response_deserializer=self.response.FromString
        )
        return made


RPCS = [
    Rpc(process, method)
    for process, files in _FILES.items()
    for file in files
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

# What every process serves beside its own, to everybody.
OPEN_RPCS: list[MethodDescriptor] = [
    method
    for service in (
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    for method in service.methods
]
