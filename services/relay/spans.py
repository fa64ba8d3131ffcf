"""Traces of the bus: what is published there, and what is taken from it for readers.

Of the frames of an execution only the first ones are traced: they show how soon a reader sees that something happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from opentelemetry import trace
from opentelemetry.semconv._incubating.attributes.messaging_attributes import (
    MESSAGING_DESTINATION_TEMPLATE,
    MESSAGING_OPERATION_NAME,
    MESSAGING_OPERATION_TYPE,
    MESSAGING_SYSTEM,
)
from opentelemetry.trace import Span, SpanContext, SpanKind

from hearth.relay.v1 import relay_pb2
from services.chassis import telemetry
from services.relay.buffer import BUS, Key

# A traceparent has 55 characters; what is longer is none.
_MAX_TRACEPARENT = 64


@contextmanager
def publishing(batches: Sequence[relay_pb2.FrameBatch]) -> Iterator[None]:
    """The spans around the publishing of these batches; those with a trace carry the one of their publishing on."""
    traced = [batch for batch in batches if batch.traceparent]
    if not traced:
        yield
        return
    with ExitStack() as ends:
        for batch in traced:
            batch.traceparent = _begun(batch, ends) if len(batch.traceparent) <= _MAX_TRACEPARENT else ""
        yield


def _begun(batch: relay_pb2.FrameBatch, ends: ExitStack) -> str:
    attributes = {**_attributes("publish", "send"), "hearth.project": batch.session.project}
    span = telemetry.tracer().start_span(
        f"publish {BUS}",
        context=telemetry.extract(batch.traceparent),
        kind=SpanKind.PRODUCER,
        attributes={**attributes, "hearth.session": batch.session.session, "hearth.frames": len(batch.frames)},
    )
    ends.callback(span.end)
    with trace.use_span(span):
        return telemetry.inject()


@contextmanager
def processing(traceparent: str, key: Key, readers: Sequence[SpanContext], *, what: str, number: int) -> Iterator[Span]:
    """The span of taking a message from the bus. It belongs to the trace of who published it, and is linked to the
    calls of `readers`. `what` it brings is counted by `number`: a sequence, or frames."""
    attributes: dict[str, str | int] = {
        **_attributes("process", "process"),
        "hearth.project": key[0],
        "hearth.session": key[1],
        f"hearth.{what}": number,
    }
    with telemetry.span(
        f"process {BUS}", parent=traceparent, links=readers, kind=SpanKind.CONSUMER, attributes=attributes
    ) as span:
        yield span


def _attributes(name: str, kind: str) -> dict[str, str]:
    return {
        MESSAGING_SYSTEM: "redis",
        MESSAGING_OPERATION_NAME: name,
        MESSAGING_OPERATION_TYPE: kind,
        MESSAGING_DESTINATION_TEMPLATE: BUS,
    }
