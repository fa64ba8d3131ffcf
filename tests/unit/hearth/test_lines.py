"""What somebody types into a chat does what they mean, and what is not understood does nothing."""

from __future__ import annotations

import pytest

from hearth.cli.lines import Answer, Change, Do, Send, Wrong, answer_json, meaning
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2

SCHEMA = '{"type": "object"}'


def asks(
    interaction_id: str,
    kind: event_pb2.InteractionKind.ValueType = event_pb2.INTERACTION_KIND_APPROVAL,
    schema: str = "",
) -> event_pb2.InteractionRequested:
    return event_pb2.InteractionRequested(interaction_id=interaction_id, kind=kind, answer_schema_json=schema)


def question(interaction_id: str, schema: str = "") -> event_pb2.InteractionRequested:
    return asks(interaction_id, event_pb2.INTERACTION_KIND_QUESTION, schema)


def decisions(line: str, *asked: event_pb2.InteractionRequested) -> list[tuple[str, bool]]:
    action = meaning(line, asked)
    assert isinstance(action, Answer), action
    return [(answer.interaction_id, answer.decision == event_pb2.DECISION_ALLOWED) for answer in action.answers]


def spoken(line: str, *asked: event_pb2.InteractionRequested) -> tuple[str, str]:
    action = meaning(line, asked)
    assert isinstance(action, Answer), action
    (answer,) = action.answers
    assert answer.decision == event_pb2.DECISION_UNSPECIFIED
    return answer.interaction_id, answer.answer_json


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("hello", Send("hello")),
        ("yes", Send("yes")),
        ("//compact", Send("/compact")),
        ("/steer do this", Send("do this", steer=True)),
        ("/stop", Do("stop")),
        ("/queue", Do("queue")),
        ("/quit", Do("quit")),
        ("/remove 2", Change("remove", 2)),
        ("/now 1", Change("now", 1)),
        ("/edit 3 say it better", Change("edit", 3, "say it better")),
    ],
)
def test_a_line_says_what_to_do(line: str, action: object) -> None:
    assert meaning(line, []) == action


@pytest.mark.parametrize(
    "line",
    [
        "/steer",
        "/stop it",
        "/remove",
        "/remove x",
        "/remove 1 2",
        "/edit 1",
        "/now",
        "/sotp",
        "/",
        "/allow",
        "/answer x",
    ],
)
def test_what_is_not_understood_does_nothing(line: str) -> None:
    assert isinstance(meaning(line, []), Wrong)


def test_permissions_are_given_by_number_or_all_at_once() -> None:
    three = (asks("a"), asks("b"), asks("c"))
    assert decisions("y", *three) == [("a", True)]
    assert decisions("n", *three) == [("a", False)]
    assert decisions("YES 2", *three) == [("b", True)]
    assert decisions("no all", *three) == [("a", False), ("b", False), ("c", False)]
    assert decisions("/allow 3", *three) == [("c", True)]
    assert decisions("/deny", *three) == [("a", False)]


def test_words_that_begin_like_an_answer_are_a_message() -> None:
    assert meaning("yes please go on", [asks("a")]) == Send("yes please go on")
    assert meaning("no 4", [asks("a")]) == Send("no 4")
    assert meaning("y 0", [asks("a")]) == Send("y 0")
    assert isinstance(meaning("/allow 4", [asks("a")]), Wrong)


def test_a_question_takes_the_next_line_as_its_answer() -> None:
    assert spoken("blue", question("q")) == ("q", '"blue"')
    assert spoken("y", question("q"), asks("a")) == ("q", '"y"')
    assert spoken("/answer blue", asks("a"), question("q")) == ("q", '"blue"')
    # A permission is not given by answering a question, and the other way round.
    assert decisions("/allow", question("q"), asks("a")) == [("a", True)]
    assert isinstance(meaning("/allow 1", [question("q"), asks("a")]), Wrong)
    assert isinstance(meaning("/answer blue", [asks("a")]), Wrong)
    assert decisions("/allow all", question("q"), asks("a"), asks("b")) == [("a", True), ("b", True)]
    assert meaning("/steer something else", [question("q")]) == Send("something else", steer=True)


def test_typed_answers_are_json() -> None:
    free, shaped = question("q"), question("q", SCHEMA)
    tool = asks("t", event_pb2.INTERACTION_KIND_CLIENT_TOOL)
    assert answer_json("42", free) == '"42"'
    assert answer_json('"blue"', free) == '"blue"'
    assert answer_json("it's ü", free) == '"it\'s ü"'
    assert answer_json('{"a": 1}', shaped) == '{"a": 1}'
    assert answer_json("42", tool) == "42"
    assert answer_json("not json", tool) == '"not json"'


def test_answers_name_what_they_answer() -> None:
    action = meaning("y", [asks("a")])
    assert action == Answer((control_pb2.InteractionAnswer(interaction_id="a", decision=event_pb2.DECISION_ALLOWED),))
