"""What the benchmark of turns makes of what it saw: Hearth's own time, and what it does not let pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import warm, warm_daytona, warm_turns
from benchmarks.warm_turns import Turn
from hearth.types.v1 import content_pb2, event_pb2
from tests.support.daytona.journal import Entry

MS = 1_000_000


def turn(number: int = 1, **changes: object) -> Turn:
    values: dict[str, object] = {
        "execution_id": f"e{number}",
        "how": "warm",
        "ending": "execution_completed",
        "agent_pid": 7,
        "turns_in_memory": number,
        "sent": 1_000 * MS,
        "prompted": 1_010 * MS,
        "answered": 1_300 * MS,
        "seen": 1_304 * MS,
        "settled": 1_305 * MS,
        "stages": {"acquire": 0.004},
    }
    return Turn(**{**values, **changes})  # type: ignore[arg-type]


def test_the_agents_time_does_not_count() -> None:
    assert turn().to_prompt == pytest.approx(0.010)
    assert turn().to_settled == pytest.approx(0.005)
    assert turn().overhead == pytest.approx(0.015)


def test_a_turn_is_read_from_its_ending() -> None:
    report = {
        "hearth.dev/agent": {"pid": 9, "turns_in_memory": 3},
        "hearth.dev/times": {"prompted_ns": 20, "answered_ns": 30},
    }
    summary = event_pb2.EndingSummary(
        how="warm",
        agent_report_json=json.dumps(report),
        stages=[content_pb2.StageTiming(stage="acquire", duration_us=4_000)],
    )
    event = event_pb2.Event(execution_id="e", execution_completed=event_pb2.ExecutionCompleted(summary=summary))
    found = warm_turns.read_turn(event, sent=10, seen=40)
    assert (found.execution_id, found.how, found.ending) == ("e", "warm", "execution_completed")
    assert (found.agent_pid, found.turns_in_memory) == (9, 3)
    assert (found.sent, found.prompted, found.answered, found.seen) == (10, 20, 30, 40)
    assert found.stages == {"acquire": 0.004}
    assert warm_turns.ending_of(event_pb2.Event(message_completed=event_pb2.MessageCompleted())) == ""


def test_settlements_come_from_the_spans_of_their_turns() -> None:
    def lines() -> Iterator[str]:
        for name, span, parent, execution in (
            ("turn.settle", "s1", "t1", None),
            ("turn.settle", "s2", "unknown", None),
            ("turn", "t1", "x", "e1"),
            ("turn", "t2", "x", "e2"),
        ):
            attributes = {"hearth.execution": execution} if execution else {}
            yield json.dumps(
                {"name": name, "span_id": span, "parent_id": parent, "end_ns": 5, "attributes": attributes}
            )

    assert warm_turns.settlements(lines()) == {"e1": 5}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"how": "cold"}, "was cold, not warm"),
        ({"how": ""}, "was unstarted, not warm"),
        ({"ending": "execution_failed"}, "ended as execution_failed"),
        ({"prompted": 0}, "did not say when it was asked"),
        ({"settled": 0}, "was not settled"),
    ],
)
def test_a_turn_that_was_not_what_it_should_be_is_told(changes: dict[str, Any], problem: str) -> None:
    problems = warm_turns.check([turn(**changes)], "warm")
    assert [problem in found for found in problems] == ([True] if problem else [])


def test_warm_turns_of_one_session_are_of_one_process_that_remembers() -> None:
    assert warm_turns.check_memory([turn(1), turn(2), turn(3)]) == []
    assert warm_turns.check_memory([]) == []
    assert warm_turns.check_memory([turn(1), turn(2, agent_pid=8)])
    assert warm_turns.check_memory([turn(1), turn(1)])


def test_figures_and_targets() -> None:
    figures = warm.figures_of([turn(1), turn(2)], "warm_", {"pool": 0.02})
    assert figures["warm_p50_ms"] == pytest.approx(15)
    assert figures["warm_to_prompt_p50_ms"] == pytest.approx(10)
    assert figures["warm_acquire_ms"] == pytest.approx(4)
    assert figures["warm_pool_cpu_ms"] == pytest.approx(10)
    met = {
        "warm_p50_ms": 15,
        "warm_p99_ms": 50,
        "at_once_p50_ms": 40,
        "cold_p50_ms": 1500,
        "parked_growth_mib": 60,
        **{f"daytona_{how}_added_ms": 60 for how in warm_daytona.HOWS},
        "daytona_warm_of_cold": 0.02,
        "daytona_restarted_of_cold": 0.6,
    }
    assert all(target.ok for target in warm.targets(met))
    assert not any(target.ok for target in warm.targets({}))


def entry(kind: str, at: float, sandbox: str = "b", **data: object) -> Entry:
    return Entry(1, at, at + 100.0, kind, sandbox, "s", data)


def call(began: float, ended: float, path: str = "/api/sandbox", **data: Any) -> Entry:
    values: dict[str, Any] = {"call": "create", "method": "POST", "status": 200, **data}
    return entry("call", ended, path=path, began=began, **values)


def test_time_in_the_court_of_the_stand_in_is_not_hearths() -> None:
    # Sent at 1 s of the stand-in's clock, prompted at 10 s; its wall clock is 100 s ahead.
    found = turn(sent=101_000 * MS, prompted=110_000 * MS, answered=110_000 * MS, settled=110_500 * MS)
    entries = [
        call(0.5, 1.5),  # half of it was before
        entry("state", 2.0, old="", new="creating"),
        entry("state", 4.0, old="creating", new="started"),
        call(3.5, 4.5),  # while it was created
        call(5.0, 9.0, "/preview/3000-b/v1/acp/x", call="preview", method="GET"),  # a stream
        call(6.0, 6.1, "/preview/3000-b/v1/health", call="preview", method="GET", status=502),
        call(6.9, 7.0, "/preview/3000-b/v1/health", call="preview", method="GET", status=502),
        call(7.2, 7.3, "/preview/3000-b/v1/health", call="preview", method="GET"),
        call(9.5, 11.0, "/preview/3000-b/v1/acp/x", call="preview"),
    ]
    # 0.5 of the first call, 2.5 of the creation and the call in it, 1.0 until the daemon was there, 0.1 to see that,
    # 0.5 of the prompt.
    assert warm_daytona.theirs(entries, found) == pytest.approx(4.6)
    assert warm_daytona.theirs([], found) == 0.0
    of_how = {how: [found] for how in warm_daytona.HOWS}
    figures = warm_daytona.figures_of(of_how, entries)
    assert figures["daytona_cold_ms"] == pytest.approx(9500)
    assert figures["daytona_cold_added_ms"] == pytest.approx(4900)
    assert figures["daytona_warm_of_cold"] == 1.0


def test_what_overlaps_counts_once() -> None:
    assert warm_daytona.covered([(1, 3), (2, 4), (2, 3), (6, 5), (7, 8)]) == 4
    assert warm_daytona.covered([]) == 0
