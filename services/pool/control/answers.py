"""Whether an answer fits what was asked: a decision for an approval, JSON for anything else, by the schema that came
with the question.

The schema comes from an agent, so it may be anything. One that could keep this process busy, or that this cannot read,
is shown to people all the same, and then only the agent can refuse an answer for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import jsonschema_rs

from hearth.types.v1 import event_pb2
from services.chassis.fields import Violations
from services.pool.gate_rows import AnswerRow
from services.pool.rows import Gate, GateKind

MAX_SCHEMA_BYTES = 64 * 1024
# How many places a schema may have when every reference in it is written out.
MAX_PLACES = 1_000
_MOST_SEEN = 10 * MAX_PLACES
# Places of the schema times characters of the answer.
MAX_WORK = 10_000_000
# A regular expression, as it is compiled, and how many places one counts for.
_PATTERN_BYTES = 256 * 1024
_PATTERN_PLACES = 25
# References that are resolved while an answer is checked: how many places they come to cannot be counted.
_DYNAMIC = frozenset({"$dynamicRef", "$recursiveRef"})


def check_answers(answers: Sequence[AnswerRow], asked: Mapping[str, Gate]) -> None:
    """Refuse answers that do not fit, each by the name of its field; those to nothing that is known are passed over.

    What is told of a value that does not fit is where it stands and by which keyword, never the value.
    """
    checks = Violations()
    for index, answer in enumerate(answers):
        gate = asked.get(answer.interaction_id)
        if gate is not None:
            _check(checks, f"answers[{index}]", answer, gate)
    checks.raise_if_any()


def is_json(text: str) -> bool:
    """Whether a text is JSON, by the letter of its standard."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_constant(name: str) -> object:
    """For `json.loads`: NaN and the infinities are not JSON."""
    raise ValueError(f"{name} is not JSON")


def misfit(schema_json: str, answer_json: str) -> str:
    """Where an answer does not fit a schema, in words; empty where it fits, or that cannot be checked."""
    validator = _validator(schema_json, len(answer_json))
    if validator is None:
        return ""
    try:
        # It stops at the first that it finds: of a long answer there could be millions.
        validator.validate(json.loads(answer_json))
    except jsonschema_rs.ValidationError as error:
        place = "/".join(map(str, error.instance_path)) or "its top"
        keyword = next((part for part in reversed(error.schema_path) if isinstance(part, str)), "schema")
        return f"at {place}: {keyword}"
    except (ValueError, RecursionError):
        return "nor anything: it is nested too deep, or holds half a character"
    return ""


def places(schema: object) -> int:
    """How many places a schema has with every reference written out; more than MAX_PLACES for one that never ends, or
    whose references cannot be followed."""
    return _Places(schema).count(schema)


def _check(checks: Violations, path: str, answer: AnswerRow, gate: Gate) -> None:
    if gate.kind is GateKind.APPROVAL:
        if answer.decision is None:
            checks.add(f"{path}.decision", "must be DECISION_ALLOWED or DECISION_DENIED: an approval was asked for")
        if answer.answer_json is not None:
            checks.add(f"{path}.answer_json", "must be empty: an approval was asked for")
        return
    if answer.decision is not None:
        checks.add(f"{path}.decision", "must not be set: no approval was asked for")
    if answer.answer_json is None:
        checks.add(f"{path}.answer_json", "must be JSON: an answer was asked for")
        return
    schema = event_pb2.InteractionRequested.FromString(gate.request).answer_schema_json
    wrong = misfit(schema, answer.answer_json) if schema else ""
    if wrong:
        checks.add(f"{path}.answer_json", f"does not fit the schema of the answer, {wrong}")


def _validator(schema_json: str, answer_length: int) -> jsonschema_rs.Validator | None:
    if len(schema_json.encode()) > MAX_SCHEMA_BYTES:
        return None
    try:
        schema = json.loads(schema_json, parse_constant=refuse_constant)
        if not isinstance(schema, dict | bool):
            return None
        found = places(schema)
        if found > MAX_PLACES or found * answer_length > MAX_WORK:
            return None
        # Expressions of this engine take time by the length of the text only; and nothing is fetched from anywhere.
        patterns = jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES)
        return jsonschema_rs.validator_for(schema, pattern_options=patterns, offline=True, mask="a value")
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError):
        return None


class _Places:
    def __init__(self, root: object) -> None:
        self._root = root
        # Places that were looked at: what is behind a reference is looked at once more for each name that it has.
        self._seen = 0
        # By reference: None while it is being counted.
        self._known: dict[str, int | None] = {}

    def count(self, found: object) -> int:
        total = 1
        self._seen += 1
        if self._seen > _MOST_SEEN:
            return MAX_PLACES + 1
        if isinstance(found, list):
            for one in found:
                total += self.count(one)
        elif isinstance(found, dict):
            for name, value in found.items():
                total += self._reference(name, value) + self.count(value)
                if name == "pattern":
                    total += _PATTERN_PLACES
                elif name == "patternProperties" and isinstance(value, dict):
                    total += _PATTERN_PLACES * len(value)
        return min(total, MAX_PLACES + 1)

    def _reference(self, name: str, value: object) -> int:
        if name in _DYNAMIC:
            return MAX_PLACES + 1
        if name != "$ref" or not isinstance(value, str):
            return 0
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._target(value)
        known = self._known[value]
        return MAX_PLACES + 1 if known is None else known

    def _target(self, reference: str) -> int:
        found: object = self._root
        if reference != "#" and not reference.startswith("#/"):
            return MAX_PLACES + 1
        for part in reference[2:].split("/") if reference != "#" else []:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return MAX_PLACES + 1
            found = found[name]
        return self.count(found)
