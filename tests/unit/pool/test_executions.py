"""The tables of an execution's life: transitions, what an ending sets in motion, what a takeover does."""

from __future__ import annotations

import pytest

from services.pool.control.executions import (
    ENDING_TYPES,
    MAX_TRIES,
    Queue,
    Takeover,
    Winner,
    cancel_outcome,
    finished_by,
    leading_to,
    queue_after,
    takeover,
)
from services.pool.rows import CommandOutcome, ExecutionState, Finished, Outcome

STATES = list(ExecutionState)


def test_only_forward_and_between_running_and_waiting() -> None:
    legal = {(before.value, after.value) for after in STATES for before in leading_to(after)}
    assert legal == {
        ("PENDING", "RUNNING"),
        ("PENDING", "STOPPING"),
        ("PENDING", "TERMINAL"),
        ("RUNNING", "WAITING"),
        ("RUNNING", "STOPPING"),
        ("RUNNING", "TERMINAL"),
        ("WAITING", "RUNNING"),
        ("WAITING", "STOPPING"),
        ("WAITING", "TERMINAL"),
        ("STOPPING", "TERMINAL"),
    }


@pytest.mark.parametrize(
    ("outcome", "paused", "queue", "cancel"),
    [
        (Outcome.COMPLETED, False, Queue.PROMOTE, CommandOutcome.NOT_RUNNING),
        # An accepted Stop has paused it, and stays obeyed when the agent was faster.
        (Outcome.COMPLETED, True, Queue.WAIT, CommandOutcome.NOT_RUNNING),
        (Outcome.PAUSED, False, Queue.WAIT, CommandOutcome.NOT_RUNNING),
        (Outcome.STOPPED, False, Queue.PAUSE, CommandOutcome.STOPPED),
        (Outcome.FAILED, False, Queue.PAUSE, CommandOutcome.NOT_RUNNING),
        (Outcome.LOST, False, Queue.PAUSE, CommandOutcome.LOST),
    ],
)
def test_settlement(outcome: Outcome, paused: bool, queue: Queue, cancel: CommandOutcome) -> None:
    assert (queue_after(outcome, paused=paused), cancel_outcome(outcome)) == (queue, cancel)


@pytest.mark.parametrize("outcome", Outcome)
def test_n116_what_waits_for_the_cancel_runs_next_unless_the_run_was_lost(outcome: Outcome) -> None:
    for paused in (False, True):
        expected = Queue.PAUSE if outcome is Outcome.LOST else Queue.STEER
        assert queue_after(outcome, paused=paused, cancelled=True, steered=True) is expected


@pytest.mark.parametrize(
    ("outcome", "paused", "queue"),
    [
        (Outcome.STOPPED, True, Queue.PAUSE),
        # It was resumed since the Stop.
        (Outcome.STOPPED, False, Queue.PROMOTE),
        (Outcome.COMPLETED, True, Queue.WAIT),
        # What it asked is closed, so nothing will go on with it.
        (Outcome.PAUSED, True, Queue.PAUSE),
        (Outcome.PAUSED, False, Queue.PAUSE),
        (Outcome.FAILED, False, Queue.PAUSE),
        (Outcome.LOST, False, Queue.PAUSE),
    ],
)
def test_n114_a_stop_promotes_nothing(outcome: Outcome, paused: bool, queue: Queue) -> None:
    assert queue_after(outcome, paused=paused, cancelled=True) is queue


def test_every_ending_has_an_outcome() -> None:
    assert set(ENDING_TYPES.values()) == set(Outcome)
    assert Winner("id", "execution.lost", 3, 7).outcome is Outcome.LOST


A, B = Finished("agent", "session a", "e1"), Finished("agent", "session b", "e2")
LATER = Finished("agent", "session a", "e3")


@pytest.mark.parametrize(
    ("outcome", "prompted", "before", "after"),
    [
        (Outcome.COMPLETED, A, None, A),
        (Outcome.STOPPED, B, A, B),
        # It never reached an agent, so no agent's record changed.
        (Outcome.STOPPED, None, A, A),
        (Outcome.FAILED, None, A, A),
        (Outcome.FAILED, A, A, None),
        # What was lost of it is told again; the record before it stands.
        (Outcome.LOST, LATER, A, A),
        (Outcome.COMPLETED, LATER, A, LATER),
        # The turn that was lost is in another record than the last finished one.
        (Outcome.LOST, B, A, None),
        (Outcome.LOST, A, None, None),
    ],
)
def test_what_may_be_loaded_after(
    outcome: Outcome,
    prompted: Finished | None,
    before: Finished | None,
    after: Finished | None,
) -> None:
    assert finished_by(outcome, prompted=prompted, before=before) == after


def test_a_stopped_turn_whose_agent_was_killed_is_told_again() -> None:
    assert finished_by(Outcome.STOPPED, prompted=LATER, before=A, cut_off=True) == A
    assert finished_by(Outcome.STOPPED, prompted=B, before=A, cut_off=True) is None
    assert finished_by(Outcome.STOPPED, prompted=None, before=A, cut_off=True) == A


@pytest.mark.parametrize(
    ("state", "tries", "decision"),
    [
        (ExecutionState.PENDING, 0, Takeover.DRIVE_AGAIN),
        (ExecutionState.PENDING, MAX_TRIES - 1, Takeover.DRIVE_AGAIN),
        (ExecutionState.PENDING, MAX_TRIES, Takeover.FAIL_START),
        (ExecutionState.RUNNING, 1, Takeover.LOSE),
        (ExecutionState.STOPPING, 1, Takeover.STOP),
        (ExecutionState.WAITING, 1, Takeover.PAUSE),
        (ExecutionState.TERMINAL, 1, Takeover.NOTHING),
    ],
)
def test_takeover(state: ExecutionState, tries: int, decision: Takeover) -> None:
    assert takeover(state, tries=tries, ending=False) is decision
    # What the pool ends already is not ended twice.
    ended = Takeover.NOTHING if state is ExecutionState.TERMINAL else Takeover.AWAIT_ENDING
    assert takeover(state, tries=tries, ending=True) is ended
