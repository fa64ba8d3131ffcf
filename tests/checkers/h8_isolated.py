"""H8 isolated: a bad record fails alone, and nobody's answer waits for somebody else's trouble."""

from __future__ import annotations

from hearth.history.v1 import history_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import Append, Recording

# How long an answer may take while nothing is away: far above what a loaded machine needs, below any time-out.
PATIENCE_SECONDS = 10.0
# What a producer needs to notice that what was away is back.
_RECOVERY_SECONDS = 5.0

_INVALID = history_pb2.APPEND_OUTCOME_INVALID
# Reasons that a well-formed event may be refused for; they come from where the log stands.
_FROM_STATE = frozenset({"UNKNOWN_EXECUTION", "LOG_DELETED"})


def check(recording: Recording) -> Verdict:
    """Malformed events are refused, sound ones beside them are not, and answers come while nothing is away."""
    verdict = Verdict()
    for append in recording.appends:
        if append.result is not None:
            _judged_by_itself(append, append.result, verdict)
            _not_delayed(append, recording, verdict)
    for key, log in recording.logs.items():
        bad = {item.event.event_id for item in recording.appends if item.session == key and not item.sound}
        for item in log.items:
            verdict.expect(item.event.event_id not in bad, f"{key}: {item.event.event_id} is malformed and stored")
    return verdict


def _judged_by_itself(append: Append, result: history_pb2.AppendResult, verdict: Verdict) -> None:
    what = f"{append.session}: {append.event.type} {append.event.event_id}"
    if append.sound:
        refused = result.outcome == _INVALID and result.reason not in _FROM_STATE
        verdict.expect(not refused, f"{what} is sound and was refused: {result.reason} {list(result.problems)}")
    else:
        name = history_pb2.AppendOutcome.Name(result.outcome)
        verdict.expect(result.outcome == _INVALID, f"{what} is malformed and was answered {name}")


def _not_delayed(append: Append, recording: Recording, verdict: Verdict) -> None:
    took = append.answered_at - append.began_at
    away = any(
        begin < append.answered_at and append.began_at < end + _RECOVERY_SECONDS for begin, end in recording.outages
    )
    verdict.expect(
        away or took <= PATIENCE_SECONDS,
        f"{append.session}: {append.event.event_id} was answered after {took:.1f} s, while nothing was away",
    )
