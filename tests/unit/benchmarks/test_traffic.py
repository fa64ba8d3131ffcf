"""The verdicts over random traffic see what must not be: fed a broken log or journal, each of them is red."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks import traffic, traffic_verdicts
from benchmarks.traffic_people import Story
from hearth.types.v1 import content_pb2, event_pb2
from tests.support.daytona import Entry, checks

SESSION = "s1-1"
_numbers = count(1)


def started(execution: str, input_id: str, at: float = 100.0) -> event_pb2.Event:
    event = event_pb2.Event(execution_id=execution, scope=event_pb2.EVENT_SCOPE_RUNNER)
    event.execution_started.input_id = input_id
    event.occurred_at.FromNanoseconds(int(at * 1e9))
    return event


def said(execution: str) -> event_pb2.Event:
    event = event_pb2.Event(execution_id=execution, scope=event_pb2.EVENT_SCOPE_RUNNER)
    event.message_completed.role = content_pb2.ROLE_AGENT
    return event


def completed(execution: str, how: str = "cold") -> event_pb2.Event:
    event = event_pb2.Event(execution_id=execution)
    event.execution_completed.summary.how = how
    stage = event.execution_completed.summary.stages.add(stage="acquire")
    stage.how = "created"
    return event


def failed(execution: str, code: str, how: str = "", at: float = 110.0) -> event_pb2.Event:
    event = event_pb2.Event(execution_id=execution)
    event.execution_failed.code = code
    event.execution_failed.summary.how = how
    event.occurred_at.FromNanoseconds(int(at * 1e9))
    return event


def stopped(execution: str, reason: str) -> event_pb2.Event:
    event = event_pb2.Event(execution_id=execution)
    event.execution_stopped.reason = reason
    return event


def removed(input_id: str) -> event_pb2.Event:
    event = event_pb2.Event()
    event.input_removed.input_id = input_id
    return event


def fault(call: str, at: float, session: str = SESSION) -> Entry:
    return Entry(next(_numbers), at, at, "fault", "box", session, {"call": call, "fault": "drop"})


def check(*log: event_pb2.Event, faults: tuple[Entry, ...] = (), **story: object) -> list[str]:
    accepted = ["i1"]
    return traffic_verdicts.check_story(
        Story(SESSION, **{"accepted": accepted, "log": list(log), **story}),  # type: ignore[arg-type]
        faults,
    )


def test_a_sound_log_is_sound() -> None:
    assert check(started("e1", "i1"), said("e1"), completed("e1")) == []
    assert check(removed("i1")) == []
    assert check(started("e1", "i1"), stopped("e1", "user"), stops=1) == []
    assert check(started("e1", "i1"), stopped("e1", "killed"), kills=1) == []


@pytest.mark.parametrize(
    "log",
    [
        (),
        (started("e1", "i1"),),
        (started("e1", "i1"), completed("e1"), completed("e1")),
        (started("e1", "i1"), completed("e1"), started("e2", "i1"), completed("e2")),
        (started("e1", "i1"), completed("e1"), removed("i1")),
        (started("e1", "i1"), completed("e1"), started("e2", "i2"), completed("e2")),
        (removed("i1"), completed("e1")),
        (started("e1", "i1"), event_pb2.Event(execution_id="e1", execution_lost=event_pb2.ExecutionLost())),
        (started("e1", "i1"), stopped("e1", "user")),
        (started("e1", "i1"), stopped("e1", "runner lost")),
    ],
    ids=[
        "lost",
        "endless",
        "two endings",
        "twice",
        "removed too",
        "stranger",
        "unstarted",
        "run lost",
        "unasked",
        "taken",
    ],
)
def test_a_broken_log_is_seen(log: tuple[event_pb2.Event, ...]) -> None:
    assert check(*log) != []


@pytest.mark.parametrize(
    ("code", "faults", "sound"),
    [
        ("HARNESS_UNREACHABLE", (fault("preview", 105),), True),
        ("PROVIDER_UNAVAILABLE", (fault("create", 105, session=""),), True),
        ("PROVIDER_UNAVAILABLE", (fault("preview", 105),), False),
        ("HARNESS_UNREACHABLE", (), False),
        ("HARNESS_UNREACHABLE", (fault("preview", 90),), False),
        ("HARNESS_UNREACHABLE", (fault("preview", 105, session="other"),), False),
        ("RUN_DEFECT", (fault("preview", 105),), False),
    ],
)
def test_a_failure_needs_a_fault_of_its_kind_and_time(code: str, faults: tuple[Entry, ...], *, sound: bool) -> None:
    assert (check(started("e1", "i1"), failed("e1", code), faults=faults) == []) is sound


def test_a_kept_sandbox_never_fails_a_turn_that_said_nothing() -> None:
    faults = (fault("preview", 105),)
    log = started("e1", "i1"), failed("e1", "HARNESS_UNREACHABLE", "warm")
    assert check(*log, faults=faults) != []
    assert check(log[0], said("e1"), log[1], faults=faults) == []


def journal(*steps: tuple[float, str, dict[str, object]], box: str = "box") -> Iterator[Entry]:
    for at, kind, data in steps:
        yield Entry(next(_numbers), at, at, kind, box, SESSION, data)


def state(at: float, old: str, new: str) -> tuple[float, str, dict[str, object]]:
    return at, "state", {"old": old, "new": new, "cause": "test"}


def call(at: float, name: str) -> tuple[float, str, dict[str, object]]:
    return at, "call", {"call": name, "began": at}


def traffic_of(begin: float, end: float) -> tuple[float, str, dict[str, object]]:
    return begin, "harness", {"harness": True, "accepted": True, "began": begin, "ended": end}


def test_a_sandbox_is_parked_from_the_word_of_it_to_its_next_use_or_end() -> None:
    entries = list(
        journal(
            state(0, "", "creating"),
            traffic_of(5, 10),
            call(11, "activity"),
            # Told again in a turn: it is not parked by that.
            call(20, "preview"),
            traffic_of(20, 30),
            call(25, "activity"),
            call(31, "activity"),
            call(31.5, "activity"),
            state(40, "started", "stopping"),
            state(42, "stopping", "stopped"),
        )
    )
    spans = [(span.begin, span.end) for span in traffic_verdicts.parked(entries, 100)]
    assert (11, 19) in spans
    assert (31, 42) in spans
    assert not any(20 <= begin < 30 for begin, _ in spans)
    assert checks.most_at_once(traffic_verdicts.parked(entries, 100)) == 1


def test_what_runs_on_is_parked_until_now() -> None:
    entries = [
        *journal(state(0, "", "creating"), traffic_of(5, 10), call(11, "activity")),
        *journal(state(0, "", "creating"), traffic_of(5, 10), call(12, "activity"), box="other"),
    ]
    assert checks.most_at_once(traffic_verdicts.parked(entries, 100)) == 2


def test_outcomes_are_counted() -> None:
    story = Story(SESSION, log=[completed("e1"), failed("e2", "AGENT_EXITED"), stopped("e3", "user")])
    found = traffic_verdicts.outcomes([story, Story("gone")])
    assert found["turns"] == 3
    assert (found["how_cold"], found["how_never_asked"], found["acquire_created"]) == (1, 2, 1)
    assert (found["ended_completed"], found["failed_AGENT_EXITED"], found["ended_stopped"]) == (1, 1, 1)


def test_faults_that_never_fired_count_as_such() -> None:
    fired = traffic_verdicts.fired({"drop": 3, "create/lose_reply": 1, "create/fail_after": 1})
    assert (fired["fired_drop"], fired["fired_stuck"], fired["fired_orphan_on_create"]) == (3, 0, 2)


def test_a_run_in_which_too_little_went_wrong_misses_its_target() -> None:
    figures = {"overlaps": 0.0, "parked_most": 3, "slots_most": 1, "running_after": 0, "processes_left": 0}
    missed = [
        target.name for target in traffic.targets({**figures, "fired_least": 19}, traffic.Shape(cap=2)) if not target.ok
    ]
    assert missed == ["parked_most", "fired_least", "cap_reached"]
