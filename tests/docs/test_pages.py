"""What the pages name exists: links, anchors, pictures, commands and their options, targets of make, code, files."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hearth.cli.main import app
from tests.docs.pages import ROOT, Fence, all_pages, fences, headings, links, missing, name_of, spans, steps

PAGES = [pytest.param(page, id=name_of(page)) for page in all_pages()]
# Of these languages nothing is run; what cannot be run for another reason says it with `no-run`.
SHOWN_ONLY = {"text", "proto", "dockerfile", "yaml", "sql"}
PATH = re.compile(r"(tests|services|hearth|docs|protos|scripts|examples|clients)/[\w./-]+")
PROGRAM = typer.main.get_command(app)


# The pages beside the code name files of their own directory.
BESIDE_CODE = [
    pytest.param(page, id=name_of(page))
    for below in ("services", "hearth", "benchmarks", "clients", "examples", "tests")
    for page in sorted((ROOT / below).rglob("README.md"))
    if "node_modules" not in page.parts
]
FILE = re.compile(r"[\w./-]+\.(?:py|lua|sql|toml|json|mjs)")


def reaches(target: Path, anchor: str) -> bool:
    """Whether there is such a file in the tree, with such a heading."""
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in headings(target.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    wrong = []
    for link in links(text):
        place, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or not target.is_relative_to(ROOT) or not reaches(target, anchor):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", BESIDE_CODE)
def test_files_named_beside_the_code_are_there(page: Path) -> None:
    named = {span for span in spans(page.read_text()) if FILE.fullmatch(span)}
    wrong = [
        name for name in named if not (ROOT / name).exists() and not list(page.parent.rglob(name.removeprefix("/")))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_what_they_are(page: Path) -> None:
    for fence in fences(page.read_text()):
        assert fence.language in SHOWN_ONLY | {"console", "python", "json"}, f"line {fence.line}: {fence.language!r}"
        if fence.language == "console":
            assert fence.body.startswith("$ "), f"line {fence.line}: a console begins with a command"
            assert set(fence.attributes) <= {"no-run", "typed"}, f"line {fence.line}"
            assert fence.attributes.get("no-run", "why"), f"line {fence.line}: why not?"


def imported(fence: Fence) -> list[str]:
    """What the code imports that is not there."""
    wrong = []
    for node in ast.walk(ast.parse(fence.body)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "hearth"
            and not hasattr(importlib.import_module("hearth"), node.attr)
        ):
            wrong.append(f"hearth.{node.attr}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_shown_is_code(page: Path) -> None:
    for fence in fences(page.read_text()):
        if fence.language == "python":
            compile(fence.body, name_of(page), "exec")
            assert imported(fence) == []
        elif fence.language == "json":
            json.loads(fence.body)


def unknown(words: list[str]) -> str:
    """What of `hearth word word --option` the program does not have; empty if all of it is there."""
    command: Any = PROGRAM
    for word in words:
        if word.startswith("-") or not hasattr(command, "commands"):
            break
        found = command.commands.get(word)
        if found is None:
            return f"no command {word!r} in {command.name}"
        command = found
    options = {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return f"{command.name} has no {sorted(given - options)}" if given - options else ""


def mentioned(text: str) -> list[list[str]]:
    """Every `hearth …` of a page: in its running text, and in its fences whether they are run or only shown."""
    places = spans(text)
    for fence in fences(text):
        if fence.language in {"console", "text"}:
            places += [
                line for whole in fence.body.splitlines() for line in re.split(r" {3,}", whole.removeprefix("$ "))
            ]
    found = []
    for place in places:
        if place.startswith("hearth ") and place[7] not in "=…":
            # Without what a shell does with it, and without the brackets and bars of a synopsis.
            command = re.sub(r"[\[\]()']", "", re.split(r" [|&;>#]", place)[0])
            words = [word.split("|") for word in shlex.split(command)[1:]]
            found += [list(chosen) for chosen in itertools.product(*words[:2], *([word[0]] for word in words[2:]))]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_mentioned_exist(page: Path) -> None:
    assert [problem for words in mentioned(page.read_text()) if (problem := unknown(words))] == []


@pytest.mark.parametrize("page", PAGES)
def test_targets_and_files_that_are_mentioned_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    wrong = []
    for span in spans(page.read_text()):
        if span.startswith("make ") and span.split()[1] not in targets:
            wrong.append(span)
        if PATH.fullmatch(span) and not (ROOT / span).exists():
            wrong.append(span)
    assert wrong == []


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    led_to = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    assert {page for page in all_pages() if page != index} - led_to == set()
    assert "docs/README.md" in links((ROOT / "README.md").read_text())


def test_the_reader_of_pages_finds_commands_and_what_they_show() -> None:
    page = '# A\n\n```console typed="y|n"\n$ one \\\n  two\nshown 1\n…\n$ three\n    four\n```\n'
    page += '```console no-run="why"\n$ five\n```\n'
    assert [(step.line, step.command, step.typed, step.shown) for step in steps(page)] == [
        (4, "one \\\n  two", "y\nn\n", ("shown 1",)),
        (8, "three\n    four", "y\nn\n", ()),
    ]
    with pytest.raises(ValueError, match="output without a command"):
        steps("```console\nfive\n```\n")


def test_what_is_shown_is_compared_but_for_what_differs_each_time() -> None:
    output = "turn  how   total\n   1  cold    327\nEvery promise of the demo held."
    assert missing(("  12  cold  5", "Every … held."), output) == []
    assert missing(("   1  warm    327",), output) == ["   1  warm    327"]


def test_options_and_commands_that_do_not_exist_are_found() -> None:
    assert unknown(["up", "--json"]) == ""
    assert unknown(["queue", "list", "my-session"]) == ""
    assert "wanr" in unknown(["wanr"])
    assert "--jsno" in unknown(["up", "--jsno"])
