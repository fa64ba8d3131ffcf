"""What the demo found out, and which of its promises that breaks. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn. Times are milliseconds; `first_output_ms` is None when no text came; `text` is what the agent said."""

    n: int
    execution_id: str
    how: str
    outcome: str
    agent_pid: int
    agent_turns_in_memory: int
    agent_session_loaded: bool
    sandbox_id: str
    stages_ms: dict[str, float]
    first_output_ms: float | None
    total_ms: float
    events: int
    frames: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class LateReader:
    """`complete`: it joined a running answer and still got every event, and frames that add up to each message."""

    complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """The log read from the start: how many events, whether contiguous, whether equal to what the live reader got."""

    events: int
    contiguous: bool
    equal: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DemoResult:
    """All of it."""

    turns: list[TurnResult]
    late_reader: LateReader
    replay: Replay


def broken_promises(result: DemoResult) -> list[str]:
    """One sentence for each promise that did not hold; empty when all did."""
    cold, warm, restarted, shared, stopped = result.turns
    checks = [
        (cold.how == "cold", f"turn 1 should start cold, it was {cold.how!r}"),
        (warm.how == "warm", f"turn 2 should continue warm, it was {warm.how!r}"),
        (warm.agent_pid == cold.agent_pid != 0, "turn 2 should be answered by the agent process of turn 1"),
        (warm.agent_turns_in_memory == 2, f"the agent should hold 2 turns, it held {warm.agent_turns_in_memory}"),
        ("Ada" in warm.text, f"turn 2 should answer Ada, it said {warm.text!r}"),
        (restarted.how == "restarted", f"turn 3 should be restarted, it was {restarted.how!r}"),
        (restarted.agent_pid not in (0, warm.agent_pid), "turn 3 should be answered by a new agent process"),
        (restarted.sandbox_id == warm.sandbox_id != "", "turn 3 should run in the sandbox of turn 2"),
        (restarted.agent_session_loaded, "turn 3 should have loaded the agent's session from disk"),
        ("Ada" in restarted.text, f"turn 3 should answer Ada, it said {restarted.text!r}"),
        (stopped.outcome == "stopped", f"turn 5 should be stopped, it was {stopped.outcome!r}"),
        (result.late_reader.complete, "the late reader should have seen all of the answer that it joined"),
        (result.replay.events > 0, "the log should hold events"),
        (result.replay.contiguous, "the replay should be contiguous"),
        (result.replay.equal, "the replay should equal what the reader saw live"),
    ]
    checks += [
        (turn.outcome == "completed", f"turn {turn.n} should complete, it was {turn.outcome!r}")
        for turn in (cold, warm, restarted, shared)
    ]
    return [sentence for held, sentence in checks if not held]
