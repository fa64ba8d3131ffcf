"""A trace laid out for drawing: each span in a row below its parent, with its place on the common line of time. Pure.

Whoever draws sees no difference between a terminal and a page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from hearth.tracing.store import Span


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One span in its place. `begins` and `takes` are parts of the whole trace, from 0 to 1; `children` counts the rows
    directly below it. `elsewhere`: its parent is a span that is not in the store, as that of a caller."""

    span: Span
    depth: int
    begins: float
    takes: float
    children: int
    elsewhere: bool
    began_ns: int

    @property
    def after_ns(self) -> int:
        """How long after the beginning of the trace it began, in nanoseconds."""
        return self.span.start_ns - self.began_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One trace. `linked` are spans of other traces that its spans are linked to, by span id."""

    trace_id: str
    rows: Sequence[Row]
    linked: Mapping[str, Span]

    @property
    def began_ns(self) -> int:
        """When it began, in nanoseconds since 1970."""
        return self.rows[0].began_ns

    @property
    def nanoseconds(self) -> int:
        """From its first beginning to its last end."""
        return max(row.span.end_ns for row in self.rows) - self.began_ns

    @property
    def services(self) -> list[str]:
        """Who took part, in order of appearance."""
        return list(dict.fromkeys(row.span.service for row in self.rows))

    @property
    def executions(self) -> list[str]:
        """The executions that it ran, in order."""
        return list(dict.fromkeys(row.span.execution for row in self.rows if row.span.execution))

    @property
    def errors(self) -> int:
        """How many of its spans failed."""
        return sum(bool(row.span.error) for row in self.rows)


def lay_out(spans: Sequence[Span], linked: Mapping[str, Span] | None = None) -> Trace:
    """The rows of one trace, which has at least one span. Every span gets one row: children come below their parents in
    the order in which they began, and a span without a parent here is a root."""
    by_id = {span.span_id: span for span in spans}
    began = min(span.start_ns for span in spans)
    whole = max(max(span.end_ns for span in spans) - began, 1)
    below: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)):
        below.setdefault(span.parent_id if span.parent_id in by_id else "", []).append(span)
    rows = []
    # No recursion: chains of spans may be longer than Python's stack.
    waiting = [(span, 0) for span in reversed(below.get("", []))]
    while waiting:
        span, depth = waiting.pop()
        children = below.get(span.span_id, [])
        rows.append(
            Row(
                span,
                depth,
                begins=(span.start_ns - began) / whole,
                takes=span.nanoseconds / whole,
                children=len(children),
                elsewhere=bool(span.parent_id) and span.parent_id not in by_id,
                began_ns=began,
            )
        )
        waiting += [(child, depth + 1) for child in reversed(children)]
    return Trace(spans[0].trace_id, rows, dict(linked or {}))


def duration(nanoseconds: int) -> str:
    """A length of time with the digits that tell something: `850 µs`, `12.4 ms`, `3.25 s`, `2 min 5 s`."""
    if nanoseconds < 999_500:
        return f"{nanoseconds / 1e3:.0f} µs"
    if nanoseconds < 999_500_000:
        milliseconds = nanoseconds / 1e6
        return f"{milliseconds:.1f} ms" if milliseconds < 99.95 else f"{milliseconds:.0f} ms"
    seconds = nanoseconds / 1e9
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def ticks(nanoseconds: int, most: int = 8) -> Iterable[int]:
    """Round times from 0 to the end of a trace, at most so many and one, for the line above the bars."""
    step = 1
    while nanoseconds > step * most:
        for factor in (2, 5, 10):
            if nanoseconds <= step * factor * most:
                step *= factor
                break
        else:
            step *= 10
    return range(0, nanoseconds + 1, step)
