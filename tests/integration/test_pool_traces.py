"""From the trace of who stops or answers a turn, that of the turn is found."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from tests.support.gates import ALLOW, HOLDER, Rows, approval, new_key, rows_on

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows(module_postgres_dsn: str) -> AsyncIterator[Rows]:
    async with rows_on(module_postgres_dsn) as found:
        yield found


def links(span: trace.Span) -> list[tuple[str, str]]:
    assert isinstance(span, ReadableSpan)
    found = [link.context for link in span.links]
    return [(trace.format_trace_id(one.trace_id), trace.format_span_id(one.span_id)) for one in found]


@pytest.mark.parametrize(("traceparent", "found"), [(f"00-{TRACE}-{SPAN}-01", [(TRACE, SPAN)]), ("", [])])
async def test_an_answer_and_a_stop_name_the_trace_of_the_turn(
    rows: Rows, traceparent: str, found: list[tuple[str, str]]
) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    key = new_key()
    await rows.send(key, traceparent=traceparent)
    execution = (await rows.pick_up(key)).execution
    assert await rows.store.run(execution, HOLDER, "scripted", "session-1")
    gates = await rows.interactions.ask(execution, HOLDER, [approval("call")])
    assert gates is not None
    with tracer.start_as_current_span("answer") as span:
        await rows.answer(key, (gates[0], ALLOW))
    assert links(span) == found
    with tracer.start_as_current_span("stop") as span:
        await rows.stop(execution)
    assert links(span) == found
