"""The spans of what an agent is asked, and of the tools that it runs, by OpenTelemetry's conventions for agents.

A tool goes by its kind, which is a word of the protocol: its name and title are the agent's own, and may hold a whole
command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_AGENT_NAME,
    GEN_AI_CONVERSATION_ID,
    GEN_AI_OPERATION_NAME,
    GEN_AI_RESPONSE_FINISH_REASONS,
    GEN_AI_TOOL_CALL_ID,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
)
from opentelemetry.trace import Span, SpanKind

from hearth.types.v1 import content_pb2, event_pb2
from services.chassis import telemetry
from services.pool.harness.assembler import EventOut, FrameOut, Output
from services.pool.turns.verdicts import Answer

# The words that the protocol knows.
_KINDS = frozenset({"read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other"})
_STOP_REASONS = frozenset({"end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"})
_FAILED = {
    event_pb2.TOOL_STATUS_FAILED: "failed",
    event_pb2.TOOL_STATUS_CANCELLED: "cancelled",
    event_pb2.TOOL_STATUS_UNKNOWN: "unknown",
}
# Of one turn; what an agent runs beyond that is in its history.
_MAX_TOOLS = 200


@contextmanager
def asked(agent: str, conversation: str) -> Iterator[Span]:
    """The span around a prompt and its answer. `conversation` is the session."""
    attributes = {
        GEN_AI_OPERATION_NAME: "invoke_agent",
        GEN_AI_AGENT_NAME: agent,
        GEN_AI_CONVERSATION_ID: conversation,
    }
    with telemetry.span(f"invoke_agent {agent}", kind=SpanKind.CLIENT, attributes=attributes) as span:
        yield span


def answered(span: Span, answer: Answer, usage: content_pb2.Usage) -> None:
    """Say on the span of a prompt what came of it."""
    if answer.result is not None and answer.result.stop_reason in _STOP_REASONS:
        span.set_attribute(GEN_AI_RESPONSE_FINISH_REASONS, [answer.result.stop_reason])
    if usage.input_tokens or usage.output_tokens:
        span.set_attribute(GEN_AI_USAGE_INPUT_TOKENS, usage.input_tokens)
        span.set_attribute(GEN_AI_USAGE_OUTPUT_TOKENS, usage.output_tokens)
    if answer.code:
        telemetry.mark_failed(span, answer.code)


class ToolSpans:
    """Those of the tools of one prompt, from what is told of them to readers."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}
        self._count = 0

    def take(self, output: Output) -> None:
        """See a tool begin or end."""
        if isinstance(output, FrameOut):
            started = output.body.get("tool_started")
            if started is not None and output.entity_id not in self._open and self._count < _MAX_TOOLS:
                self._count += 1
                self._open[output.entity_id] = _started(output.entity_id, started.kind)
        elif isinstance(output, EventOut) and output.event.HasField("tool_completed"):
            _completed(self._open.pop(output.event.tool_completed.tool_call_id, None), output.event.tool_completed)

    def close(self) -> None:
        """What is still open ends with the turn."""
        for span in self._open.values():
            span.end()
        self._open.clear()


def _started(call: str, kind: str) -> Span:
    name = f"execute_tool {kind if kind in _KINDS else 'other'}"
    attributes = {GEN_AI_OPERATION_NAME: "execute_tool", GEN_AI_TOOL_CALL_ID: call}
    return telemetry.tracer().start_span(name, attributes=attributes)


def _completed(span: Span | None, tool: event_pb2.ToolCompleted) -> None:
    if span is None:
        return
    if tool.status in _FAILED:
        telemetry.mark_failed(span, _FAILED[tool.status])
    span.end()
