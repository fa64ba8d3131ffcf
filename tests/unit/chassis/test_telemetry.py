"""Spans, the file they go to, contexts that travel as text, and log lines that name their trace."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadHttpMessage
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from services.chassis import telemetry
from services.chassis.logs import setup_logging
from services.chassis.span_file import SpanFile


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    provider = TracerProvider(
        resource=Resource.create({"service.name": "hearth-test"}),
        sampler=ParentBased(root=telemetry._QuietRoots()),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(tmp_path / "deep" / "spans.jsonl", max_bytes=1_000_000)))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    yield provider
    provider.shutdown()


@pytest.fixture
def spans(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "spans.jsonl"


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_span_is_one_line_with_everything_in_it(provider: TracerProvider, spans: Path) -> None:
    with telemetry.span("outer", attributes={"session": "s"}) as outer:
        other = telemetry.inject()
        with telemetry.span("inner", kind=SpanKind.CONSUMER, links=[other, "broken"]):
            pass
    inner_line, outer_line = read(spans)
    context = outer.get_span_context()
    assert outer_line["trace_id"] == inner_line["trace_id"] == format(context.trace_id, "032x")
    assert outer_line["parent_id"] is None
    assert inner_line["parent_id"] == outer_line["span_id"]
    assert inner_line["links"] == [{"trace_id": outer_line["trace_id"], "span_id": outer_line["span_id"]}]
    assert (inner_line["kind"], outer_line["kind"]) == ("CONSUMER", "INTERNAL")
    assert outer_line["attributes"] == {"session": "s"}
    assert outer_line["service"] == "hearth-test"
    assert outer_line["status"] == "UNSET"
    start, end = outer_line["start_ns"], outer_line["end_ns"]
    assert isinstance(start, int)
    assert isinstance(end, int)
    assert start <= end


def test_an_exception_marks_its_span(provider: TracerProvider, spans: Path) -> None:
    with pytest.raises(ValueError, match="broken"), telemetry.span("work"):
        raise ValueError("broken")
    assert read(spans)[0]["status"] == "ERROR"


def test_a_context_travels_as_text(provider: TracerProvider, spans: Path) -> None:
    with telemetry.span("sender"):
        carried = telemetry.inject()
    assert telemetry.inject() == ""
    with telemetry.span("receiver", parent=carried):
        pass
    with telemetry.continued(carried.encode()):
        assert telemetry.inject() == carried
    assert telemetry.inject() == ""
    sender, receiver = read(spans)
    assert receiver["parent_id"] == sender["span_id"]


@pytest.mark.parametrize("broken", ["", "x", "00-zz-zz-01", None, b"\xff"])
def test_a_broken_context_starts_a_trace_of_its_own(
    provider: TracerProvider, spans: Path, broken: str | bytes | None
) -> None:
    with telemetry.span("outer"), telemetry.span("alone", parent=telemetry.extract(broken)):
        pass
    assert next(line for line in read(spans) if line["name"] == "alone")["parent_id"] is None


def test_a_poll_leaves_no_trace_but_the_same_query_in_a_call_does(provider: TracerProvider, spans: Path) -> None:
    with telemetry.span("SELECT", kind=SpanKind.CLIENT), telemetry.span("below"):
        pass
    assert not spans.read_text()
    with telemetry.span("sweep"), telemetry.span("SELECT", kind=SpanKind.CLIENT):
        pass
    assert [line["name"] for line in read(spans)] == ["SELECT", "sweep"]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.parametrize("listens", [True, False])
def test_a_collector_that_is_away_costs_its_spans_and_not_the_end(listens: bool, tmp_path: Path) -> None:
    # Where somebody listens, nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        of_spans, of_metrics = OTLPSpanExporter(endpoint), OTLPMetricExporter(endpoint)
        traces, path = TracerProvider(shutdown_on_exit=False), tmp_path / "spans.jsonl"
        for exporter in (SpanFile(path, max_bytes=10_000_000), of_spans):
            traces.add_span_processor(BatchSpanProcessor(exporter))
        pages = PrometheusMetricReader(registry=CollectorRegistry())
        meters = MeterProvider([PeriodicExportingMetricReader(of_metrics), pages], shutdown_on_exit=False)
        meters.get_meter("test").create_counter("things").add(1)
        for number in range(2_000):
            traces.get_tracer("test").start_span(f"work {number}").end()
        held = telemetry.Telemetry(traces, meters, [of_spans, of_metrics])
        ending = threading.Thread(target=held.shutdown, daemon=True)
        ending.start()
        # It would be half a minute, for four batches.
        ending.join(10)
        assert not ending.is_alive()
    assert len(read(path)) == 2_000


def test_json_logs(provider: TracerProvider, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("history", level="INFO", form="json")
    logger = logging.getLogger("services.history.committer")
    with telemetry.span("call") as current:
        logger.info("group committed", extra={"events": 3})
    logger.debug("not shown")
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["trace_id"] == format(current.get_span_context().trace_id, "032x")
    assert first["span_id"] == format(current.get_span_context().span_id, "016x")
    assert {key: first[key] for key in ("level", "logger", "message", "events", "service")} == {
        "level": "INFO",
        "logger": "services.history.committer",
        "message": "group committed",
        "events": 3,
        "service": "history",
    }
    assert first["time"].endswith("+00:00")
    assert "trace_id" not in second
    assert "ValueError: cause" in second["stack"]


def test_what_strangers_send_is_not_logged(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("history", level="INFO", form="json")
    for name, message in (("grpc._cython.cygrpc", "Invalid encoding on %s"), ("aiohttp.server", "Error handling %s")):
        try:
            raise BadHttpMessage("Bearer secret")
        except BadHttpMessage:
            logging.getLogger(name).exception(message, b"Bearer secret")
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    propagate.extract({"baggage": "a=%ff;=;,=b", "traceparent": parent, "tracestate": "a" * 600})
    propagate.extract({"baggage": "a" * 9_000})
    assert capsys.readouterr().err == ""
    for name in ("grpc._cython.cygrpc", "aiohttp.server"):
        logging.getLogger(name).error("a defect")
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_text_logs(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("history", level="INFO", form="auto")
    logging.getLogger("services.x").info("json when nobody watches")
    json.loads(capsys.readouterr().err)
    setup_logging("history", level="INFO", form="text")
    logging.getLogger("services.history.reader").warning("page is %s", "big", extra={"session": "s1", "events": 5})
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("WARNING history.reader page is big  session=s1 events=5")


def test_the_current_span_is_the_default_parent(provider: TracerProvider) -> None:
    with telemetry.span("outer") as outer:
        assert trace.get_current_span() is outer
