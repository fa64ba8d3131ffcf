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
    repeated,
    resume_queue,
    send_input,
)
from services.pool.control.commands import Aim, NothingRuns, StopIt, stop_decision
from services.pool.rows import Execution, ExecutionState, Key, Request, Session, View

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


def decide(session: Session = SESSION, view: View = IDLE, on_busy: OnBusy = OnBusy.QUEUE, cap: int = 100) -> object:
    return send_input(session, view, b"fp", on_busy, queue_cap=cap)


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
    assert stop_decision(BUSY, Aim(execution_id="e1")) == StopIt(ACTIVE, unstarted=False)
    found = stop_decision(BUSY, Aim(execution_id="e0"))
    assert isinstance(found, HearthError)
    assert found.reason == "EXECUTION_MISMATCH"
    assert found.metadata["execution_id"] == "e1"


@pytest.mark.parametrize(("seen", "meant"), [(3, False), (4, True), (5, True), (9, True)])
def test_a_stop_by_epoch_means_what_its_sender_can_have_seen(seen: int, meant: bool) -> None:
    """It was admitted at 4 and taken over at 6: who saw it at 4 means it."""
    assert isinstance(stop_decision(BUSY, Aim(seen_epoch=seen)), StopIt) is meant


@pytest.mark.parametrize(
    ("state", "ending", "unstarted"),
    [
        (ExecutionState.PENDING, None, True),
        (ExecutionState.PENDING, "x", False),
        (ExecutionState.RUNNING, None, False),
        (ExecutionState.WAITING, None, False),
        (ExecutionState.STOPPING, None, False),
    ],
)
def test_only_what_no_agent_has_seen_is_ended_by_the_pool(
    state: ExecutionState, ending: str | None, unstarted: bool
) -> None:
    active = dataclasses.replace(ACTIVE, state=state, ending_event_id=ending)
    found = stop_decision(View(None, active, 0, 0), Aim(execution_id="e1"))
    assert found == StopIt(active, unstarted=unstarted)
