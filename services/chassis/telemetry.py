"""Traces and metrics of a process, and the helpers that carry a trace where no library does: bus, rows, harness.

Spans go to an OTLP collector when one is named, and to a file when one is named; with neither they are made and
dropped, so that trace ids in the logs exist always.

Names and attributes are those of OpenTelemetry's conventions in their present form, also where a library still knows an
older one.

A root span of kind CLIENT is not recorded: a query or call that nothing asked for is a poll, and a polling process
would fill the collector with one-span traces. Background work worth seeing starts with `span(...)`, which is INTERNAL.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue
from prometheus_client import ProcessCollector

from hearth.version import version
from services.chassis.logs import setup_logging
from services.chassis.metrics import registry
from services.chassis.settings import ChassisSettings
from services.chassis.span_file import SpanFile
from services.chassis.span_words import Wordless

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

logger = logging.getLogger(__name__)

# How long a finished span may wait for its file: a killed process loses at most this much of its trace.
_FILE_DELAY_MILLISECONDS = 200
# How long a collector may take for what is left at the end.
_FLUSH_SECONDS = 3.0
_CODE = re.compile(r"[A-Z][A-Z0-9_]*")
_propagator = TraceContextTextMapPropagator()


class Telemetry:
    """The providers of this process; `shutdown` sends what is still held.

    `exporters` are those of them that send to a collector.
    """

    def __init__(
        self,
        traces: TracerProvider,
        meters: MeterProvider,
        exporters: Sequence[OTLPSpanExporter | OTLPMetricExporter] = (),
    ) -> None:
        self.traces = traces
        self.meters = meters
        self._exporters = exporters

    def shutdown(self) -> None:
        """Flush and close; what a collector does not take within a few seconds is dropped, and a file gets all."""
        # The library waits for every batch until its exporter gives up, which that does after 10 s, or when it is shut.
        giving_up = threading.Timer(_FLUSH_SECONDS, self._give_up)
        giving_up.daemon = True
        giving_up.start()
        try:
            self.traces.shutdown()
            self.meters.shutdown(timeout_millis=2 * _FLUSH_SECONDS * 1000)
        finally:
            giving_up.cancel()

    def _give_up(self) -> None:
        logger.warning("the collector does not answer, what is left is dropped")
        for exporter in self._exporters:
            exporter.shutdown()


class _Process:
    """OpenTelemetry's providers can be set once in a process."""

    telemetry: Telemetry | None = None


def setup(settings: ChassisSettings, service: str) -> Telemetry:
    """Start logs, traces, metrics and the instrumentation of the clients. Later calls return the first result."""
    if _Process.telemetry is not None:
        return _Process.telemetry
    setup_logging(service, level=settings.log_level, form=settings.log_format)
    resource = Resource.create(
        {
            "service.name": f"hearth-{service}",
            "service.namespace": "hearth",
            "service.version": version(),
            "service.instance.id": str(uuid.uuid4()),
            "process.pid": os.getpid(),
        }
    )
    sampler = ParentBased(root=_QuietRoots(settings.trace_sample))
    traces = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    if settings.trace_file is not None:
        file = Wordless(SpanFile(settings.trace_file, max_bytes=settings.trace_file_bytes))
        traces.add_span_processor(BatchSpanProcessor(file, schedule_delay_millis=_FILE_DELAY_MILLISECONDS))
    readers: list[MetricReader] = []
    exporters: list[OTLPSpanExporter | OTLPMetricExporter] = []
    if settings.otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        of_spans, of_metrics = OTLPSpanExporter(), OTLPMetricExporter()
        exporters += [of_spans, of_metrics]
        # After the file, so that this has all spans whatever the collector does.
        traces.add_span_processor(BatchSpanProcessor(Wordless(of_spans)))
        readers.append(PeriodicExportingMetricReader(of_metrics))
    if settings.metrics_listen:
        ProcessCollector(registry=registry)
        readers.append(PrometheusMetricReader(registry=registry, scope_info_enabled=False))
    meters = MeterProvider(
        metric_readers=readers,
        resource=resource,
        shutdown_on_exit=False,
        # Examples of values, with their traces, would double what taking a value costs.
        exemplar_filter=AlwaysOffExemplarFilter(),
    )
    trace.set_tracer_provider(traces)
    metrics.set_meter_provider(meters)
    _instrument_clients()
    _Process.telemetry = Telemetry(traces, meters, exporters)
    return _Process.telemetry


def _instrument_clients() -> None:
    # Read once, by whichever instrumentation comes first.
    os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http,database")
    # A service that has not loaded a client does without it, and starts sooner.
    if "redis.asyncio" in sys.modules:
        from opentelemetry.instrumentation.redis import RedisInstrumentor

        RedisInstrumentor().instrument()
    if "aiohttp" in sys.modules:
        from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor

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
    links: Sequence[str | SpanContext] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span around the block, current inside of it; an exception marks it as an error and passes on.

    `parent` is a traceparent or a context; none means the current span. `links` are traceparents or contexts of other
    traces that this work is also for, as when one commit serves many calls.
    """
    found = extract(parent) if isinstance(parent, str) else parent
    joined = [Link(context) for context in map(_span_context, links) if context is not None]
    with tracer().start_as_current_span(
        name,
        context=found,
        links=joined,
        kind=kind,
        attributes=attributes,
        # The text of an exception may tell what somebody wrote.
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except Exception as error:
            mark_failed(current, _reason(error))
            raise


def past(name: str, seconds: float, *, attributes: Mapping[str, AttributeValue] | None = None) -> None:
    """A span, below the current one, of what took so many `seconds` and ends now."""
    now = time.time_ns()
    began = now - round(seconds * 1e9)
    tracer().start_span(name, start_time=began, attributes=attributes).end(now)


def link(traceparent: str) -> None:
    """Say on the current span that it is also about another trace; an empty or broken `traceparent` says nothing."""
    context = _span_context(traceparent)
    if context is not None:
        trace.get_current_span().add_link(context)


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


def _span_context(link: str | SpanContext) -> SpanContext | None:
    found = trace.get_current_span(extract(link)).get_span_context() if isinstance(link, str) else link
    return found if found.is_valid else None


class _QuietRoots(Sampler):
    """Keeps `share` of the traces (1: all), and none that starts with a client span."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = TraceIdRatioBased(share)

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
        return self._share.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"QuietRoots{{{self._share.get_description()}}}"


def _reason(error: Exception) -> str:
    """The code of an error of ours, else the name of its type."""
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, str) and _CODE.fullmatch(reason) else type(error).__name__


def mark_failed(current: Span, reason: str) -> None:
    """Say on a span that its work failed; `reason` is a code or the name of a type, and holds no payload."""
    current.set_attribute(ERROR_TYPE, reason)
    current.set_status(Status(StatusCode.ERROR, reason))
