"""What becomes of a request, for every state it may find the session in."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from services.chassis.errors import HearthError
from services.pool.control.admission import (
    Enqueue,
    OnBusy,
    Refuse,
    Repeat,
    Start,
    Steer,
    Steering,
    repeated,
    resume_queue,
    send_input,
    send_now,
)
from services.pool.control.cancels import unstarted
from services.pool.control.commands import FORSAKEN_AFTER, Aim, NothingRuns, StopIt, Unask, late, stop_decision
from services.pool.control.upkeep import Watched
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    Input,
    InputState,
    Key,
    Outcome,
    Request,
    Session,
    View,
)
from services.pool.upkeep_rows import Forsaken

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = Session(Key("p", "s"), 4, None, False, b"", None, None, None, 0, 0, NOW, NOW, None)
ACTIVE = Execution(
    "e1",
    Key("p", "s"),
    6,
    4,
    ExecutionState.RUNNING,
    None,
    "",
    "i1",
    None,
    1,
    "h",
    None,
    None,
    None,
    "",
    NOW,
    None,
    None,
    0,
)
IDLE = View(None, None, 0, 0)
BUSY = View(None, ACTIVE, 2, 0)
ASKED = View(None, None, 0, 1)
CANCEL = Command("c1", Key("p", "s"), CommandKind.CANCEL, "e1", CommandState.PENDING, None, 0, None, None, NOW, None)
BOUND = dataclasses.replace(CANCEL, kind=CommandKind.STEER, steer_input_id="i7")
WAITING = Input("i2", Key("p", "s"), InputState.PENDING, b"", None, None, None, None, "", NOW, 2)


def decide(
    session: Session = SESSION,
    view: View = IDLE,
    on_busy: OnBusy = OnBusy.QUEUE,
    cap: int = 100,
    cancel: Command | None = None,
    meant: str = "",
) -> object:
    return send_input(session, view, b"fp", on_busy, queue_cap=cap, cancel=cancel, meant=meant)


def reason(decision: object) -> str:
    assert isinstance(decision, Refuse)
    return decision.error.reason


def test_idle_starts() -> None:
    assert decide() == Start(resumes=False)


def test_idle_with_a_paused_queue_starts_and_wakes_it() -> None:
    paused = dataclasses.replace(SESSION, queue_paused=True)
    assert decide(paused, View(None, None, 3, 0)) == Start(resumes=True)
    assert decide(paused) == Start(resumes=False)


def test_busy_waits_behind_those_that_wait() -> None:
    assert decide(view=BUSY) == Enqueue(3)
    # Open questions of a paused execution keep the session busy.
    assert decide(view=ASKED) == Enqueue(1)


def test_busy_and_rejecting_is_refused() -> None:
    found = decide(view=BUSY, on_busy=OnBusy.REJECT)
    assert reason(found) == "SESSION_BUSY"
    assert isinstance(found, Refuse)
    assert found.error.metadata == {"execution_id": "e1"}
    assert reason(decide(view=ASKED, on_busy=OnBusy.REJECT)) == "SESSION_BUSY"


def test_a_full_queue_refuses() -> None:
    assert reason(decide(view=BUSY, cap=2)) == "QUEUE_FULL"
    assert decide(view=BUSY, cap=3) == Enqueue(3)


def test_a_repeated_request_is_found_before_anything_else() -> None:
    known = Request("SendInput", b"fp", "i9", None)
    for view in (IDLE, BUSY, ASKED):
        assert decide(view=dataclasses.replace(view, request=known), on_busy=OnBusy.REJECT, cap=0) == Repeat(known)


@pytest.mark.parametrize(
    "known", [Request("SendInput", b"other", "i9", None), Request("StopExecution", b"fp", None, "c")]
)
def test_a_request_id_of_something_else_is_refused(known: Request) -> None:
    assert reason(decide(view=dataclasses.replace(IDLE, request=known))) == "REQUEST_ID_REUSED"


def test_a_deleted_session_refuses_even_a_retry() -> None:
    deleted = dataclasses.replace(SESSION, deleted_at=NOW)
    known = dataclasses.replace(IDLE, request=Request("SendInput", b"fp", "i9", None))
    assert reason(decide(deleted, known)) == "SESSION_DELETED"
    assert reason(repeated(deleted, IDLE, "KillSession", b"x")) == "SESSION_DELETED"


def test_resume_starts_only_what_waits_in_an_idle_session() -> None:
    assert resume_queue(View(None, None, 1, 0))
    assert not resume_queue(IDLE)
    assert not resume_queue(BUSY)
    assert not resume_queue(View(None, None, 1, 1))


def test_a_stop_by_id() -> None:
    assert stop_decision(IDLE, Aim(execution_id="e1")) == NothingRuns()
    assert stop_decision(BUSY, Aim(execution_id="e1")) == StopIt(ACTIVE)
    found = stop_decision(BUSY, Aim(execution_id="e0"))
    assert isinstance(found, HearthError)
    assert found.reason == "EXECUTION_MISMATCH"
    assert found.metadata["execution_id"] == "e1"


@pytest.mark.parametrize(("seen", "meant"), [(3, False), (4, True), (5, True), (9, True)])
def test_a_stop_by_epoch_means_what_its_sender_can_have_seen(seen: int, meant: bool) -> None:
    """It was admitted at 4 and taken over at 6: who saw it at 4 means it."""
    assert isinstance(stop_decision(BUSY, Aim(seen_epoch=seen)), StopIt) is meant


@pytest.mark.parametrize(
    ("state", "ending", "alone"),
    [
        (ExecutionState.PENDING, None, True),
        (ExecutionState.PENDING, "x", False),
        (ExecutionState.RUNNING, None, False),
        (ExecutionState.WAITING, None, False),
        (ExecutionState.STOPPING, None, False),
    ],
)
def test_only_what_no_agent_has_seen_is_ended_by_the_pool(
    state: ExecutionState, ending: str | None, alone: bool
) -> None:
    assert unstarted(dataclasses.replace(ACTIVE, state=state, ending_event_id=ending)) is alone


@pytest.mark.parametrize(
    ("aim", "meant"), [(Aim("e1"), True), (Aim("e0"), False), (Aim(seen_epoch=4), True), (Aim(seen_epoch=3), False)]
)
def test_n08_a_stop_of_a_paused_execution_is_aimed_like_any_other(aim: Aim, meant: bool) -> None:
    paused = dataclasses.replace(ACTIVE, state=ExecutionState.TERMINAL, outcome=Outcome.PAUSED)
    found = stop_decision(ASKED, aim, paused)
    assert (found == Unask(paused)) is meant
    assert isinstance(found, HearthError) is not meant


@pytest.mark.parametrize(
    ("view", "cancel", "meant", "decision"),
    [
        (IDLE, None, "", Start(resumes=False)),
        # What a paused execution asks is closed, and does not keep it waiting.
        (ASKED, None, "", Start(resumes=False, unasks=True)),
        (BUSY, None, "", Steer(ACTIVE, None)),
        (BUSY, None, "e1", Steer(ACTIVE, None)),
        # It joins a Stop that is under way, but not one that another input waits for.
        (BUSY, CANCEL, "", Steer(ACTIVE, CANCEL)),
        (BUSY, BOUND, "", Enqueue(3)),
        # What it was to replace has ended: it is next after what runs by now.
        (BUSY, None, "e0", Enqueue(1, first=True)),
        (BUSY, CANCEL, "e0", Enqueue(1, first=True)),
    ],
)
def test_n115_n117_a_steer(view: View, cancel: Command | None, meant: str, decision: object) -> None:
    assert decide(view=view, on_busy=OnBusy.STEER, cancel=cancel, meant=meant) == decision


def test_a_steer_is_refused_by_a_full_queue() -> None:
    """Nothing is stopped for what cannot be kept."""
    assert reason(decide(view=BUSY, on_busy=OnBusy.STEER, cap=2)) == "QUEUE_FULL"


@pytest.mark.parametrize(
    ("view", "cancel", "meant", "decision"),
    [
        (View(None, None, 2, 0), None, "", Start(resumes=True)),
        (View(None, None, 1, 0), None, "", Start(resumes=False)),
        (View(None, None, 1, 1), None, "", Start(resumes=False, unasks=True)),
        (BUSY, None, "e1", Steer(ACTIVE, None)),
        (BUSY, CANCEL, "", Steer(ACTIVE, CANCEL)),
        (
            BUSY,
            dataclasses.replace(BOUND, steer_input_id="i2"),
            "",
            Steering(dataclasses.replace(BOUND, steer_input_id="i2")),
        ),
    ],
)
def test_n119_an_input_sent_at_once(view: View, cancel: Command | None, meant: str, decision: object) -> None:
    assert send_now(view, WAITING, cancel, paused=True, meant=meant) == decision


def test_n119_an_input_sent_at_once_is_refused_beside_another_and_for_what_was_not_meant() -> None:
    other = send_now(BUSY, WAITING, BOUND, paused=True)
    assert reason(other) == "SESSION_BUSY"
    assert isinstance(other, Refuse)
    assert other.error.metadata["input_id"] == "i7"
    assert reason(send_now(BUSY, WAITING, None, paused=True, meant="e0")) == "EXECUTION_MISMATCH"


def ended(outcome: Outcome) -> Execution:
    return dataclasses.replace(ACTIVE, state=ExecutionState.TERMINAL, outcome=outcome)


@pytest.mark.parametrize(
    ("kind", "target", "newer", "settled"),
    [
        (CommandKind.CANCEL, ACTIVE, False, None),
        (CommandKind.CANCEL, ended(Outcome.STOPPED), True, (CommandState.APPLIED, CommandOutcome.STOPPED)),
        (CommandKind.STEER, ended(Outcome.LOST), True, (CommandState.OBSOLETE, CommandOutcome.LOST)),
        (CommandKind.CANCEL, ended(Outcome.COMPLETED), False, (CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)),
        (CommandKind.CANCEL, ended(Outcome.FAILED), True, (CommandState.OBSOLETE, CommandOutcome.SUPERSEDED)),
        (CommandKind.CANCEL, None, False, (CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)),
        (CommandKind.UNKNOWN, ended(Outcome.STOPPED), False, (CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)),
    ],
)
def test_n05_n26_a_command_that_outlived_its_target(
    kind: CommandKind, target: Execution | None, newer: bool, settled: object
) -> None:
    assert late(dataclasses.replace(CANCEL, kind=kind), target, newer=newer) == settled


def test_n26_a_command_is_given_up_after_a_time_in_which_nobody_was_there_without_a_gap() -> None:
    watched, one = Watched(), Forsaken("c1", Key("p", "s"), exhausted=False)
    step = FORSAKEN_AFTER / 9
    for number in range(9):
        assert watched.due(number * step, [one]) == []
    assert watched.due(9 * step, [one]) == [one]
    # Somebody was there in between, or whoever looks was away: then it counts anew.
    assert watched.due(10 * step, []) == []
    assert watched.due(11 * step, [one]) == []
    assert watched.due(11 * step + FORSAKEN_AFTER, [one]) == []
    assert watched.due(11 * step + FORSAKEN_AFTER + 1, [dataclasses.replace(one, exhausted=True)]) != []
