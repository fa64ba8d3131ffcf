"""Write docs/failures.md, docs/warm-sandboxes.md and docs/control.md from the lists in tests: failures.toml,
behaviours.toml, control.toml.

`python scripts/coverage_map.py` checks that every named test is collected, and writes the pages. With `--results FILE`
(JUnit XML of a run of those tests) it also checks that each of them passed. `--check` only compares the pages with the
data and exits with 1 when one is out of date; `--names` prints the named tests, one a line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

# Run as a program, it is not yet a part of its package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import behaviours, catalogue, control, failures

CATALOGUES = (failures.CATALOGUE, behaviours.CATALOGUE, control.CATALOGUE)


def pages() -> dict[Path, str]:
    """What each page should be."""
    warm, controlled = catalogue.load(behaviours.CATALOGUE), catalogue.load(control.CATALOGUE)
    return {
        failures.PAGE: failures.render(catalogue.load(failures.CATALOGUE), failures.proven()),
        behaviours.PAGE: behaviours.render(warm, behaviours.PAGE.read_text()),
        control.PAGE: control.render(controlled, control.PAGE.read_text()),
    }


def out_of_date() -> list[str]:
    """The pages that are not what they should be, in words."""
    return [
        f"{page.relative_to(catalogue.ROOT)} is out of date; run python scripts/coverage_map.py"
        for page, text in pages().items()
        if not page.exists() or page.read_text() != text
    ]


def main() -> None:
    """Check, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JUnit XML of a run of the named tests")
    parser.add_argument("--check", action="store_true", help="compare the pages only")
    parser.add_argument("--names", action="store_true", help="print the named tests")
    arguments = parser.parse_args()
    entries: list[catalogue.Entry] = []
    wrong: list[str] = []
    for found in CATALOGUES:
        of_it = catalogue.load(found)
        entries += of_it
        wrong += catalogue.problems(found, of_it)
    if arguments.names and not wrong:
        print("\n".join(catalogue.named(entries)))
        return
    if arguments.check:
        wrong += out_of_date()
    else:
        wrong += catalogue.uncollected(entries, catalogue.collected())
        if arguments.results is not None:
            # Written by our own run of pytest.
            ran = catalogue.outcomes(ET.parse(arguments.results).getroot())  # noqa: S314
            wrong += catalogue.unpassed(entries, ran)
    if wrong:
        raise SystemExit("\n".join(wrong))
    if not arguments.check:
        for page, text in pages().items():
            page.write_text(text)


if __name__ == "__main__":
    main()
