"""Edits as differences of lines: right in every form, small where little changed, and never much work."""

from __future__ import annotations

import difflib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pool.harness import differences
from services.pool.harness.differences import MAX_CHARACTERS, MAX_STEPS, difference
from services.pool.harness.port import ToolUpdate
from services.pool.harness.updates import read_update

HEAD = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def applied(found: str, before: list[str]) -> list[str]:
    """The lines after an edit, from those before it and the difference, which must fit to them."""
    after: list[str] = []
    at = 0
    for line in found.splitlines()[2:]:
        head = HEAD.fullmatch(line)
        if head is not None:
            start = int(head[1]) - (head[2] != "0")
            after += before[at:start]
            at = start
            assert len(after) == int(head[3]) - (head[4] != "0")
            continue
        if line[0] in " -":
            assert before[at] == line[1:]
            at += 1
        if line[0] in " +":
            after.append(line[1:])
    return after + before[at:]


def hostile() -> tuple[str, str]:
    """Texts just within the limit, of short lines that repeat in another order."""
    count = 16_000
    return (
        "\n".join(chr(256 + (line * 7) % 120) for line in range(count)),
        "\n".join(chr(256 + (line * 11) % 120) for line in range(count)),
    )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines were searched for what they have in common, for each search."""
    lines: list[int] = []

    class Matcher(difflib.SequenceMatcher[str]):
        def __init__(self, junk: None, old: list[str], new: list[str]) -> None:
            lines.append(len(old) + len(new))
            super().__init__(junk, old, new)

    monkeypatch.setattr(differences.difflib, "SequenceMatcher", Matcher)  # type: ignore[attr-defined]
    return lines


def test_an_edit_shows_the_lines_around_it() -> None:
    before = [f"line {number}" for number in range(1, 21)]
    after = [*before[:9], "other", *before[10:]]
    assert difference("a.py", "\n".join(before), "\n".join(after)).splitlines() == [
        "--- a.py",
        "+++ a.py",
        "@@ -7,7 +7,7 @@",
        *(f" line {number}" for number in (7, 8, 9)),
        "-line 10",
        "+other",
        *(f" line {number}" for number in (11, 12, 13)),
    ]


def test_what_is_new_what_is_gone_and_what_is_the_same() -> None:
    assert difference("a", "", "x\ny\n") == "--- a\n+++ a\n@@ -0,0 +1,2 @@\n+x\n+y"
    assert difference("a", "x\n", "") == "--- a\n+++ a\n@@ -1 +0,0 @@\n-x"
    assert difference("a", "x\n", "x") == difference("a", "", "") == ""


def test_edits_in_a_large_file_are_shown_with_their_surroundings() -> None:
    before = [f"{'' if number % 4 else f'value_{number} = {number}'}" for number in range(4_000)]
    after = [*before[:2_000], "inserted", *before[2_000:2_020], "changed", *before[2_021:]]
    found = difference("a.py", "\n".join(before), "\n".join(after))
    assert len(found.splitlines()) < 24
    assert [line for line in found.splitlines()[2:] if line[0] in "+-"] == [
        "+inserted",
        "-value_2020 = 2020",
        "+changed",
    ]
    assert applied(found, before) == after


def test_lines_that_repeat_in_a_large_edit_are_not_searched(compared: list[int]) -> None:
    before, after = hostile()
    assert MAX_CHARACTERS * 0.9 < len(before) + len(after) <= MAX_CHARACTERS
    found = difference("a.py", before, after)
    assert compared == []
    # The first line is the same in both.
    assert found.splitlines()[2:5] == ["@@ -1,16000 +1,16000 @@", " Ā", "-ć"]
    assert applied(found, before.splitlines()) == after.splitlines()


def test_many_edits_in_one_message_are_searched_no_longer_than_one(compared: list[int]) -> None:
    before = "\n".join(f"old {number}" if number % 5 else "" for number in range(60))
    after = before.replace("old", "new")
    part = {"type": "diff", "path": "a", "oldText": before, "newText": after}
    for count, searches in ((1, 1), (500, 0)):
        compared.clear()
        found = read_update({"sessionUpdate": "tool_call_update", "toolCallId": "c", "content": [part] * count})
        assert isinstance(found, ToolUpdate)
        assert found.output is not None
        assert found.output.count("+new 7") >= count
        assert len(compared) == searches


LINES = st.lists(st.sampled_from(["", "a", "b", "  c", "@@ -1 +1 @@", "-", "+++ x"]), max_size=40)


@given(LINES, LINES, LINES, LINES, st.sampled_from([0, MAX_STEPS]))
def test_before_and_the_difference_give_after(
    begin: list[str], old: list[str], new: list[str], rest: list[str], steps: int
) -> None:
    before, after = [*begin, *old, *rest], [*begin, *new, *rest]
    # An empty line at the end of a text is none.
    found = difference(
        "a", "".join(f"{line}\n" for line in before), "".join(f"{line}\n" for line in after), steps=steps
    )
    assert bool(found) == (before != after)
    assert applied(found, before) == after
