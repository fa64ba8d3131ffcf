"""Traces and metrics of a process, and the helpers that carry a trace where no library does: bus, rows, harness.

Spans go to an OTLP collector when one is named, and to a JSONL file when one is named; with neither they are made and
dropped, so that trace ids in the logs exist always.

A root span of kind CLIENT is not recorded: a query or call that nothing asked for is a poll, and a polling process
would fill the collector with one-span traces. Background work worth seeing starts with `span(...)`, which is INTERNAL.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from services.chassis.logs import setup_logging
from services.chassis.settings import ChassisSettings

logger = logging.getLogger(__name__)

# How long a finished span may wait for its file: a killed process loses at most this much of its trace.
_FILE_DELAY_MILLISECONDS = 200
_FLUSH_MILLISECONDS = 3000
_propagator = TraceContextTextMapPropagator()


class Telemetry:
    """The providers of this process; `shutdown` sends what is still held."""

    def __init__(self, traces: TracerProvider, meters: MeterProvider) -> None:
        self.traces = traces
        self.meters = meters

    def shutdown(self) -> None:
        """Flush and close; blocks for a few seconds at most when the collector does not answer."""
        self.traces.force_flush(_FLUSH_MILLISECONDS)
        self.traces.shutdown()
        self.meters.shutdown(timeout_millis=_FLUSH_MILLISECONDS)


class _Process:
    """OpenTelemetry's providers can be set once in a process."""

    telemetry: Telemetry | None = None


def setup(settings: ChassisSettings, service: str) -> Telemetry:
    """Start logs, traces, metrics and the instrumentation of the clients. Later calls return the first result."""
    if _Process.telemetry is not None:
        return _Process.telemetry
    setup_logging(service, level=settings.log_level, form=settings.log_format)
    resource = Resource.create(
        {"service.name": f"hearth-{service}", "service.instance.id": str(uuid.uuid4()), "process.pid": os.getpid()}
    )
    traces = TracerProvider(resource=resource, sampler=ParentBased(root=_QuietRoots()), shutdown_on_exit=False)
    if settings.trace_file is not None:
        exporter = FileSpanExporter(settings.trace_file)
        traces.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_FILE_DELAY_MILLISECONDS))
    readers: list[MetricReader] = []
    if settings.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
    trace.set_tracer_provider(traces)
    metrics.set_meter_provider(meters)
    _instrument_clients()
    _Process.telemetry = Telemetry(traces, meters)
    return _Process.telemetry


def _instrument_clients() -> None:
    from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor
    from opentelemetry.instrumentation.redis import RedisInstrumentor

    RedisInstrumentor().instrument()
    # Query strings of preview links hold tokens.
    AioHttpClientInstrumentor().instrument(url_filter=lambda url: str(url.with_query(None).with_user(None)))


@functools.cache
def tracer() -> trace.Tracer:
    """The tracer of our own spans; made before there is a provider, it uses the one that comes."""
    return trace.get_tracer("hearth")


@contextmanager
def span(
    name: str,
    *,
    parent: str | Context | None = None,
    links: Sequence[str] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span around the block, current inside of it; an exception marks it as an error and passes on.

    `parent` is a traceparent or a context; none means the current span. `links` are traceparents of other traces that
    this work is also for, as when one commit serves many calls.
    """
    found = extract(parent) if isinstance(parent, str) else parent
    joined = [Link(context) for context in map(_span_context, links) if context is not None]
    with tracer().start_as_current_span(name, context=found, links=joined, kind=kind, attributes=attributes) as current:
        yield current


def inject() -> str:
    """The traceparent of the current span, to be sent or stored; empty when there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


def extract(traceparent: str | bytes | None) -> Context:
    """The context to continue a trace from; an empty or broken `traceparent` gives one without a trace."""
    text = traceparent.decode("ascii", "replace") if isinstance(traceparent, bytes) else traceparent
    return _propagator.extract({"traceparent": text or ""}, context=Context())


@contextmanager
def continued(traceparent: str | bytes | None) -> Iterator[None]:
    """Make the sender's span the current one for the block, without a span of our own."""
    token = otel_context.attach(extract(traceparent))
    try:
        yield
    finally:
        otel_context.detach(token)


def _span_context(traceparent: str) -> SpanContext | None:
    found = trace.get_current_span(extract(traceparent)).get_span_context()
    return found if found.is_valid else None


class _QuietRoots(Sampler):
    """Keeps every trace but those that start with a client span."""

    def should_sample(  # noqa: PLR0917 - the signature is the library's
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        if kind is SpanKind.CLIENT:
            return SamplingResult(Decision.DROP, trace_state=trace_state)
        return ALWAYS_ON.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return "QuietRoots"


class FileSpanExporter(SpanExporter):
    """Appends finished spans to a file that many processes may share: each batch is one write in append mode."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        rest = memoryview("".join(json.dumps(span_record(done)) + "\n" for done in spans).encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def span_record(done: ReadableSpan) -> dict[str, Any]:
    """A finished span as the file holds it: ids in hex, times in nanoseconds since 1970, `parent` null for a root."""
    own = done.get_span_context()
    assert own is not None
    return {
        "trace_id": format(own.trace_id, "032x"),
        "span_id": format(own.span_id, "016x"),
        "parent_id": format(done.parent.span_id, "016x") if done.parent is not None else None,
        "name": done.name,
        "kind": done.kind.name,
        "start_ns": done.start_time,
        "end_ns": done.end_time,
        "status": done.status.status_code.name,
        "status_message": done.status.description,
        "attributes": dict(done.attributes or {}),
        "links": [
            {"trace_id": format(link.context.trace_id, "032x"), "span_id": format(link.context.span_id, "016x")}
            for link in done.links
        ],
        "service": done.resource.attributes.get("service.name"),
        "instance": done.resource.attributes.get("service.instance.id"),
    }


def mark_failed(current: Span, message: str) -> None:
    """Say on a span that its work failed; `message` holds no payload."""
    current.set_status(Status(StatusCode.ERROR, message))
