"""What Hearth guarantees about sessions, as checks of a `ControlRecording`: C1 to C5, P1, H6; H1 and H6 of each log."""

from __future__ import annotations

from collections.abc import Callable

from tests.checkers import (
    c1_durable,
    c2_one_winner,
    c3_aimed,
    c4_inputs,
    c5_approved_once,
    h1_ordered,
    h6_one_ending,
    h6_settled,
    p1_continuation,
)
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording
from tests.support.recording import Recording

CHECKERS: dict[str, Callable[[ControlRecording], Verdict]] = {
    "C1": c1_durable.check,
    "C2": c2_one_winner.check,
    "C3": c3_aimed.check,
    "C4": c4_inputs.check,
    "C5": c5_approved_once.check,
    "P1": p1_continuation.check,
    "H6": h6_settled.check,
    "H1 of logs": lambda recording: h1_ordered.check(logs_of(recording)),
    "H6 of logs": lambda recording: h6_one_ending.check(logs_of(recording)),
}


def logs_of(recording: ControlRecording) -> Recording:
    """The logs of a run, for the checkers of events."""
    return Recording(logs=recording.logs, settled=recording.settled)


def check(recording: ControlRecording) -> dict[str, int]:
    """Raise AssertionError with everything that is wrong; else how many things each checker looked at."""
    found = {name: checker(recording) for name, checker in CHECKERS.items()}
    wrong = [f"{name}: {trouble}" for name, verdict in found.items() for trouble in verdict.wrong]
    assert not wrong, "\n".join(wrong)
    return {name: verdict.checked for name, verdict in found.items()}
