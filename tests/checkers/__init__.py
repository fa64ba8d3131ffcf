"""What Hearth guarantees, as checks of what happened: one module for each guarantee, each fed a `Recording`.

`check` is what tests call. A checker says how many things it looked at, so that a run can show that a check was not
idle, and what is wrong, in words. `test_*.py` beside each of them feeds it histories that break its guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.checkers import (
    cursor_rule,
    h1_ordered,
    h2_complete,
    h3_once,
    h4_durable,
    h5_idempotent,
    h6_one_ending,
    h7_fenced,
    h8_isolated,
    l1_signalled,
)
from tests.checkers.verdict import Verdict
from tests.support.recording import Connection, Recording

Checker = Callable[[Recording], Verdict]

CHECKERS: dict[str, Checker] = {
    "H1": h1_ordered.check,
    "H2": h2_complete.check,
    "H3": h3_once.check,
    "H4": h4_durable.check,
    "H5": h5_idempotent.check,
    "H6": h6_one_ending.check,
    "H7": h7_fenced.check,
    "H8": h8_isolated.check,
    "L1": l1_signalled.check,
    "cursor": cursor_rule.check,
}


def verdicts(recording: Recording) -> dict[str, Verdict]:
    """The word of every checker."""
    return {name: checker(recording) for name, checker in CHECKERS.items()}


def check(recording: Recording) -> dict[str, int]:
    """Raise AssertionError with everything that is wrong; else how many things each checker looked at."""
    found = verdicts(recording)
    wrong = [f"{name}: {trouble}" for name, verdict in found.items() for trouble in verdict.wrong]
    assert not wrong, "\n".join(wrong)
    return {name: verdict.checked for name, verdict in found.items()}


def check_reader(connections: Iterable[Connection]) -> None:
    """`check` for what one reader got."""
    check(Recording.of_reader(connections))
