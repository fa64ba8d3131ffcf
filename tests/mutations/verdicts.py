"""What a run of pytest says about a test, from its JUnit report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree as ET

# The own word of a test: an assertion, `pytest.raises` that saw nothing, a wait bounded by itself, by a deadline or
# by pytest.
_OWN = re.compile(
    r"AssertionError|assert |Failed: |[\w.]*TimeoutError|ExceptionGroup: .*AssertionError"
    r"|[\w.]*AioRpcError: .*StatusCode\.DEADLINE_EXCEEDED",
    re.DOTALL,
)


class Verdict(NamedTuple):
    """`green`: passed. `red`: failed by its own word. `broken`: anything else, as an error while it was set up."""

    kind: str
    detail: str = ""


def read(report: ET.Element) -> dict[str, Verdict]:
    """By node id without parameters: red if one of its runs was red, green if all were green, else broken."""
    runs: dict[str, list[Verdict]] = {}
    for case in report.iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        runs.setdefault(f"{path}::{case.get('name', '').partition('[')[0]}", []).append(_run(case))
    return {test: _together(found) for test, found in runs.items()}


def _run(case: ET.Element) -> Verdict:
    failure = case.find("failure")
    if failure is not None:
        message = (failure.get("message") or "").strip()
        first = message.partition("\n")[0]
        return Verdict("red" if _OWN.match(message) else "broken", first)
    for bad in ("error", "skipped"):
        found = case.find(bad)
        if found is not None:
            return Verdict("broken", f"{bad}: {(found.get('message') or '').strip().partition(chr(10))[0]}")
    return Verdict("green", "it stayed green")


def _together(runs: Iterable[Verdict]) -> Verdict:
    found = list(runs)
    for kind in ("red", "broken"):
        for verdict in found:
            if verdict.kind == kind:
                return verdict
    return found[0]
