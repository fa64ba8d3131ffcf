"""docs/warm-sandboxes.md: its table of behaviours, from tests/behaviours.toml. The rest of it is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.catalogue import ROOT, Catalogue, Entry, summary, with_table

PAGE = ROOT / "docs" / "warm-sandboxes.md"
BEGIN = "<!-- behaviours: from here on written by `make coverage-map` -->\n"

# Letter of the codes → what they are about, and how many there are.
SECTIONS = {
    "P": ("Entries of the pool", 25),
    "C": ("Settings, and what makes an agent the right one", 12),
    "D": ("How a turn is got", 18),
    "A": ("Approvals", 21),
    "R": ("Providers", 10),
    "E": ("Agents over many turns", 10),
    "K": ("Kill, shutdown, bounds", 4),
    "T": ("Limits of a turn", 1),
    "O": ("Ownership", 2),
    "S": ("Secrets", 1),
}
CATALOGUE = Catalogue(
    data=ROOT / "tests" / "behaviours.toml",
    codes=tuple(
        f"w_{letter.lower()}{number:02}" for letter, (_, count) in SECTIONS.items() for number in range(1, count + 1)
    ),
    named=True,
)


def render(entries: Sequence[Entry], page: str) -> str:
    """The page with its table made anew. Raises ValueError when the page has no place for it."""
    sections = [
        (title, [(_shown(entry.code), entry) for entry in entries if _shown(entry.code)[0] == letter])
        for letter, (title, _) in SECTIONS.items()
    ]
    return with_table(page, BEGIN, summary(entries, "that do not apply, or not yet"), "code", sections)


def _shown(code: str) -> str:
    """`w_p04` as P4."""
    short = code.rpartition("_")[2].upper()
    return f"{short[0]}{int(short[1:])}"
