"""docs/control.md: its table of behaviours, from tests/control.toml. The rest of it is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.catalogue import ROOT, Catalogue, Entry, summary, with_table

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
    sections = [
        (title, [(str(_number(entry.code)), entry) for entry in entries if _number(entry.code) in numbers])
        for title, numbers in SECTIONS
    ]
    return with_table(page, BEGIN, summary(entries, "that do not apply"), "number", sections)


def _number(code: str) -> int:
    return int(code.removeprefix("s_n"))
