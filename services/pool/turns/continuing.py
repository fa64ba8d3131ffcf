"""What an agent is told of requests that people answered while it was not there, and what of that it may use again.

Pure. An agent that was closed while it asked does not wait for the answer any more: the turn that continues says in
words what was decided, and an agent that then asks for the very same call once more gets that decision, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from hearth.types.v1 import event_pb2
from services.pool.control.gates import input_digest
from services.pool.rows import Decision, Gate, GateKind, GateState

# What makes two requests the same: kind, name of the tool, words of the question, digest of the arguments.
Call = tuple[GateKind, str, str, bytes]


def words(decided: Iterable[Gate], uncertain: Iterable[Gate] = (), unanswered: Iterable[Gate] = ()) -> str:
    """One line for each request. `decided` are handed over by this; of `uncertain` ones the agent was told before, and
    what came of it is not known; `unanswered` ones were closed because nobody answered."""
    lines = [
        *(_uncertain(gate) for gate in uncertain),
        *(_decided(gate) for gate in decided),
        *(_unanswered(gate) for gate in unanswered),
    ]
    return "\n".join(lines)


def call_of(gate: Gate) -> Call:
    """What a request is about."""
    request = event_pb2.InteractionRequested.FromString(gate.request)
    return gate.kind, request.tool_name, request.prompt, gate.input_digest


def without_result(gates: Iterable[Gate], completed: Iterable[event_pb2.Event]) -> list[Gate]:
    """Those of these approvals that were passed on and of which no tool call tells what came of it. `completed` are the
    `tool.completed` of the executions that they were passed on in."""
    results = [event for event in completed if event.tool_completed.status != event_pb2.TOOL_STATUS_UNKNOWN]
    return [
        gate
        for gate in gates
        if gate.kind is GateKind.APPROVAL
        and gate.decision is Decision.ALLOWED
        and not any(_is_result(event, gate) for event in results)
    ]


def _is_result(event: event_pb2.Event, gate: Gate) -> bool:
    call = event.tool_completed
    if event.execution_id != gate.consumed_by:
        return False
    if gate.consumed_by == gate.execution_id:
        return call.tool_call_id == gate.tool_call_id
    # Passed on in words, the agent has made a call of its own of it.
    request = event_pb2.InteractionRequested.FromString(gate.request)
    return call.name == request.tool_name and input_digest(call.input_json) == gate.input_digest


class Decided:
    """Decisions about calls of an earlier turn. Each is used once, the oldest first; what is not the same is none."""

    def __init__(self, gates: Sequence[Gate] = ()) -> None:
        self._left: dict[Call, list[Gate]] = {}
        for gate in gates:
            # What an agent was told of before may have had its effect.
            if gate.state in {GateState.ANSWERED, GateState.CONSUMED}:
                self._left.setdefault(call_of(gate), []).append(gate)

    def use(self, call: Call) -> Gate | None:
        """The decision about this call, which is used up by that; None when there is none."""
        left = self._left.get(call)
        return left.pop(0) if left else None


def _decided(gate: Gate) -> str:
    request = event_pb2.InteractionRequested.FromString(gate.request)
    tool, arguments = _line(request.tool_name), request.input_json or "{}"
    match gate.kind:
        case GateKind.APPROVAL if gate.decision is Decision.ALLOWED:
            return f"The user approved {tool} with {arguments}; run it once."
        case GateKind.APPROVAL:
            return f"The user denied {tool}; do not retry it."
        case GateKind.QUESTION:
            return f"The user answered {_quoted(request.prompt)}: {gate.answer_json or 'null'}"
        case GateKind.CLIENT_TOOL:
            return f"The client ran {tool} with {arguments}, and its result is: {gate.answer_json or 'null'}"


def _uncertain(gate: Gate) -> str:
    request = event_pb2.InteractionRequested.FromString(gate.request)
    arguments = request.input_json or "{}"
    return f"{_line(request.tool_name)} with {arguments}: approved, result unknown; check before repeating."


def _unanswered(gate: Gate) -> str:
    request = event_pb2.InteractionRequested.FromString(gate.request)
    if gate.kind is GateKind.QUESTION:
        return f"Nobody answered {_quoted(request.prompt)} in time; go on without it."
    return f"Nobody answered whether {_line(request.tool_name)} may run; do not run it."


def _line(text: str) -> str:
    return " ".join(text.split())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
