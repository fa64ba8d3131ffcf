"""Traces go out by OTLP: a collector gets every span that the files hold, with the same ids, times and names."""

from __future__ import annotations

import uuid
from pathlib import Path

from opentelemetry.proto.trace.v1 import trace_pb2

from hearth.tracing.layout import Trace
from tests.support.caller import SERVICE, calling
from tests.support.cli import running
from tests.support.collector import Collector, attributes, collecting
from tests.support.servers import Servers
from tests.support.waiting import eventually

SECRET = "geheim"
KINDS = {
    "INTERNAL": trace_pb2.Span.SPAN_KIND_INTERNAL,
    "SERVER": trace_pb2.Span.SPAN_KIND_SERVER,
    "CLIENT": trace_pb2.Span.SPAN_KIND_CLIENT,
    "PRODUCER": trace_pb2.Span.SPAN_KIND_PRODUCER,
    "CONSUMER": trace_pb2.Span.SPAN_KIND_CONSUMER,
}


def came(collector: Collector, trace: Trace) -> dict[str, tuple[str, trace_pb2.Span]]:
    return {
        span.span_id.hex(): (service, span)
        for service, span in collector.spans
        if span.trace_id.hex() == trace.trace_id
    }


async def test_a_collector_gets_the_spans_of_a_turn(servers: Servers) -> None:
    async with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        async with running(Path(servers.scratch()) / ".hearth", environment) as hearth, calling(hearth) as caller:
            execution = await caller.send(f"otlp-{uuid.uuid4().hex[:8]}", f"stream 5 words\nerror of {SECRET}")
            trace = await caller.traced(execution, "turn.settle", "history.commit")
            ours = [row.span for row in trace.rows if row.span.service != SERVICE]
            await eventually(lambda: {span.span_id for span in ours} <= came(collector, trace).keys(), timeout=30)
        got = came(collector, trace)
        for span in ours:
            service, sent = got[span.span_id]
            assert service == f"hearth-{span.service}"
            assert (sent.name, sent.parent_span_id.hex()) == (span.name, span.parent_id)
            assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (span.start_ns, span.end_ns)
            assert sent.kind == KINDS[span.kind]
            assert (sent.status.code == trace_pb2.Status.STATUS_CODE_ERROR) == bool(span.error)
            assert attributes(sent.attributes) == span.attributes
            assert [(link.trace_id.hex(), link.span_id.hex()) for link in sent.links] == list(span.links)
        assert any(span.error for span in ours)
        # Nor does an event of a span, which the files do not hold, tell what was written.
        assert all(SECRET.encode() not in span.SerializeToString() for _, span in collector.spans)
