"""Lists of things that must hold, each with the tests that show it: reading one, checking it, and what a run said."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
_THREAD = re.compile(r"[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One of them. Either `tests` (node ids without parameters) or `waiver` is given."""

    code: str
    title: str
    threads: tuple[str, ...]
    behaviour: str
    tests: tuple[str, ...]
    waiver: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A list: its data, the codes that it must have, and what each entry needs beside a behaviour."""

    data: Path
    codes: tuple[str, ...]
    # A title, and a thread in which it was reported.
    reported: bool = False
    # One test at least has the code in its name, as `_p04_` for the code `w_p04`.
    named: bool = False


def load(catalogue: Catalogue) -> list[Entry]:
    """The entries, in the order of the codes; those with other codes last. A code that comes twice does not parse."""
    with catalogue.data.open("rb") as file:
        found = [
            Entry(
                code,
                entry.get("title", ""),
                tuple(entry.get("threads", ())),
                entry.get("behaviour", ""),
                tuple(entry.get("tests", ())),
                entry.get("waiver", ""),
            )
            for code, entry in tomllib.load(file).items()
        ]
    places = {code: place for place, code in enumerate(catalogue.codes)}
    return sorted(found, key=lambda entry: (places.get(entry.code, len(places)), entry.code))


def problems(catalogue: Catalogue, entries: Sequence[Entry]) -> list[str]:
    """What is wrong with the data itself, in words."""
    codes = {entry.code for entry in entries}
    found = [f"{code} is missing" for code in catalogue.codes if code not in codes]
    found += [f"{code} is not in the list of codes" for code in sorted(codes - set(catalogue.codes))]
    for entry in entries:
        if not entry.behaviour or (catalogue.reported and not (entry.title and entry.threads)):
            needed = "a title, a behaviour and a thread" if catalogue.reported else "a behaviour"
            found.append(f"{entry.code} needs {needed}")
        if bool(entry.tests) == bool(entry.waiver):
            found.append(f"{entry.code} needs either tests or a waiver")
        if len(set(entry.tests)) != len(entry.tests):
            found.append(f"{entry.code} names a test twice")
        found += [f"{entry.code}: {test} is no node id" for test in entry.tests if not _TEST.fullmatch(test)]
        found += [f"{entry.code}: {it} is no thread" for it in entry.threads if not _THREAD.fullmatch(it)]
        if catalogue.named and entry.tests and not any(carries(entry.code, test) for test in entry.tests):
            found.append(f"{entry.code} has no test with the code in its name")
    return found


def carries(code: str, test: str) -> bool:
    """Whether the name of a test says that it shows `code`."""
    short = code.rpartition("_")[2]
    return re.search(rf"_{short}(?:_|$)", test.partition("::")[2]) is not None


def named(entries: Iterable[Entry]) -> list[str]:
    """Every named test, once, sorted."""
    return sorted({test for entry in entries for test in entry.tests})


def written(path: Path) -> set[str]:
    """The names of the test functions at the top of a file, without importing it."""
    if not path.exists():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def unwritten(entries: Iterable[Entry]) -> list[str]:
    """The named tests that are in no file."""
    functions: dict[str, set[str]] = {}
    missing = []
    for test in named(entries):
        path, _, function = test.partition("::")
        if path not in functions:
            functions[path] = written(ROOT / path)
        if function not in functions[path]:
            missing.append(test)
    return missing


def collected() -> set[str]:
    """What pytest collects, without parameters. Ends the program when it cannot."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def outcomes(results: ET.Element) -> dict[str, bool]:
    """Of each test in a JUnit report, without parameters: whether all its runs passed; a skipped one did not."""
    found: dict[str, bool] = {}
    for case in results.iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        test = f"{path}::{case.get('name', '').partition('[')[0]}"
        passed = not any(case.find(bad) is not None for bad in ("failure", "error", "skipped"))
        found[test] = found.get(test, True) and passed
    return found


def unpassed(entries: Iterable[Entry], ran: Mapping[str, bool]) -> list[str]:
    """The named tests that did not pass, in words."""
    return [
        f"{test} {'did not pass' if test in ran else 'did not run'}" for test in named(entries) if not ran.get(test)
    ]


def uncollected(entries: Iterable[Entry], there: Collection[str]) -> list[str]:
    """The named tests that pytest does not find, in words."""
    return [f"{test} is not collected" for test in named(entries) if test not in there]


def shown_by(entry: Entry, proof: str = "") -> str:
    """The last cell of a row: links to the tests, `proof` among them in bold, or why there are none."""
    links = (f"**{_link(test)}**" if test == proof else _link(test) for test in entry.tests)
    return "<br>".join(links) or f"Waived: {entry.waiver}"


def with_table(
    page: str, begin: str, summary: str, head: str, sections: Iterable[tuple[str, Iterable[tuple[str, Entry]]]]
) -> str:
    """A page that is written by hand, with its table made anew behind the line `begin`. `sections` are titles and their
    entries, each with what the first column calls it. Raises ValueError when the page has no place for it."""
    by_hand, found, _ = page.partition(begin)
    if not found:
        raise ValueError(f"the page has no line {begin.strip()}")
    parts = [by_hand, begin, f"\n{summary}\n"]
    for title, entries in sections:
        parts.append(f"\n### {title}\n\n| {head} | behaviour | shown by |\n|---|---|---|\n")
        parts += [f"| {name} | {entry.behaviour} | {shown_by(entry)} |\n" for name, entry in entries]
    return "".join(parts)


def summary(entries: Sequence[Entry], waived: str) -> str:
    """How many of them there are, and how many are `waived`."""
    without = sum(bool(entry.waiver) for entry in entries)
    shown = f"{len(entries) - without} shown by {len(named(entries))} tests"
    return f"{len(entries)} behaviours: {shown}, {without} {waived}, each with its reason."


def _link(test: str) -> str:
    path, _, function = test.partition("::")
    return f"[`{function}`](../{path})"
