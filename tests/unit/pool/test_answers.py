"""Which answers fit what was asked: by the kind of the request, and by a schema that may be anything."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime

import pytest

from hearth.types.v1 import event_pb2
from services.chassis.errors import InvalidArgument
from services.pool.control.answers import MAX_PLACES, check_answers, is_json, misfit, places
from services.pool.gate_rows import AnswerRow
from services.pool.rows import Decision, Gate, GateKind, GateState, Key

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = '{"type": "object", "properties": {"size": {"enum": ["s", "m"]}}, "required": ["size"]}'


def gate(name: str, kind: GateKind, schema: str = "") -> Gate:
    request = event_pb2.InteractionRequested(answer_schema_json=schema).SerializeToString()
    return Gate(
        name, Key("p", "s"), "e", "t", "r", kind, GateState.PENDING, request, b"", None, None, None, None, None,
        NOW, None, None, NOW,
    )  # fmt: skip


ASKED = {
    one.interaction_id: one
    for one in (
        gate("approval", GateKind.APPROVAL),
        gate("question", GateKind.QUESTION),
        gate("form", GateKind.QUESTION, SCHEMA),
        gate("tool", GateKind.CLIENT_TOOL),
    )
}


@pytest.mark.parametrize(
    "answer",
    [
        AnswerRow("approval", Decision.ALLOWED, None),
        AnswerRow("approval", Decision.DENIED, None),
        AnswerRow("question", None, '"blue"'),
        AnswerRow("form", None, '{"size": "m"}'),
        AnswerRow("tool", None, "null"),
        # That there is no such one is somebody else's business.
        AnswerRow("unknown", None, None),
    ],
)
def test_what_fits(answer: AnswerRow) -> None:
    check_answers([answer], ASKED)


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (AnswerRow("approval", None, None), "decision"),
        (AnswerRow("approval", None, "true"), "decision"),
        (AnswerRow("approval", Decision.ALLOWED, "true"), "answer_json"),
        (AnswerRow("question", Decision.ALLOWED, '"x"'), "decision"),
        (AnswerRow("question", None, None), "answer_json"),
        (AnswerRow("tool", Decision.DENIED, None), "decision"),
        (AnswerRow("form", None, '{"size": "secret"}'), "answer_json"),
        (AnswerRow("form", None, "[]"), "answer_json"),
    ],
)
def test_what_does_not_fit_is_named(answer: AnswerRow, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_answers([AnswerRow("tool", None, "1"), answer], ASKED)
    assert f"answers[1].{field}" in [name for name, _ in caught.value.field_violations]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "answer", "fits"),
    [
        ('{"type": "integer"}', "1", True),
        ('{"type": "integer"}', '"1"', False),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "type": "string"}', "1", False),
        ('{"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}', '{"a": "x"}', False),
        ("true", "1", True),
        ("false", "1", False),
        ('{"pattern": "^a+$"}', '"b"', False),
        ('{"type": "string"}', '"\\ud800"', False),
    ],
)
def test_a_schema_is_applied(schema: str, answer: str, fits: bool) -> None:
    assert (misfit(schema, answer) == "") is fits


@pytest.mark.parametrize(
    "schema",
    [
        "no json",
        "1",
        '{"type": "nothing that exists"}',
        '{"$ref": "http://127.0.0.1:9/schema.json"}',
        '{"$ref": "file:///etc/passwd"}',
        '{"$schema": "http://127.0.0.1:9/schema.json"}',
        '{"$ref": "#"}',
        '{"$ref": "#/$defs/missing"}',
        '{"items": {"$ref": "#"}}',
        '{"$dynamicRef": "#a"}',
        '{"pattern": "^(?=a)"}',
        json.dumps({"enum": ["x" * 70_000]}),
        "[" * 100_000,
    ],
)
def test_a_schema_that_cannot_be_checked_refuses_nothing(schema: str) -> None:
    assert misfit(schema, '{"a": 1}') == ""


def doubling(levels: int) -> object:
    """A small schema that is a large one when it is written out."""
    names = [f"d{level}" for level in range(levels)]
    definitions: dict[str, object] = {
        one: {"allOf": [{"$ref": f"#/$defs/{next_}"}] * 2} for one, next_ in itertools.pairwise(names)
    }
    return {"$defs": {**definitions, names[-1]: {"type": "integer"}}, "$ref": "#/$defs/d0"}


def test_a_schema_that_would_take_for_ever_is_not_tried() -> None:
    assert places(doubling(3)) <= MAX_PLACES
    assert misfit(json.dumps(doubling(3)), '"x"') != ""
    assert places(doubling(60)) > MAX_PLACES
    assert misfit(json.dumps(doubling(60)), '"x"') == ""
    # Many names for the same large part.
    deep: object = {"enum": list(range(500))}
    for _ in range(20):
        deep = {"not": deep}
    names = {f"a{n}": {"$ref": "#/$defs/deep" + "/not" * (n % 20)} for n in range(400)}
    assert places({"$defs": {"deep": deep}, "properties": names}) > MAX_PLACES
    # Too long for such a schema; and as long as it may be, with something wrong everywhere.
    bounds = json.dumps({"items": {"allOf": [{"minimum": number} for number in range(1, 50)]}})
    assert misfit(bounds, json.dumps([0] * 80_000)) == ""
    assert misfit(bounds, json.dumps([0] * 30_000)) == "at 0: minimum"
    assert misfit(json.dumps({"allOf": [{"pattern": f"a{number}"} for number in range(100)]}), '"x"') == ""
    assert misfit('{"pattern": "((a{1,100}){1,100}){1,100}"}', '"x"') == ""
    # An expression that tries every way to split a text.
    assert misfit('{"pattern": "^(a+)+$"}', json.dumps("a" * 200_000 + "!")) != ""


@pytest.mark.parametrize(
    ("text", "good"),
    [("{}", True), ("null", True), ('"a"', True), ("", False), ("NaN", False), ("{", False), ("a", False)],
)
def test_json(text: str, good: bool) -> None:
    assert is_json(text) is good
