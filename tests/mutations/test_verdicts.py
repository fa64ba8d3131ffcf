"""Only a test that fails by its own word has seen what was taken back."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tests.mutations.verdicts import read


def kind_of(*runs: str) -> str:
    """The verdict of `test_y` from the content of its test cases."""
    cases = "".join(
        f'<testcase classname="tests.unit.test_x" name="test_y[{number}]">{run}</testcase>'
        for number, run in enumerate(runs)
    )
    (verdict,) = read(ET.fromstring(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")).values()
    return verdict.kind


@pytest.mark.parametrize(
    "message",
    [
        "assert 1 == 2",
        "AssertionError: replicas tell different logs",
        "Failed: DID NOT RAISE DataLoss",
        "Failed: Timeout (&gt;60.0s) from pytest-timeout.",
        "TimeoutError",
        "redis.exceptions.TimeoutError: Timeout reading from 127.0.0.1:6379",
        "grpc.aio._call.AioRpcError: it terminated with:&#10;status = StatusCode.DEADLINE_EXCEEDED",
    ],
)
def test_its_own_word_is_red(message: str) -> None:
    assert kind_of(f'<failure message="{message}"/>') == "red"
    # Another of its runs may be fine, and ending badly afterwards takes nothing away.
    assert kind_of("", f'<failure message="{message}"/>', '<error message="failed on teardown"/>') == "red"


@pytest.mark.parametrize(
    "run",
    [
        "<failure message=\"NameError: name 'x' is not defined\"/>",
        '<failure message="ImportError: no such module"/>',
        '<failure message="grpc.aio._call.AioRpcError: it terminated with:&#10;status = StatusCode.INTERNAL"/>',
        '<error message="failed on setup with AssertionError"/>',
        '<error message="collection failure"/>',
        '<skipped message="not here"/>',
    ],
)
def test_anything_else_is_broken(run: str) -> None:
    assert kind_of("", run) == "broken"


def test_a_test_that_passes_is_green() -> None:
    assert kind_of("", "") == "green"
