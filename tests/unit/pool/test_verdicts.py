"""How a turn ended, for everything an agent can answer."""

from __future__ import annotations

import pytest

from services.pool.harness.assembler import TurnEnd
from services.pool.harness.port import PromptResult
from services.pool.turns.verdicts import Answer, Asked, Kind, Summary, ending, verdict


def result(reason: str) -> PromptResult:
    return PromptResult(reason, None, "")


@pytest.mark.parametrize(
    ("answer", "kind", "reason", "answered"),
    [
        (Answer(Asked.NOBODY, result("end_turn"), produced=True), Kind.COMPLETED, "end_turn", True),
        (Answer(Asked.NOBODY, result("max_tokens")), Kind.COMPLETED, "max_tokens", True),
        (Answer(Asked.NOBODY, result("end_turn")), Kind.FAILED, "EMPTY_TURN", False),
        # Nobody asked for it: a rejected tool ends some agents' turns so.
        (Answer(Asked.NOBODY, result("cancelled"), produced=True), Kind.COMPLETED, "cancelled", True),
        (Answer(Asked.USER, result("cancelled")), Kind.STOPPED, "user", True),
        (Answer(Asked.SHUTDOWN, result("cancelled")), Kind.STOPPED, "shutdown", True),
        # The agent was faster than the Stop, or ended otherwise: its own answer counts.
        (Answer(Asked.USER, result("end_turn"), produced=True), Kind.COMPLETED, "end_turn", True),
        (Answer(Asked.USER, code="AGENT_EXITED"), Kind.FAILED, "AGENT_EXITED", False),
        # It did not answer at all.
        (Answer(Asked.USER), Kind.STOPPED, "user", False),
        (Answer(Asked.NOBODY, code="AGENT_ERROR"), Kind.FAILED, "AGENT_ERROR", False),
    ],
)
def test_verdict(answer: Answer, kind: Kind, reason: str, answered: bool) -> None:
    found = verdict(answer)
    assert (found.kind, found.reason, found.answered) == (kind, reason, answered)
    event = ending(found, Summary([], "warm", "box"), command_id="c")
    assert event.type == f"execution.{kind.value}"


def test_a_turn_that_waits_for_people_is_paused_with_what_is_open() -> None:
    found = verdict(Answer(Asked.SHUTDOWN, produced=True, paused=("a", "b")))
    assert (found.kind, found.output, found.answered) == (Kind.PAUSED, TurnEnd.PAUSED, False)
    event = ending(found, Summary([], "warm", "box"))
    assert event.type == "execution.paused"
    assert list(event.execution_paused.interaction_ids) == ["a", "b"]
    assert event.execution_paused.summary.sandbox_id == "box"


def test_a_lost_stream_truncates_and_is_incomplete() -> None:
    found = verdict(Answer(Asked.NOBODY, code="HARNESS_STREAM_LOST", produced=True))
    assert found.output is TurnEnd.TRUNCATED
    event = ending(found, Summary([], "cold", "box"))
    assert event.execution_failed.summary.manifest.incomplete


def test_a_report_that_is_too_long_is_left_out() -> None:
    found = verdict(Answer(Asked.NOBODY, result("end_turn"), produced=True))
    long = ending(found, Summary([], "cold", "box", report_json='"' + "x" * 70_000 + '"'))
    assert long.execution_completed.summary.agent_report_json == ""
    short = ending(found, Summary([], "cold", "box", report_json="{}"))
    assert short.execution_completed.summary.agent_report_json == "{}"
