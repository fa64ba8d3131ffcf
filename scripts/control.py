"""docs/control.md: its table of behaviours, from tests/control.toml. The rest of it is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.catalogue import ROOT, Catalogue, Entry, named, shown_by

PAGE = ROOT / "docs" / "control.md"
BEGIN = "<!-- control: from here on written by `make coverage-map` -->\n"

# What the numbers are about, in their order.
SECTIONS = (
    ("Commands", range(1, 37)),
    ("Executions, takeovers, late output", range(37, 55)),
    ("Who holds a session", range(89, 98)),
    ("Approvals", range(98, 111)),
    ("Queue and steer", range(111, 123)),
)
CATALOGUE = Catalogue(
    data=ROOT / "tests" / "control.toml",
    codes=tuple(f"s_n{number:02}" for _, numbers in SECTIONS for number in numbers),
    named=True,
)


def render(entries: Sequence[Entry], page: str) -> str:
    """The page with its table made anew. Raises ValueError when the page has no place for it."""
    hand_written, found, _ = page.partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} has no line {BEGIN.strip()}")
    waived = sum(bool(entry.waiver) for entry in entries)
    parts = [
        hand_written,
        BEGIN,
        f"\n{len(entries)} behaviours: {len(entries) - waived} shown by {len(named(entries))} tests,"
        f" {waived} that do not apply, each with its reason.\n",
    ]
    for title, numbers in SECTIONS:
        parts.append(f"\n### {title}\n\n| number | behaviour | shown by |\n|---|---|---|\n")
        parts += [_row(entry) for entry in entries if _number(entry.code) in numbers]
    return "".join(parts)


def _row(entry: Entry) -> str:
    return f"| {_number(entry.code)} | {entry.behaviour} | {shown_by(entry)} |\n"


def _number(code: str) -> int:
    return int(code.removeprefix("s_n"))
