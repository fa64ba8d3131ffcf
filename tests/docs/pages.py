"""What is on a page of the documentation: its fences, the commands in them, its links and its headings.

A ```` ```console ```` fence holds commands on lines that start with `$ `. A command goes on over lines that end with a
backslash, and over lines that are indented by four spaces. All other lines are output. Attributes stand behind the
language: `no-run="why"` for a fence that no test can run, `typed="one|two"` for lines that are typed into its commands.
A ```` ```python ```` fence is a command as well if it has the attribute `run`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Code that is shown runs as a program of its own, on the stack of its page.
PROGRAM = "on_the_stack python -"
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<attributes>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
_ATTRIBUTE = re.compile(r'\s+([\w-]+)="([^"]*)"')
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.M)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_VARIABLE = re.compile(
    r"(?P<id>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})|(?P<number>[\d.,]*\d)|(?P<blank>\s+)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """One fenced block; `line` is that of its opening, counted from 1."""

    line: int
    language: str
    attributes: dict[str, str]
    body: str


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One command of a page, what is typed into it, and the lines that its output holds."""

    line: int
    command: str
    typed: str
    shown: tuple[str, ...]


def all_pages() -> list[Path]:
    """README and every page below docs/, in a stable order."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """The path of a page as people write it, as in `docs/errors.md`."""
    return page.relative_to(ROOT).as_posix()


def fences(text: str) -> list[Fence]:
    """All fenced blocks of a page."""
    return [
        Fence(
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            attributes=dict(_ATTRIBUTE.findall(found["attributes"])),
            body=found["body"],
        )
        for found in _FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text)


def headings(text: str) -> set[str]:
    """The anchors of a page, made from its headings as GitHub makes them."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in _HEADING.findall(prose(text)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead."""
    return _LINK.findall(prose(text))


def spans(text: str) -> list[str]:
    """What stands between backticks in the running text."""
    return _SPAN.findall(prose(text))


def steps(text: str) -> list[Step]:
    """The commands of a page that run, from top to bottom."""
    return [step for fence in fences(text) for step in _steps_of(fence)]


def _steps_of(fence: Fence) -> Iterator[Step]:
    if fence.language == "python" and "run" in fence.attributes:
        yield Step(fence.line, PROGRAM, fence.body, ())
    elif fence.language == "console" and "no-run" not in fence.attributes:
        yield from _commands(fence)


def _commands(fence: Fence) -> Iterator[Step]:
    lines = fence.body.splitlines()
    at = 0
    typed = "".join(f"{line}\n" for line in fence.attributes.get("typed", "").split("|") if line)
    while at < len(lines):
        start = at
        if not lines[at].startswith("$ "):
            raise ValueError(f"line {fence.line + 1 + at}: output without a command: {lines[at]!r}")
        command, at = [lines[at][2:]], at + 1
        while at < len(lines) and (command[-1].endswith("\\") or lines[at].startswith("    ")):
            command.append(lines[at])
            at += 1
        shown = []
        while at < len(lines) and not lines[at].startswith("$ "):
            if lines[at].strip() and lines[at].strip() != "…":
                shown.append(lines[at])
            at += 1
        yield Step(fence.line + 1 + start, "\n".join(command), typed, tuple(shown))


def missing(shown: tuple[str, ...], output: str) -> list[str]:
    """The shown lines that the output does not hold. Numbers, ids and widths may differ; `…` is anything."""
    seen = [_shape(line) for line in output.splitlines()]
    return [line for line in shown if not any(_pattern(line).search(candidate) for candidate in seen)]


def _shape(line: str) -> str:
    return _VARIABLE.sub(lambda found: {"id": "<id>", "number": "0", "blank": " "}[str(found.lastgroup)], line.strip())


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(_shape(part)) for part in line.split("…")))
