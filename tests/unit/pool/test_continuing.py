"""What an agent is told of answers that it did not hear, and that each of them is used once, for the same call."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from hearth.types.v1 import event_pb2
from services.pool.control.gates import input_digest
from services.pool.rows import Decision, Gate, GateKind, GateState, Key, Resolution
from services.pool.turns.continuing import Decided, call_of, without_result, words

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def gate(name: str = "deploy", arguments: str = '{"to":"prod"}', **changes: Any) -> Gate:
    """An approval that was given and is passed on."""
    kind = changes.get("kind", GateKind.APPROVAL)
    request = event_pb2.InteractionRequested(
        tool_name="" if kind is GateKind.QUESTION else name,
        prompt=name if kind is GateKind.QUESTION else "",
        input_json=arguments,
    )
    made = Gate(
        interaction_id=f"id-{name}",
        key=Key("p", "s"),
        execution_id="asked",
        tool_call_id="call-1",
        request_key="box:0",
        kind=kind,
        state=GateState.CONSUMED,
        request=request.SerializeToString(),
        input_digest=input_digest(arguments),
        decision=Decision.ALLOWED if kind is GateKind.APPROVAL else None,
        answer_json=None if kind is GateKind.APPROVAL else '"blue"',
        answered_by="ada",
        resolution=Resolution.CONSUMED,
        consumed_by="told",
        created_at=NOW,
        answered_at=NOW,
        closed_at=NOW,
        expires_at=NOW,
    )
    return dataclasses.replace(made, **changes)


def completed(name: str, arguments: str, **changes: Any) -> event_pb2.Event:
    """A tool call that ended."""
    call = event_pb2.ToolCompleted(
        tool_call_id=changes.pop("tool_call_id", "call-9"),
        name=name,
        input_json=arguments,
        status=changes.pop("status", event_pb2.TOOL_STATUS_SUCCEEDED),
    )
    return event_pb2.Event(execution_id=changes.pop("execution_id", "told"), tool_completed=call)


def test_each_answer_has_its_sentence() -> None:
    told = words(
        [
            gate(),
            gate("remove\nall", decision=Decision.DENIED),
            gate('Which "one"?', kind=GateKind.QUESTION),
            gate("map", '{"a":1}', kind=GateKind.CLIENT_TOOL, answer_json="[1]"),
        ],
        uncertain=[gate("push", "{}")],
        unanswered=[gate("format", "{}"), gate("Why?", kind=GateKind.QUESTION)],
    )
    assert told.splitlines() == [
        "push with {}: approved, result unknown; check before repeating.",
        'The user approved deploy with {"to":"prod"}; run it once.',
        "The user denied remove all; do not retry it.",
        'The user answered "Which \\"one\\"?": "blue"',
        'The client ran map with {"a":1}, and its result is: [1]',
        "Nobody answered whether format may run; do not run it.",
        'Nobody answered "Why?" in time; go on without it.',
    ]
    assert words([]) == ""


def test_a_decision_is_for_the_same_call_and_used_up() -> None:
    first, second = gate(interaction_id="1"), gate(interaction_id="2", decision=Decision.DENIED)
    decided = Decided([first, second, gate("remove", "{}")])
    kind, tool, prompt, digest = call_of(first)
    for other in (
        (GateKind.QUESTION, tool, prompt, digest),
        (kind, "deploys", prompt, digest),
        (kind, tool, "?", digest),
        (kind, tool, prompt, input_digest('{"to":"test"}')),
    ):
        assert decided.use(other) is None
    # The same arguments, written otherwise.
    assert decided.use((kind, tool, prompt, input_digest('{ "to" : "prod" }'))) is first
    assert decided.use(call_of(first)) is second
    assert decided.use(call_of(first)) is None


def test_what_was_closed_decides_nothing() -> None:
    closed = gate(state=GateState.CLOSED, decision=None, resolution=Resolution.EXPIRED)
    assert Decided([closed]).use(call_of(closed)) is None


def test_what_was_told_in_words_has_a_result_when_the_same_call_ended() -> None:
    told = gate()
    assert without_result([told], []) == [told]
    assert without_result([told], [completed("deploy", '{ "to": "prod" }')]) == []
    assert without_result([told], [completed("deploy", "{}")]) == [told]
    assert without_result([told], [completed("deploy", '{"to":"prod"}', execution_id="other")]) == [told]
    unknown = completed("deploy", '{"to":"prod"}', status=event_pb2.TOOL_STATUS_UNKNOWN)
    assert without_result([told], [unknown]) == [told]


def test_what_the_live_agent_was_told_has_a_result_when_that_very_call_ended() -> None:
    live = gate(consumed_by="asked")
    same = completed("deploy", '{"to":"prod"}', execution_id="asked")
    assert without_result([live], [same]) == [live]
    assert without_result([live], [completed("x", "{}", execution_id="asked", tool_call_id="call-1")]) == []


def test_only_what_was_allowed_can_have_an_unknown_result() -> None:
    assert without_result([gate(decision=Decision.DENIED), gate("Which?", kind=GateKind.QUESTION)], []) == []
