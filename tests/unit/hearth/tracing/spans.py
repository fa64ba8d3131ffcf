"""Spans for these tests, in few words."""

from __future__ import annotations

from hearth.tracing.store import Span

TRACE = "0af7651916cd43dd8448eb211c80319c"
MILLISECOND = 1_000_000


def span(
    span_id: str,
    parent_id: str = "",
    *,
    at: float = 0,
    took: float = 1,
    name: str = "work",
    service: str = "pool",
    error: str = "",
    attributes: dict[str, object] | None = None,
    links: list[tuple[str, str]] | None = None,
    trace_id: str = TRACE,
) -> Span:
    """A span that begins `at` and takes `took` milliseconds."""
    start = round(1_764_453_600_000_000_000 + at * MILLISECOND)
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        kind="INTERNAL",
        service=service,
        start_ns=start,
        end_ns=start + round(took * MILLISECOND),
        error=error,
        attributes=attributes or {},
        links=links or [],
    )
