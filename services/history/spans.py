"""Traces of a commit and of what is told of it, which work for many callers at once.

A commit for one trace is a span of that trace. One for several is a trace of its own, linked to them, and leaves a span
in each, so that a turn's trace shows when its events became durable. Streams are linked only: what goes through them
over hours belongs to many turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes.messaging_attributes import (
    MESSAGING_BATCH_MESSAGE_COUNT,
    MESSAGING_DESTINATION_TEMPLATE,
    MESSAGING_OPERATION_NAME,
    MESSAGING_OPERATION_TYPE,
    MESSAGING_SYSTEM,
)
from opentelemetry.trace import Link, Span, SpanKind

from services.chassis import telemetry
from services.history.work import Work

# What the channels of all sessions begin with.
_BUS = "hearth:live"
# Bounds of what one commit tells: a group can hold a thousand callers.
_MAX_SPANS = 16
_MAX_LINKS = 32


class CommitSpan:
    """The spans of one commit; `traceparent` says which of them a set's notice continues."""

    def __init__(self, own: str, others: Mapping[str, str]) -> None:
        self._own = own
        self._others = others

    def traceparent(self, work: Work) -> str:
        """Traceparent of the span that stands for `work`."""
        return self._others.get(work.traceparent, self._own)


@contextmanager
def committing(works: Sequence[Work]) -> Iterator[CommitSpan]:
    """The spans around the commit of `works`."""
    turns = list(dict.fromkeys(work.traceparent for work in works if work.traceparent))
    calls = list(dict.fromkeys(work.order.traceparent for work in works if work.order.traceparent))
    alone = turns[0] if len(turns) == 1 else None
    links = [found for found in [*turns, *calls] if found != alone][:_MAX_LINKS]
    attributes = {
        "hearth.sessions": len({work.key for work in works}),
        "hearth.events": sum(len(work.records) for work in works),
    }
    with telemetry.span("history.commit", parent=alone or Context(), links=links, attributes=attributes) as span:
        own = telemetry.inject()
        others = {} if alone else {turn: _within(turn, span) for turn in turns[:_MAX_SPANS]}
        try:
            yield CommitSpan(own, {turn: _traceparent(part) for turn, part in others.items()})
        finally:
            for part in others.values():
                part.end()


@contextmanager
def sending(commits: Sequence[str]) -> Iterator[None]:
    """The span around a batch of notices, which tell of `commits` (traceparents): below its commit where there is one,
    linked to them where there are several."""
    told = list(dict.fromkeys(found for found in commits if found))
    alone = told[0] if len(told) == 1 else None
    attributes: dict[str, str | int] = {
        MESSAGING_SYSTEM: "redis",
        MESSAGING_OPERATION_NAME: "publish",
        MESSAGING_OPERATION_TYPE: "send",
        MESSAGING_DESTINATION_TEMPLATE: _BUS,
        MESSAGING_BATCH_MESSAGE_COUNT: len(commits),
    }
    with telemetry.span(
        f"publish {_BUS}",
        parent=alone or Context(),
        links=[] if alone else told[:_MAX_LINKS],
        kind=SpanKind.PRODUCER,
        attributes=attributes,
    ):
        yield


def _within(turn: str, commit: Span) -> Span:
    links = [Link(commit.get_span_context())]
    return telemetry.tracer().start_span("history.append", context=telemetry.extract(turn), links=links)


def _traceparent(span: Span) -> str:
    with trace.use_span(span):
        return telemetry.inject()
