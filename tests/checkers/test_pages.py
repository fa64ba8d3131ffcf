"""The pages about guarantees name files that exist, every guarantee, and every checker."""

from __future__ import annotations

import re
from pathlib import Path

from tests.checkers import CHECKERS

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs/guarantees.md").read_text("utf-8")
SUITE = (ROOT / "tests/contract/README.md").read_text("utf-8")


def test_every_guarantee_has_a_row_with_tests_that_exist() -> None:
    rows = {found[1]: found[0] for found in re.findall(r"^(\| \*\*([A-Z]\d) .*)$", GUARANTEES, re.MULTILINE)}
    expected = [f"H{number}" for number in range(1, 9)] + [
        "L1",
        "C1",
        "C2",
        "C3",
        "C4",
        "C5",
        "S1",
        "S2",
        "S3",
        "P1",
        "P2",
    ]
    assert list(rows) == expected
    for name, row in rows.items():
        paths = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert paths, name
        assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_checker_is_named_and_has_a_self_test() -> None:
    for name, checker in CHECKERS.items():
        module = checker.__module__.rsplit(".", 1)[-1]
        assert f"`{module}.py`" in GUARANTEES, name
        assert (ROOT / f"tests/checkers/test_{module}.py").is_file(), name


def test_the_page_of_the_suite_names_what_exists() -> None:
    folder = ""
    for path in re.findall(r"`((?:history/|relay/)?test_\w+\.py)`", SUITE):
        folder = path.rpartition("/")[0] or folder
        places = [ROOT / "tests/contract" / path, ROOT / "tests/contract" / folder / path.rpartition("/")[2]]
        assert any(place.is_file() for place in places), path
