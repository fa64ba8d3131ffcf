"""An OTLP collector in the test's own process: what real exporters send to it over gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclasses.dataclass(slots=True)
class Collector:
    """What came so far. `endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT is set to; spans have their service beside."""

    endpoint: str = ""
    spans: list[tuple[str, trace_pb2.Span]] = dataclasses.field(default_factory=list)
    metrics: list[tuple[str, metrics_pb2.Metric]] = dataclasses.field(default_factory=list)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for one in request.resource_spans:
            service = attributes(one.resource.attributes)["service.name"]
            self._collector.spans += [(str(service), span) for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for one in request.resource_metrics:
            service = attributes(one.resource.attributes)["service.name"]
            self._collector.metrics += [
                (str(service), metric) for scope in one.scope_metrics for metric in scope.metrics
            ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.aio.server()
    traces, metrics = _Traces(collector), _Metrics(collector)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def attributes(found: Iterable[common_pb2.KeyValue]) -> dict[str, object]:
    """Attributes in Python's own types."""
    return {one.key: _value(one.value) for one in found}


def _value(value: common_pb2.AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
