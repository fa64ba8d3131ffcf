"""The span of one RPC, at either end of it."""

from __future__ import annotations

import asyncio

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

# After this a stream's span ends though the stream goes on. A reader stays for hours: its span would be exported long
# after its trace was looked at, or never if the process dies, and its children would be orphans until then. What the
# span of such a stream tells is how it opened; what happens on it later is told by the spans of that work.
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
    """A started span of a call to `method` ("/package.Service/Method"); `finish` ends it, once."""

    def __init__(self, method: str, kind: SpanKind, *, stream: bool, parent: Context | None = None) -> None:
        service, _, name = method.lstrip("/").partition("/")
        self.span = trace.get_tracer("hearth").start_span(
            method,
            context=parent,
            kind=kind,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        )
        self._timer = asyncio.get_running_loop().call_later(STREAM_SPAN_SECONDS, self._leave_open) if stream else None

    def finish(self, code: grpc.StatusCode) -> None:
        """End the span with the outcome of its call; a span that has ended stays as it is."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.span.is_recording():
            return
        self.span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code in _FAULTS:
            self.span.set_status(Status(StatusCode.ERROR, code.name))
        self.span.end()

    def _leave_open(self) -> None:
        self.span.set_attribute("rpc.stream.open", True)
        self.span.end()
