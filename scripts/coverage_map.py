"""Write docs/failures.md from tests/failures.toml: known failures of systems like this, and what guards against each.

`python scripts/coverage_map.py` checks that every named test is collected, and writes the page. With `--results FILE`
(JUnit XML of a run of those tests) it also checks that each of them passed. `--check` only compares the page with the
data and exits with 1 when it is out of date; `--names` prints the named tests, one a line.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "failures.toml"
PAGE = ROOT / "docs" / "failures.md"
# Of each code, the change that brings the failure back and the test that then goes red.
MUTATIONS = ROOT / "tests" / "mutations" / "mutations.toml"

# Letter of the codes → what they are about. Codes are stable; numbers that are not here were never used or went.
SECTIONS = {
    "R": "Relay, replay, reconnect",
    "I": "Ingest, ordering, duplicates",
    "P": "Numbers in Postgres, notices",
    "X": "Valkey and Redis",
    "G": "gRPC and HTTP/2",
}
_NUMBERS = {
    "R": (
        *range(1, 8),
        9,
        10,
        11,
        13,
        14,
        15,
        *range(17, 21),
        *range(22, 28),
        *range(29, 35),
        *range(36, 43),
        *range(44, 50),
    ),
    "I": (1, 2, 3, 4, 6, 7, 9, 10, 11, 13, 14, 16, 17),
    "P": (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13),
    "X": (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14, 16, 17),
    "G": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14),
}
CODES = tuple(f"{letter}{number:02}" for letter, numbers in _NUMBERS.items() for number in numbers)
HEAD = """# Known failures, and what guards against them

Systems that stream, number and replay what an agent says have failed in public in many ways. This page lists them, each
with the thread in which it was reported, what Hearth does instead, and the tests that would go red if it stopped doing
so. `make coverage-map` runs those tests and writes this page from `tests/failures.toml`.

A test in **bold** is proven: `make mutations` takes the guard back, one at a time in a copy of the tree, and that test
goes red ([`mutations.toml`](../tests/mutations/mutations.toml) says what is changed).

"""
_THREAD = re.compile(r"[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """One of them. Either `tests` (node ids without parameters) or `waiver` is given."""

    code: str
    title: str
    threads: tuple[str, ...]
    behaviour: str
    tests: tuple[str, ...]
    waiver: str


def load(path: Path = DATA) -> list[Failure]:
    """The failures, in the order of `CODES`; those with other codes last. A code that comes twice does not parse."""
    with path.open("rb") as file:
        found = [
            Failure(
                code,
                entry.get("title", ""),
                tuple(entry.get("threads", ())),
                entry.get("behaviour", ""),
                tuple(entry.get("tests", ())),
                entry.get("waiver", ""),
            )
            for code, entry in tomllib.load(file).items()
        ]
    places = {code: place for place, code in enumerate(CODES)}
    return sorted(found, key=lambda failure: (places.get(failure.code, len(places)), failure.code))


def problems(failures: Iterable[Failure]) -> list[str]:
    """What is wrong with the file itself, in words."""
    failures = list(failures)
    codes = {failure.code for failure in failures}
    found = [f"{code} is missing" for code in CODES if code not in codes]
    found += [f"{code} is not in the list of codes" for code in sorted(codes - set(CODES))]
    for failure in failures:
        if not failure.title or not failure.behaviour or not failure.threads:
            found.append(f"{failure.code} needs a title, a behaviour and a thread")
        if bool(failure.tests) == bool(failure.waiver):
            found.append(f"{failure.code} needs either tests or a waiver")
        if len(set(failure.tests)) != len(failure.tests):
            found.append(f"{failure.code} names a test twice")
        found += [f"{failure.code}: {test} is no node id" for test in failure.tests if not _TEST.fullmatch(test)]
        found += [f"{failure.code}: {it} is no thread" for it in failure.threads if not _THREAD.fullmatch(it)]
    return found


def named(failures: Iterable[Failure]) -> list[str]:
    """Every named test, once, sorted."""
    return sorted({test for failure in failures for test in failure.tests})


def written(path: Path) -> set[str]:
    """The names of the test functions at the top of a file, without importing it."""
    if not path.exists():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def unwritten(failures: Iterable[Failure]) -> list[str]:
    """The named tests that are in no file."""
    functions: dict[str, set[str]] = {}
    missing = []
    for test in named(failures):
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


def unpassed(failures: Iterable[Failure], ran: Mapping[str, bool]) -> list[str]:
    """The named tests that did not pass, in words."""
    return [
        f"{test} {'did not pass' if test in ran else 'did not run'}" for test in named(failures) if not ran.get(test)
    ]


def uncollected(failures: Iterable[Failure], there: Collection[str]) -> list[str]:
    """The named tests that pytest does not find, in words."""
    return [f"{test} is not collected" for test in named(failures) if test not in there]


def proven(path: Path = MUTATIONS) -> dict[str, str]:
    """Of each code that a mutation proves, the test that goes red."""
    with path.open("rb") as file:
        return {code: entry["test"] for code, entry in tomllib.load(file).items()}


def render(failures: Iterable[Failure], proofs: Mapping[str, str]) -> str:
    """The page; `proofs` as `proven` gives them."""
    failures = list(failures)
    waived = sum(bool(failure.waiver) for failure in failures)
    count = f"{len(failures)} failures: {len(failures) - waived} guarded by {len(named(failures))} tests, "
    count += f"{len(proofs)} of them proven, {waived} that cannot come up here, each with its reason.\n"
    parts = [HEAD, count]
    for letter, title in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| code | failure | in Hearth | shown by |\n|---|---|---|---|\n")
        parts += [_row(failure, proofs.get(failure.code, "")) for failure in failures if failure.code[0] == letter]
    return "".join(parts)


def _row(failure: Failure, proof: str) -> str:
    threads = ", ".join(f"[{_short(thread)}](https://github.com/{thread})" for thread in failure.threads)
    links = (f"**{_link(test)}**" if test == proof else _link(test) for test in failure.tests)
    shown = "<br>".join(links) or f"Waived: {failure.waiver}"
    return f"| {failure.code} | {failure.title} ({threads}) | {failure.behaviour} | {shown} |\n"


def _short(thread: str) -> str:
    repository, _, number = thread.rpartition("/")
    return f"{repository.rsplit('/', 1)[0]}#{number}"


def _link(test: str) -> str:
    path, _, function = test.partition("::")
    return f"[`{function}`](../{path})"


def main() -> None:
    """Check, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JUnit XML of a run of the named tests")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    parser.add_argument("--names", action="store_true", help="print the named tests")
    arguments = parser.parse_args()
    failures = load()
    wrong = problems(failures)
    if arguments.names and not wrong:
        print("\n".join(named(failures)))
        return
    page = render(failures, proven())
    if arguments.check:
        if not PAGE.exists() or PAGE.read_text() != page:
            wrong.append("docs/failures.md is out of date; run python scripts/coverage_map.py")
    else:
        wrong += uncollected(failures, collected())
        if arguments.results is not None:
            # Written by our own run of pytest.
            wrong += unpassed(failures, outcomes(ET.parse(arguments.results).getroot()))  # noqa: S314
    if wrong:
        raise SystemExit("\n".join(wrong))
    if not arguments.check:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
