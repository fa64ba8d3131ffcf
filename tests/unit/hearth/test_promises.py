"""The demo's own checks see red: each promise, broken alone, is named; unbroken, nothing is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hearth.cli.promises import DemoResult, LateReader, Replay, TurnResult, broken_promises


def turn(n: int, how: str, outcome: str = "completed", pid: int = 11, memory: int = 1, text: str = "Ada") -> TurnResult:
    return TurnResult(
        n=n,
        execution_id=f"execution-{n}",
        how=how,
        outcome=outcome,
        agent_pid=pid,
        agent_turns_in_memory=memory,
        agent_session_loaded=n >= 3,
        sandbox_id="sandbox",
        stages_ms={},
        first_output_ms=1.0,
        total_ms=2.0,
        events=3,
        frames=4,
        text=text,
    )


def good() -> DemoResult:
    return DemoResult(
        turns=[
            turn(1, "cold"),
            turn(2, "warm", memory=2),
            turn(3, "restarted", pid=12),
            turn(4, "warm", pid=12),
            turn(5, "warm", pid=12, outcome="stopped"),
        ],
        late_reader=LateReader(complete=True),
        replay=Replay(events=20, contiguous=True, equal=True),
    )


def with_turn(n: int, **changes: object) -> Callable[[DemoResult], DemoResult]:
    def change(result: DemoResult) -> DemoResult:
        turns = [dataclasses.replace(t, **changes) if t.n == n else t for t in result.turns]  # type: ignore[arg-type]
        return dataclasses.replace(result, turns=turns)

    return change


def test_a_good_demo_breaks_nothing() -> None:
    assert broken_promises(good()) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (with_turn(1, how="warm"), "turn 1 should start cold"),
        (with_turn(2, how="cold"), "continue warm"),
        (with_turn(2, agent_pid=99), "agent process of turn 1"),
        (with_turn(2, agent_turns_in_memory=1), "2 turns"),
        (with_turn(2, text="no idea"), "turn 2 should answer Ada"),
        (with_turn(3, how="cold"), "restarted"),
        (with_turn(3, agent_pid=11), "new agent process"),
        (with_turn(3, sandbox_id="other"), "sandbox of turn 2"),
        (with_turn(3, agent_session_loaded=False), "loaded"),
        (with_turn(3, text="who?"), "turn 3 should answer Ada"),
        (with_turn(4, outcome="failed"), "turn 4 should complete"),
        (with_turn(5, outcome="completed"), "should be stopped"),
        (lambda r: dataclasses.replace(r, late_reader=LateReader(complete=False)), "late reader"),
        (lambda r: dataclasses.replace(r, replay=Replay(0, True, True)), "hold events"),
        (lambda r: dataclasses.replace(r, replay=Replay(20, False, True)), "contiguous"),
        (lambda r: dataclasses.replace(r, replay=Replay(20, True, False)), "equal"),
    ],
)
def test_a_broken_promise_is_named(change: Callable[[DemoResult], DemoResult], word: str) -> None:
    assert any(word in sentence for sentence in broken_promises(change(good())))


def good_on_daytona() -> DemoResult:
    asked = dataclasses.replace(
        turn(4, "warm", pid=12),
        tools=[("search", "succeeded"), ("remove", "denied")],
        permissions=[("allowed", "policy"), ("denied", "policy")],
    )
    return dataclasses.replace(good(), turns=[*good().turns[:3], asked], late_reader=None, provider="daytona")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (with_turn(3, how="cold"), "restarted"),
        (with_turn(4, how="cold"), "turn 4 should continue warm"),
        (with_turn(4, permissions=[("allowed", "policy")]), "allow one call and deny one"),
        (with_turn(4, permissions=[("allowed", "ann"), ("denied", "policy")]), "allow one call and deny one"),
        (with_turn(4, tools=[("search", "succeeded"), ("remove", "succeeded")]), "one tool should have run"),
        (with_turn(4, outcome="failed"), "turn 4 should complete"),
        (lambda r: dataclasses.replace(r, replay=Replay(20, True, False)), "equal"),
    ],
)
def test_a_broken_promise_on_daytona_is_named(change: Callable[[DemoResult], DemoResult], word: str) -> None:
    assert broken_promises(good_on_daytona()) == []
    assert any(word in sentence for sentence in broken_promises(change(good_on_daytona())))
