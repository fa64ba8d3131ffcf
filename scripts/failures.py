"""docs/failures.md: known failures of systems like this and what guards against each, from tests/failures.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.catalogue import ROOT, Catalogue, Entry, named, shown_by

MUTATIONS = ROOT / "tests" / "mutations" / "mutations.toml"
PAGE = ROOT / "docs" / "failures.md"

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
CATALOGUE = Catalogue(
    data=ROOT / "tests" / "failures.toml",
    codes=tuple(f"{letter}{number:02}" for letter, numbers in _NUMBERS.items() for number in numbers),
    reported=True,
)
HEAD = """# Known failures, and what guards against them

Systems that stream, number and replay what an agent says have failed in public in many ways. This page lists them, each
with the thread in which it was reported, what Hearth does instead, and the tests that would go red if it stopped doing
so. `make coverage-map` runs those tests and writes this page from `tests/failures.toml`.

A test in **bold** is proven: `make mutations` takes the guard back, one at a time in a copy of the tree, and that test
goes red ([`mutations.toml`](../tests/mutations/mutations.toml) says what is changed).

"""


def proven(path: Path = MUTATIONS) -> dict[str, str]:
    """Of each code that a mutation proves, the test that goes red."""
    with path.open("rb") as file:
        return {code: entry["test"] for code, entry in tomllib.load(file).items()}


def render(entries: Sequence[Entry], proofs: Mapping[str, str]) -> str:
    """The page; `proofs` as `proven` gives them."""
    waived = sum(bool(entry.waiver) for entry in entries)
    count = f"{len(entries)} failures: {len(entries) - waived} guarded by {len(named(entries))} tests, "
    count += f"{len(proofs)} of them proven, {waived} that cannot come up here, each with its reason.\n"
    parts = [HEAD, count]
    for letter, title in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| code | failure | in Hearth | shown by |\n|---|---|---|---|\n")
        parts += [_row(entry, proofs.get(entry.code, "")) for entry in entries if entry.code[0] == letter]
    return "".join(parts)


def _row(entry: Entry, proof: str) -> str:
    threads = ", ".join(f"[{_short(thread)}](https://github.com/{thread})" for thread in entry.threads)
    shown = shown_by(entry, proof)
    return f"| {entry.code} | {entry.title} ({threads}) | {entry.behaviour} | {shown} |\n"


def _short(thread: str) -> str:
    repository, _, number = thread.rpartition("/")
    return f"{repository.rsplit('/', 1)[0]}#{number}"
