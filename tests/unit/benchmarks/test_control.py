"""What the benchmark of control makes of journals, logs and times: wrong results are seen, right ones are counted."""

from __future__ import annotations

import json

import pytest

from benchmarks import control_away, control_inputs, control_kills, control_stops, control_streams
from benchmarks.control_inputs import Seen, Shape
from benchmarks.control_kills import Killed
from benchmarks.control_stops import Stop
from benchmarks.control_streams import Prompted
from hearth.client import session_key
from hearth.types.v1 import event_pb2


def line(event: str, at: float, pid: int = 1, session: str = "a", **more: str) -> str:
    return json.dumps({"event": event, "pid": pid, "session": session, "time": at, **more})


def test_a_cancel_belongs_to_the_last_prompt_of_its_agent() -> None:
    found = control_streams.prompts(
        [
            line("prompt", 1.0, message_id="e1", text="one"),
            line("prompt", 2.0, pid=2, message_id="e2", text="two"),
            line("cancel", 3.0),
            line("cancel", 4.0),
            line("tool", 4.5),
            line("prompt", 5.0, message_id="e3", text="three"),
            line("cancel", 6.0, pid=3),
        ]
    )
    assert found == [
        Prompted("e1", "one", 1.0, 3.0),
        Prompted("e2", "two", 2.0),
        Prompted("e3", "three", 5.0),
    ]
    assert control_streams.shares({"warm": 3, "cold": 1}, "warm") == 0.75
    assert control_streams.shares({}, "warm") == 0


def stopped(number: int, **changes: object) -> Stop:
    good: dict[str, object] = {
        "execution_id": f"e{number}",
        "asked": 10_000_000_000,
        "seen": 10_100_000_000,
        "ending": "execution_stopped",
        "outcome": "STOPPED",
        "how": "warm",
        "after": "execution_completed",
    }
    return Stop(**{**good, **changes})  # type: ignore[arg-type]


ASKED = {"e1": Prompted("e1", "x", 9.0, 10.01), "e2": Prompted("e2", "x", 9.0, 10.03)}
SETTLED = {"e1": 10_050_000_000, "e2": 10_090_000_000}


def test_stops_are_timed_from_the_request() -> None:
    stops = [stopped(1), stopped(2, how="cold")]
    assert control_stops.check(stops, ASKED, SETTLED) == []
    figures = control_stops.figures_of(stops, ASKED, SETTLED)
    assert figures["stop_to_cancel_p50_ms"] == pytest.approx(10)
    assert figures["stop_to_cancel_p99_ms"] == pytest.approx(30)
    assert figures["stop_to_settled_p99_ms"] == pytest.approx(90)
    assert figures["stop_to_reader_p50_ms"] == pytest.approx(100)
    assert figures["warm_after_stop"] == 0.5
    missed = {target.name for target in control_stops.targets({**figures, "streamed_share": 1.0}) if not target.ok}
    assert missed == {"warm_after_stop"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (stopped(1, ending="execution_completed"), "ended as execution_completed"),
        (stopped(1, outcome="NOT_RUNNING"), "came out as NOT_RUNNING"),
        (stopped(1, after="execution_failed"), "ended as execution_failed"),
        (stopped(3), "did not hear"),
        (stopped(1, asked=10_020_000_000), "before it was asked for"),
        (stopped(1, asked=8_000_000_000), "before it was asked for"),
    ],
)
def test_a_stop_that_is_not_one_is_wrong(wrong: Stop, words: str) -> None:
    (problem,) = control_stops.check([wrong], ASKED, SETTLED)
    assert words in problem
    (problem,) = control_stops.check([stopped(1)], ASKED, {})
    assert "not settled" in problem


def test_of_kills_the_slowest_counts() -> None:
    killed = [Killed(2.0, "execution_lost", 0.5, "execution_completed"), Killed(3.0, "execution_lost", 0.2, "x")]
    assert control_kills.figures_of(killed, "fast_") == {
        "fast_lost_most_s": 3.0,
        "fast_lost_least_s": 2.0,
        "fast_next_most_s": 0.5,
    }
    assert control_kills.check(killed) == ["the turn after that ended as x"]
    assert control_kills.check([Killed(1, "execution_completed", 1, "execution_completed")]) == [
        "a turn whose driver died ended as execution_completed"
    ]


SHAPE = Shape(inputs=3, sessions=1, crashes=1)
ITEMS = ("inputs-0.0", "inputs-0.1", "inputs-0.2")


def seen() -> Seen:
    """All three accepted and run once, the last one lost."""
    return Seen(
        accepted={item: f"i{number}" for number, item in enumerate(ITEMS)},
        runs={f"i{number}": [f"e{number}"] for number in range(3)},
        endings={"e0": ["execution_completed"], "e1": ["execution_completed"], "e2": ["execution_lost"]},
    )


def prompted(*items: str) -> list[Prompted]:
    return [Prompted("e", f"stream 5 words\nitem {item}", 1.0) for item in items]


def test_every_input_reaches_its_agent_once() -> None:
    figures, problems = control_inputs.verdict(seen(), [*prompted(*ITEMS), Prompted("e", "hello", 1.0)], SHAPE)
    assert problems == []
    assert figures["inputs_prompted_once"] == figures["inputs"] == 3
    assert figures["turns_lost"] == 1
    assert all(target.ok for target in control_inputs.targets(figures))


def test_inputs_that_were_asked_twice_never_or_still_wait_are_wrong() -> None:
    _, problems = control_inputs.verdict(seen(), prompted(*ITEMS, ITEMS[0]), SHAPE)
    assert problems == ["inputs-0.0 was prompted 2 times"]
    _, problems = control_inputs.verdict(seen(), prompted(*ITEMS[1:]), SHAPE)
    assert problems == ["inputs-0.0 was never prompted, and ended as ['execution_completed']"]
    # One whose driver died before it asked is told as lost: not wrong, and not what is wanted either.
    figures, problems = control_inputs.verdict(seen(), prompted(*ITEMS[:2]), SHAPE)
    assert problems == []
    assert figures["inputs_lost_unasked"] == 1
    assert [target.name for target in control_inputs.targets(figures) if not target.ok] == ["inputs_lost_unasked"]

    waiting = seen()
    waiting.listed.append("i9")
    twice = seen()
    twice.runs["i1"].append("e9")
    endless = seen()
    del endless.endings["e1"]
    unaccepted = seen()
    del unaccepted.accepted[ITEMS[1]]
    for wrong, words in (
        (waiting, "i9 still waits"),
        (twice, "inputs-0.1 has 2 executions and 1 endings"),
        (endless, "inputs-0.1 has 1 executions and 0 endings"),
        (unaccepted, "inputs-0.1 was never accepted"),
    ):
        _, problems = control_inputs.verdict(wrong, prompted(*ITEMS), SHAPE)
        assert problems == [words]


def test_a_takeover_that_opens_an_execution_again_is_no_second_run() -> None:
    found = Seen()
    started = event_pb2.ExecutionStarted(input_id="i")
    for epoch in (1, 2):
        event = event_pb2.Event(execution_id="e", epoch=epoch, execution_started=started)
        control_inputs.take(found, event)
    completed = event_pb2.ExecutionCompleted()
    control_inputs.take(found, event_pb2.Event(execution_id="e", execution_completed=completed))
    assert found.runs == {"i": ["e"]}
    assert found.endings == {"e": ["execution_completed"]}


def test_what_an_outage_did_to_accepted_messages_is_seen() -> None:
    talked = [control_away.Talked(session_key("p", "s"), ["e1", "e2", "e3"])]
    endings = {"e1": ["execution_completed"], "e2": ["execution_lost"], "e3": ["execution_completed"]}
    started = {"e1": 1, "e2": 1, "e3": 2}
    assert control_away.check(talked, endings, started) == [
        "an accepted message ended as ['execution_lost']",
        "a message was started again",
    ]
    assert control_away.check(talked, {}, {})[0] == "an accepted message ended as None"
