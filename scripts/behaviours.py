"""docs/warm-sandboxes.md: its table of behaviours, from tests/behaviours.toml. The rest of it is written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.catalogue import ROOT, Catalogue, Entry, named, shown_by

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
    hand_written, found, _ = page.partition(BEGIN)
    if not found:
        raise ValueError(f"{PAGE} has no line {BEGIN.strip()}")
    waived = sum(bool(entry.waiver) for entry in entries)
    parts = [
        hand_written,
        BEGIN,
        f"\n{len(entries)} behaviours: {len(entries) - waived} shown by {len(named(entries))} tests,"
        f" {waived} that do not apply, or not yet, each with its reason.\n",
    ]
    for letter, (title, _) in SECTIONS.items():
        parts.append(f"\n### {title}\n\n| code | behaviour | shown by |\n|---|---|---|\n")
        parts += [_row(entry) for entry in entries if _shown(entry.code)[0] == letter]
    return "".join(parts)


def _row(entry: Entry) -> str:
    return f"| {_shown(entry.code)} | {entry.behaviour} | {shown_by(entry)} |\n"


def _shown(code: str) -> str:
    """`w_p04` as P4."""
    short = code.rpartition("_")[2].upper()
    return f"{short[0]}{int(short[1:])}"
