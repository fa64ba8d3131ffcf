"""Nothing that people or agents wrote leaves the process with a span, whoever made the span."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from services.chassis import telemetry
from services.chassis.errors import NotFound
from services.chassis.span_file import span_record
from services.chassis.span_words import Wordless, code_in, kept

SECRET = "ein Geheimnis"


def fail(tracer: Tracer) -> None:
    with tracer.start_as_current_span("call", kind=SpanKind.CLIENT) as span:
        span.set_attribute("http.request.method", "GET")
        span.set_attribute("prompt", SECRET)
        span.add_event("retry", {"hearth.attempt": 2, "why": SECRET})
        raise ValueError(SECRET)


def test_the_text_of_an_exception_stays_here() -> None:
    got = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "x"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Wordless(got)))
    with pytest.raises(ValueError, match=SECRET):
        fail(provider.get_tracer("library"))
    (done,) = got.get_finished_spans()
    assert SECRET not in done.to_json()
    assert (done.status.status_code, done.status.description) == (StatusCode.ERROR, "ValueError")
    assert dict(done.attributes or {}) == {"http.request.method": "GET"}
    retry, exception = done.events
    assert dict(retry.attributes or {}) == {"hearth.attempt": 2}
    assert (exception.attributes or {})["exception.type"] == "ValueError"
    own = done.get_span_context()
    assert own is not None
    assert span_record(done)["span_id"] == format(own.span_id, "016x")
    assert (done.kind, done.name, done.resource.attributes["service.name"]) == (SpanKind.CLIENT, "call", "x")
    provider.shutdown()


def test_our_own_spans_tell_the_reason_of_an_error_and_not_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    got = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(got))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    for error in (NotFound(SECRET, reason="SESSION_NOT_FOUND"), RuntimeError(SECRET)):
        with pytest.raises(type(error)), telemetry.span("work"):
            raise error
    for done, reason in zip(got.get_finished_spans(), ("SESSION_NOT_FOUND", "RuntimeError"), strict=True):
        assert SECRET not in done.to_json()
        assert not done.events
        assert (done.status.description, (done.attributes or {})["error.type"]) == (reason, reason)
    provider.shutdown()


def test_addresses_lose_their_secrets_and_long_values_their_ends() -> None:
    assert kept(
        {
            "url.full": f"https://me:{SECRET}@host:8080/v1/acp/s1?token={SECRET}#{SECRET}",
            "hearth.session": "s" * 1000,
            "db.query.text": f"SELECT '{SECRET}'",
            "http.request.header.authorization": [SECRET],
            "gen_ai.tool.call.arguments": SECRET,
            "gen_ai.usage.input_tokens": 7,
            "sentence": SECRET,
        }
    ) == {"url.full": "https://host:8080/v1/acp/s1", "hearth.session": "s" * 256, "gen_ai.usage.input_tokens": 7}


@pytest.mark.parametrize(
    ("description", "code"),
    [
        ("DaytonaError: no such sandbox", "DaytonaError"),
        ("HISTORY_UNAVAILABLE", "HISTORY_UNAVAILABLE"),
        ("-32603", "-32603"),
        ("the user wrote this", None),
        ("", None),
        (None, None),
    ],
)
def test_a_status_keeps_its_code(description: str | None, code: str | None) -> None:
    assert code_in(description) == code
    assert Status(StatusCode.ERROR, code_in(description)).description == code
