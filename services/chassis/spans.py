"""The span of one RPC, at either end of it."""

from __future__ import annotations

import asyncio

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

# After this, or as soon as its handler says that it has opened, a stream's span ends though the stream goes on. A
# reader stays for hours: its span would be exported long after its trace was looked at, or never if the process dies,
# and its children would be orphans until then. What the span of such a stream tells is how it opened; what happens on
# it later is told by the spans of that work.
STREAM_SPAN_SECONDS = 5.0

# Codes that mean that the server failed, not that it refused.
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


class CallSpan:
    """A started span of a call to `method` ("/package.Service/Method"); `finish` ends it, once.

    `span` is what stands for it in a context.
    """

    def __init__(self, method: str, kind: SpanKind, *, stream: bool, parent: Context | None = None) -> None:
        service, _, name = method.lstrip("/").partition("/")
        span = trace.get_tracer("hearth").start_span(
            method,
            context=parent,
            kind=kind,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        )
        self.span: trace.Span = _StreamSpan(span) if stream else span

    def finish(self, code: grpc.StatusCode) -> None:
        """End the span with the outcome of its call; a span that has ended stays as it is."""
        if not self.span.is_recording():
            return
        self.span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code in _FAULTS:
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
        self.set_attribute("rpc.stream.open", True)
        self.end()
