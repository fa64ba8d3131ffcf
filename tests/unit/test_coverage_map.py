"""The lists of failures and of behaviours: well formed, every test that they name is there, their pages are up to date,
and what a run of the tests did is read."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree as ET

import pytest

from scripts import behaviours, catalogue, control, coverage_map, failures
from scripts.catalogue import Catalogue, Entry

FAILURE = Entry("R01", "it hangs", ("a/b/issues/1",), "it ends", ("tests/unit/test_x.py::test_y",), "")
BEHAVIOUR = Entry("w_p01", "", (), "it is so", ("tests/unit/test_x.py::test_p01_it_is_so",), "")


def others(found: Catalogue, good: Entry) -> list[Entry]:
    """Good entries of all codes but the first."""
    made = []
    for code in found.codes[1:]:
        test = f"tests/unit/test_x.py::test_{code.rpartition('_')[2].lower()}_y"
        made.append(dataclasses.replace(good, code=code, tests=(test,)))
    return made


@pytest.mark.parametrize(
    "found", [failures.CATALOGUE, behaviours.CATALOGUE, control.CATALOGUE], ids=["failures", "behaviours", "control"]
)
def test_every_entry_is_listed_with_tests_that_are_there_or_a_reason(found: Catalogue) -> None:
    entries = catalogue.load(found)
    assert catalogue.problems(found, entries) == []
    assert catalogue.unwritten(entries) == []


def test_the_pages_are_what_the_lists_say() -> None:
    assert coverage_map.out_of_date() == []


def test_what_is_wrong_with_a_failure_is_named() -> None:
    rest = others(failures.CATALOGUE, FAILURE)
    for wrong, words in (
        (dataclasses.replace(FAILURE, code="Z99"), ["R01 is missing", "Z99 is not in the list of codes"]),
        (dataclasses.replace(FAILURE, tests=()), ["R01 needs either tests or a waiver"]),
        (dataclasses.replace(FAILURE, waiver="why not"), ["R01 needs either tests or a waiver"]),
        (dataclasses.replace(FAILURE, title=""), ["R01 needs a title, a behaviour and a thread"]),
        (dataclasses.replace(FAILURE, tests=FAILURE.tests * 2), ["R01 names a test twice"]),
        (dataclasses.replace(FAILURE, tests=("test_y",)), ["R01: test_y is no node id"]),
        (dataclasses.replace(FAILURE, threads=("somewhere",)), ["R01: somewhere is no thread"]),
    ):
        assert catalogue.problems(failures.CATALOGUE, [wrong, *rest]) == words
    assert catalogue.problems(failures.CATALOGUE, [FAILURE, *rest]) == []


def test_what_is_wrong_with_a_behaviour_is_named() -> None:
    rest = others(behaviours.CATALOGUE, BEHAVIOUR)
    unnamed = ("tests/unit/test_x.py::test_p010_is_another",)
    for wrong, words in (
        (dataclasses.replace(BEHAVIOUR, behaviour=""), ["w_p01 needs a behaviour"]),
        (dataclasses.replace(BEHAVIOUR, tests=unnamed), ["w_p01 has no test with the code in its name"]),
        (dataclasses.replace(BEHAVIOUR, tests=(), waiver="not here"), []),
    ):
        assert catalogue.problems(behaviours.CATALOGUE, [wrong, *rest]) == words
    assert catalogue.problems(behaviours.CATALOGUE, [BEHAVIOUR, *rest]) == []
    assert len(behaviours.CATALOGUE.codes) == 104
    assert len(control.CATALOGUE.codes) == 88


def test_a_test_that_is_not_there_is_seen() -> None:
    assert catalogue.unwritten([FAILURE]) == list(FAILURE.tests)
    here = "tests/unit/test_coverage_map.py::test_a_test_that_is_not_there_is_seen"
    assert catalogue.unwritten([dataclasses.replace(FAILURE, tests=(here,))]) == []
    assert catalogue.uncollected([FAILURE], {here}) == [f"{FAILURE.tests[0]} is not collected"]


def test_only_a_test_whose_every_run_passed_has_passed() -> None:
    report = ET.fromstring(
        "<testsuites><testsuite>"
        '<testcase classname="tests.unit.test_x" name="test_y[1]"/>'
        '<testcase classname="tests.unit.test_x" name="test_y[2]"/>'
        '<testcase classname="tests.unit.test_x" name="test_half[1]"/>'
        '<testcase classname="tests.unit.test_x" name="test_half[2]"><failure/></testcase>'
        '<testcase classname="tests.unit.test_x" name="test_left_out"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    ran = catalogue.outcomes(report)
    assert catalogue.unpassed([FAILURE], ran) == []
    tests = tuple(f"tests/unit/test_x.py::test_{name}" for name in ("half", "left_out", "never"))
    assert catalogue.unpassed([dataclasses.replace(FAILURE, tests=tests)], ran) == [
        f"{tests[0]} did not pass",
        f"{tests[1]} did not pass",
        f"{tests[2]} did not run",
    ]


def test_a_row_says_what_guards() -> None:
    waived = dataclasses.replace(FAILURE, code="R02", tests=(), waiver="no such thing")
    page = failures.render([FAILURE, waived], {})
    assert (
        "| R01 | it hangs ([a/b#1](https://github.com/a/b/issues/1)) | it ends | [`test_y`](../tests/unit/test_x.py) |"
    ) in page
    assert "| Waived: no such thing |" in page
    assert "2 failures: 1 guarded by 1 tests, 0 of them proven, 1 that cannot come up here" in page
    page = failures.render([FAILURE, waived], {"R01": FAILURE.tests[0]})
    assert "| it ends | **[`test_y`](../tests/unit/test_x.py)** |" in page
    assert "1 of them proven" in page


def test_the_table_of_behaviours_leaves_what_stands_before_it() -> None:
    page = behaviours.render([BEHAVIOUR], f"# By hand\n\n{behaviours.BEGIN}an old table\n")
    assert page.startswith(f"# By hand\n\n{behaviours.BEGIN}\n1 behaviours: 1 shown by 1 tests, 0 that")
    assert "| P1 | it is so | [`test_p01_it_is_so`](../tests/unit/test_x.py) |\n" in page
    assert "an old table" not in page
    with pytest.raises(ValueError, match="has no line"):
        behaviours.render([BEHAVIOUR], "# By hand\n")
