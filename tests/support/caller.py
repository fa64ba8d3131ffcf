"""A backend with traces of its own: its spans lie in the store of the stack, as if it exported to the same place."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from hearth.client import Addresses, Client, session_key
from hearth.tls import Tls
from hearth.tracing.layout import Trace, lay_out
from hearth.tracing.store import NotFound, TraceStore
from services.chassis.span_file import SpanFile
from tests.support.cli import SERVICES, Hearth
from tests.support.waiting import eventually

SERVICE = "backend"


class Caller:
    """Sends messages, each within a span of its own."""

    def __init__(self, hearth: Hearth, client: Client, tracer: trace.Tracer) -> None:
        self._hearth = hearth
        self._client = client
        self._tracer = tracer
        self.store = TraceStore(hearth.root / "traces")

    async def send(self, session: str, text: str, project: str = "demo") -> str:
        """Send a message; the id of its execution."""
        with self._tracer.start_as_current_span("POST /chat", kind=trace.SpanKind.SERVER):
            answer = await self._client.send(session_key(project, session), text)
        return answer.started.execution.execution_id

    async def traced(self, execution: str, *names: str) -> Trace:
        """The trace of an execution, once its turn and spans of these names, each as often as it is given, have been
        written, and every parent."""
        found: list[Trace] = []

        def whole() -> bool:
            try:
                spans = self.store.find(execution)
            except NotFound:
                return False
            trace = lay_out(spans, self.store.linked(spans))
            found[:] = [trace]
            missing = Counter(("turn", *names)) - Counter(row.span.name for row in trace.rows)
            return not missing and not any(row.elsewhere for row in trace.rows)

        await eventually(whole, timeout=30)
        return found[0]


@contextlib.contextmanager
def tracing_to(path: Path) -> Iterator[trace.Tracer]:
    """A tracer whose spans go to this file."""
    resource = Resource.create({"service.name": SERVICE})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(path, max_bytes=1_000_000)))
    yield provider.get_tracer("test")
    provider.shutdown()


@contextlib.asynccontextmanager
async def calling(hearth: Hearth, *, token: str = "", tls: Tls | None = None) -> AsyncIterator[Caller]:
    """A caller of this stack."""
    with tracing_to(hearth.root / "traces" / f"{SERVICE}.jsonl") as tracer:
        where = hearth.addresses()
        async with Client(Addresses(**{name: where[name] for name in SERVICES}), token=token, tls=tls) as client:
            yield Caller(hearth, client, tracer)
