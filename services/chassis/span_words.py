"""What leaves the process with a span: names, ids, codes and times, and never what people or agents wrote.

Our own spans hold nothing else. Those of libraries may: an exception's text, an address with a token in it, a statement
with its values. Every span passes here before it is exported, wherever it was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Status
from opentelemetry.util.types import AttributeValue

# Namespaces of OpenTelemetry's conventions, and ours. `component` and `method` are those of Daytona's SDK.
_NAMESPACES = frozenset(
    {
        "client",
        "code",
        "component",
        "db",
        "deployment",
        "error",
        "exception",
        "gen_ai",
        "hearth",
        "http",
        "jsonrpc",
        "messaging",
        "method",
        "network",
        "peer",
        "rpc",
        "server",
        "service",
        "session",
        "thread",
        "url",
        "user_agent",
    }
)
# In these namespaces, and yet texts of somebody.
_TEXTS = frozenset(
    {"db.query.text", "db.statement", "exception.message", "exception.stacktrace", "url.query", "url.fragment"}
)
_TEXT_PREFIXES = (
    "db.operation.parameter.",
    "db.query.parameter.",
    "gen_ai.input",
    "gen_ai.output",
    "gen_ai.prompt",
    "gen_ai.completion",
    "gen_ai.system_instructions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    "gen_ai.tool.definitions",
    "http.request.body.content",
    "http.request.header.",
    "http.response.header.",
    "rpc.request.metadata.",
    "rpc.response.metadata.",
)
_ADDRESSES = frozenset({"url.full", "http.url"})
_MAX_LENGTH = 256
# A code, a number or the name of a type, as opposed to a sentence.
_WORD = re.compile(r"-?\w[\w.]{0,79}")


class Wordless(SpanExporter):
    """Hands spans on to `inner`, without the words."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._inner.export([wordless(span) for span in spans])

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def wordless(done: ReadableSpan) -> ReadableSpan:
    """The same span, of which nothing is left that somebody wrote."""
    return ReadableSpan(
        name=done.name,
        context=done.get_span_context(),
        parent=done.parent,
        resource=done.resource,
        attributes=kept(done.attributes or {}),
        events=[Event(event.name, kept(event.attributes or {}), event.timestamp) for event in done.events],
        links=[Link(link.context, kept(link.attributes or {})) for link in done.links],
        kind=done.kind,
        instrumentation_scope=done.instrumentation_scope,
        status=Status(done.status.status_code, code_in(done.status.description)),
        start_time=done.start_time,
        end_time=done.end_time,
    )


def kept(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """What of a span's attributes may be told."""
    return {key: _short(key, value) for key, value in attributes.items() if _may_be_told(key)}


def code_in(description: str | None) -> str | None:
    """The code that a status description starts with, as `TimeoutError` in "TimeoutError: after 3 s"; or None."""
    code = (description or "").partition(":")[0].strip()
    return code if _WORD.fullmatch(code) else None


def _may_be_told(key: str) -> bool:
    if key.partition(".")[0] not in _NAMESPACES:
        return False
    return key not in _TEXTS and not key.startswith(_TEXT_PREFIXES)


def _short(key: str, value: AttributeValue) -> AttributeValue:
    if not isinstance(value, str):
        return value
    if key in _ADDRESSES:
        parts = urlsplit(value)
        value = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return value[:_MAX_LENGTH]
