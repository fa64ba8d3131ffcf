"""The list of known failures: well formed, every test that it names is there, and what a run of them did is read."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree as ET

from scripts import coverage_map
from scripts.coverage_map import Failure

GOOD = Failure("R01", "it hangs", ("a/b/issues/1",), "it ends", ("tests/unit/test_x.py::test_y",), "")


def test_every_failure_is_listed_with_tests_that_are_there_or_a_reason() -> None:
    failures = coverage_map.load()
    assert coverage_map.problems(failures) == []
    assert coverage_map.unwritten(failures) == []


def test_what_is_wrong_is_named() -> None:
    others = [dataclasses.replace(GOOD, code=code) for code in coverage_map.CODES[1:]]
    for wrong, words in (
        (dataclasses.replace(GOOD, code="Z99"), ["R01 is missing", "Z99 is not in the list of codes"]),
        (dataclasses.replace(GOOD, tests=()), ["R01 needs either tests or a waiver"]),
        (dataclasses.replace(GOOD, waiver="why not"), ["R01 needs either tests or a waiver"]),
        (dataclasses.replace(GOOD, title=""), ["R01 needs a title, a behaviour and a thread"]),
        (dataclasses.replace(GOOD, tests=GOOD.tests * 2), ["R01 names a test twice"]),
        (dataclasses.replace(GOOD, tests=("test_y",)), ["R01: test_y is no node id"]),
        (dataclasses.replace(GOOD, threads=("somewhere",)), ["R01: somewhere is no thread"]),
    ):
        assert coverage_map.problems([wrong, *others]) == words
    assert coverage_map.problems([GOOD, *others]) == []


def test_a_test_that_is_not_there_is_seen() -> None:
    assert coverage_map.unwritten([GOOD]) == list(GOOD.tests)
    here = "tests/unit/test_coverage_map.py::test_a_test_that_is_not_there_is_seen"
    assert coverage_map.unwritten([dataclasses.replace(GOOD, tests=(here,))]) == []
    assert coverage_map.uncollected([GOOD], {here}) == [f"{GOOD.tests[0]} is not collected"]


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
    ran = coverage_map.outcomes(report)
    assert coverage_map.unpassed([GOOD], ran) == []
    tests = tuple(f"tests/unit/test_x.py::test_{name}" for name in ("half", "left_out", "never"))
    assert coverage_map.unpassed([dataclasses.replace(GOOD, tests=tests)], ran) == [
        f"{tests[0]} did not pass",
        f"{tests[1]} did not pass",
        f"{tests[2]} did not run",
    ]


def test_a_row_says_what_guards() -> None:
    waived = dataclasses.replace(GOOD, code="R02", tests=(), waiver="no such thing")
    page = coverage_map.render([GOOD, waived], {})
    assert (
        "| R01 | it hangs ([a/b#1](https://github.com/a/b/issues/1)) | it ends | [`test_y`](../tests/unit/test_x.py) |"
    ) in page
    assert "| Waived: no such thing |" in page
    assert "2 failures: 1 guarded by 1 tests, 0 of them proven, 1 that cannot come up here" in page
    page = coverage_map.render([GOOD, waived], {"R01": GOOD.tests[0]})
    assert "| it ends | **[`test_y`](../tests/unit/test_x.py)** |" in page
    assert "1 of them proven" in page
