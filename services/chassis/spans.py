"""The span of one RPC, at either end of it, named and described by OpenTelemetry's conventions for gRPC."""

from __future__ import annotations

import asyncio

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes.rpc_attributes import (
    RPC_METHOD,
    RPC_RESPONSE_STATUS_CODE,
    RPC_SYSTEM_NAME,
)
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

# After this, or as soon as its handler says that it has opened, a stream's span ends though the stream goes on. A
# reader stays for hours: its span would be exported long after its trace was looked at, or never if the process dies,
# and its children would be orphans until then. What the span of such a stream tells is how it opened; what happens on
# it later is told by the spans of that work.
STREAM_SPAN_SECONDS = 5.0

# Codes that mean that the server failed, not that it refused: only these are its errors.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


# To the caller every other code is one, but for the end that it made itself.
_NO_ERRORS = frozenset({grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})


class CallSpan:
    """A started span of a call to `method` ("/package.Service/Method"); `finish` ends it, once.

    `span` is what stands for it in a context.
    """

    def __init__(self, method: str, kind: SpanKind, *, stream: bool, parent: Context | None = None) -> None:
        name = method.lstrip("/")
        span = trace.get_tracer("hearth").start_span(
            name, context=parent, kind=kind, attributes={RPC_SYSTEM_NAME: "grpc", RPC_METHOD: name}
        )
        self._kind = kind
        self.span: trace.Span = _StreamSpan(span) if stream else span

    def finish(self, code: grpc.StatusCode) -> None:
        """End the span with the outcome of its call; a span that has ended stays as it is."""
        if not self.span.is_recording():
            return
        self.span.set_attribute(RPC_RESPONSE_STATUS_CODE, code.name)
        if code in _FAULTS if self._kind is SpanKind.SERVER else code not in _NO_ERRORS:
            self.span.set_attribute(ERROR_TYPE, code.name)
            self.span.set_status(Status(StatusCode.ERROR, code.name))
        self.span.end()


def stream_opened() -> None:
    """The stream that the running task serves has opened, which is what its span was to show."""
    current = trace.get_current_span()
    if isinstance(current, _StreamSpan):
        current.leave_open()


class _StreamSpan(trace.NonRecordingSpan):
    """Stands for the span of a stream for as long as the stream is open, and lets go of it when it ends: it takes as
    much memory as everything else that a quiet reader needs in Python."""

    def __init__(self, span: trace.Span) -> None:
        super().__init__(span.get_span_context())
        self._span: trace.Span | None = span
        loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = loop.call_later(STREAM_SPAN_SECONDS, self.leave_open)

    def is_recording(self) -> bool:
        return self._span is not None and self._span.is_recording()

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self._span is not None:
            self._span.set_attribute(key, value)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self._span is not None:
            self._span.set_status(status, description)

    def end(self, end_time: int | None = None) -> None:
        if self._span is None or self._timer is None:
            return
        self._timer.cancel()
        self._span.end(end_time)
        self._span = self._timer = None

    def leave_open(self) -> None:
        self.set_attribute("hearth.stream.open", True)
        self.end()
