"""The file store of traces: one JSON object a line, a file for each service and at most one older one beside it.

What is written is described by `services.chassis.span_file`. A line that is not whole, or not yet, is passed over;
lines are parsed only where they are asked for, as the files of a busy stack are large.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The span of a whole turn, and the attribute that says which execution it ran.
TURN = "turn"
EXECUTION = "hearth.execution"
LATEST = "latest"
# What an abbreviated id must have.
_SHORTEST = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One finished span. Times are nanoseconds since 1970; `parent_id` is empty for the root of a trace; `links` are
    (trace id, span id) of other spans that it belongs to; `error` is empty, or the code of what went wrong."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    start_ns: int
    end_ns: int
    error: str
    attributes: Mapping[str, Any]
    links: Sequence[tuple[str, str]]

    @property
    def execution(self) -> str:
        """The execution that it ran, where it is the span of a turn."""
        return str(self.attributes.get(EXECUTION, "")) if self.name == TURN else ""

    @property
    def nanoseconds(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Span:
        """The span that a line tells of."""
        failed = line["status"] == "ERROR"
        return cls(
            trace_id=line["trace_id"],
            span_id=line["span_id"],
            parent_id=line["parent_id"] or "",
            name=line["name"],
            kind=line["kind"],
            service=(line.get("service") or "unknown").removeprefix("hearth-"),
            start_ns=line["start_ns"],
            end_ns=line["end_ns"],
            error=(line.get("status_message") or "error") if failed else "",
            attributes=line["attributes"],
            links=[(link["trace_id"], link["span_id"]) for link in line["links"]],
        )


class NotFound(Exception):
    """There is no such trace, or there are several; the text says which."""


class TraceStore:
    """The traces below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, wanted: str) -> list[Span]:
        """The spans of one trace: that of an execution, by its id or the beginning of it; of a trace id; or of the
        turn that began last (`latest`). Raises `NotFound`."""
        trace_id = self._latest() if wanted == LATEST else self._named(wanted.lower())
        return self.spans([trace_id])

    def spans(self, trace_ids: Iterable[str]) -> list[Span]:
        """All spans of these traces that have been written, in the order in which they began."""
        found = {
            span.span_id: span for trace_id in trace_ids for span in self._having(trace_id) if span.trace_id == trace_id
        }
        return sorted(found.values(), key=lambda span: (span.start_ns, -span.end_ns, span.span_id))

    def all(self) -> Iterator[Span]:
        """Every span that has been written, of whatever trace."""
        return self._having("")

    def linked(self, spans: Iterable[Span]) -> dict[str, Span]:
        """The spans of other traces that these ones are linked to, by id, as far as they are here."""
        wanted = {link for span in spans for link in span.links}
        found = {}
        for trace_id in {trace_id for trace_id, _ in wanted}:
            for span in self._having(trace_id):
                if (span.trace_id, span.span_id) in wanted:
                    found[span.span_id] = span
        return found

    def _latest(self) -> str:
        turns = [span for span in self._having(f'"name": "{TURN}"') if span.name == TURN]
        if not turns:
            raise NotFound(f"no turn has been traced in {self._directory}")
        return max(turns, key=lambda span: span.start_ns).trace_id

    def _named(self, wanted: str) -> str:
        if len(wanted) < _SHORTEST:
            raise NotFound(f"{wanted!r} is too short: give at least {_SHORTEST} characters of an id, or `{LATEST}`")
        matching = [span for span in self._having(wanted) if _is_meant(span, wanted)]
        # A turn, before calls that only speak of its execution.
        traces = {span.trace_id for span in matching if span.name == TURN} or {span.trace_id for span in matching}
        if not traces:
            raise NotFound(f"no execution or trace with the id {wanted} in {self._directory}")
        if len(traces) > 1:
            raise NotFound(f"{len(traces)} traces have an id that begins with {wanted}")
        return traces.pop()

    def _having(self, text: str) -> Iterator[Span]:
        for path in sorted(self._directory.glob("*.jsonl*")):
            with path.open("rb") as file:
                for line in file:
                    if text.encode() in line and (span := _read(line)) is not None:
                        yield span


def _read(line: bytes) -> Span | None:
    """The span of a line; None of one that is not whole: it is still being written, or its writer was ended in it."""
    if not line.endswith(b"}\n"):
        return None
    try:
        return Span.of(json.loads(line))
    except (ValueError, KeyError):
        return None


def _is_meant(span: Span, wanted: str) -> bool:
    return span.trace_id.startswith(wanted) or str(span.attributes.get(EXECUTION, "")).startswith(wanted)
