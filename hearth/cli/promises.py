"""What the demo found out, and which of its promises that breaks. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn. Times are milliseconds; `first_output_ms` is None when no text came; `text` is what the agent said.

    `tools` are name and status of the tool calls that ended; `permissions` what became of what the agent asked for, and
    who or what decided.
    """

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
    tools: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    permissions: list[tuple[str, str]] = dataclasses.field(default_factory=list)


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
    """All of it. `provider` is `local` or `daytona`; on the latter there is no late reader."""

    turns: list[TurnResult]
    late_reader: LateReader | None
    replay: Replay
    provider: str = "local"


def broken_promises(result: DemoResult) -> list[str]:
    """One sentence for each promise that did not hold; empty when all did."""
    checks = [*_of_the_ladder(*result.turns[:3]), *_of_the_replay(result.replay)]
    completed = result.turns[:4]
    if result.provider == "daytona":
        checks += _of_permissions(result.turns[3])
    else:
        stopped = result.turns[4]
        late = result.late_reader is not None and result.late_reader.complete
        checks += [
            (stopped.outcome == "stopped", f"turn 5 should be stopped, it was {stopped.outcome!r}"),
            (late, "the late reader should have seen all of the answer that it joined"),
        ]
    checks += [
        (turn.outcome == "completed", f"turn {turn.n} should complete, it was {turn.outcome!r}") for turn in completed
    ]
    return [sentence for held, sentence in checks if not held]


def _of_the_ladder(cold: TurnResult, warm: TurnResult, restarted: TurnResult) -> list[tuple[bool, str]]:
    return [
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
    ]


def _of_the_replay(replay: Replay) -> list[tuple[bool, str]]:
    return [
        (replay.events > 0, "the log should hold events"),
        (replay.contiguous, "the replay should be contiguous"),
        (replay.equal, "the replay should equal what the reader saw live"),
    ]


def _of_permissions(asked: TurnResult) -> list[tuple[bool, str]]:
    return [
        (asked.how == "warm", f"turn 4 should continue warm, it was {asked.how!r}"),
        (
            asked.permissions == [("allowed", "policy"), ("denied", "policy")],
            f"the policy should allow one call and deny one, it was {asked.permissions}",
        ),
        (
            sorted(status for _, status in asked.tools) == ["denied", "succeeded"],
            f"one tool should have run and one not, it was {asked.tools}",
        ),
    ]
