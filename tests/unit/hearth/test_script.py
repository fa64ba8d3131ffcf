"""The lines of a prompt become the steps that they say."""

from __future__ import annotations

import pytest

from hearth.agents.scripted.script import (
    AskTogether,
    Crash,
    Extension,
    Fail,
    Flood,
    LeaveChild,
    Plain,
    ReadFile,
    Run,
    Say,
    Sleep,
    Step,
    Stream,
    Think,
    Told,
    ToolUse,
    WriteFile,
    facts_in,
    parse,
    reply,
)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("stream 20 words at 2.5/s", Stream(20, 2.5)),
        ("stream 1 word", Stream(1, 0)),
        ("think 3", Think(3)),
        ('tool rm {"path": "a b"}', ToolUse("rm", {"path": "a b"})),
        ("tool rm", ToolUse("rm", {})),
        ("ask rm {}", ToolUse("rm", {}, ask=True)),
        ("parallel ask rm", AskTogether((ToolUse("rm", {}, ask=True),))),
        ("run echo hi | cat", Run("echo hi | cat")),
        ("leave-child 30", LeaveChild(30)),
        ("sleep 0.5", Sleep(0.5)),
        ("flood 10 2000", Flood(10, 2000)),
        ("line 600000", Flood(1, 600_000)),
        ("fs-write a.txt some text", WriteFile("a.txt", "some text")),
        ("fs-write a.txt", WriteFile("a.txt", "")),
        ("read a.txt", ReadFile("a.txt")),
        ('hearth-ask {"prompt": "?"}', Extension("_hearth/ask", {"prompt": "?"})),
        ("hearth-client-tool", Extension("_hearth/client_tool", {})),
        ("error all is lost", Fail("all is lost")),
        ("crash 3", Crash(3)),
        ("crash-silent", Crash(None)),
        ("  hang-hard  ", Plain("hang-hard")),
    ],
)
def test_a_directive_is_a_step(line: str, step: Step) -> None:
    assert parse(line) == [step]


@pytest.mark.parametrize(
    "line", ["stream many words", "tool rm {broken", "tool rm [1]", "plan it", "crash", "Sleep 1", "sleep -1", "hangs"]
)
def test_a_line_that_only_looks_like_one_is_talk(line: str) -> None:
    assert parse(line) == [Say(line)]


def test_talk_is_joined_and_order_kept() -> None:
    assert parse("one\n\ntwo\nplan\nthree") == [Say("one\ntwo"), Plain("plan"), Say("three")]


def test_neighbouring_questions_are_asked_together() -> None:
    a, b, c = (ToolUse(name, {}, ask=True) for name in "abc")
    assert parse("parallel ask a\nparallel ask b\nask c\nparallel ask a") == [
        AskTogether((a, b)),
        c,
        AskTogether((a,)),
    ]


def test_everything_parallel_is_begun_together() -> None:
    text = 'parallel run ls\nparallel hearth-ask {"prompt": "?"}\nparallel hearth-client-tool {"name": "map"}'
    assert parse(text) == [
        AskTogether(
            (
                Run("ls"),
                Extension("_hearth/ask", {"prompt": "?"}),
                Extension("_hearth/client_tool", {"name": "map"}),
            )
        )
    ]


def test_what_was_approved_meanwhile_is_asked_for_again() -> None:
    approved = "The user approved {} with {}; run it once."
    text = "\n".join(
        [
            approved.format("rm", '{"path":"a; run it once."}'),
            approved.format("cp", '{"asks":2}'),
            approved.format("mv", '{"instead":{"to":"b"}}'),
            "The user denied ls; do not retry it.",
            'The user answered "Which?": "blue"',
        ]
    )
    twice = ToolUse("cp", {"asks": 2}, ask=True)
    assert parse(text) == [
        AskTogether(
            (
                ToolUse("rm", {"path": "a; run it once."}, ask=True),
                twice,
                twice,
                ToolUse("mv", {"to": "b"}, ask=True),
            )
        ),
        Told("The user denied ls; do not retry it."),
        Told('The user answered "Which?": "blue"'),
    ]


def test_what_is_remembered_is_answered() -> None:
    assert facts_in("Please remember that my Name is Ada.\nremember my dog is Rex") == {"name": "Ada", "dog": "Rex"}
    facts = {"name": "Ada"}
    assert reply("What is my name? what's my dog?", facts, "me") == "Your name is Ada. I do not know your dog."
    assert reply("Who are you?", facts, "me") == "me"
    assert reply("good morning", facts, "me") == "You said: good morning"
