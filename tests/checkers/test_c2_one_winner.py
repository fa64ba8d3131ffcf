"""The checker of C2 sees red: two winners, a loser that was told it won, a truth that changed after it was told."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers import control_pieces as made
from tests.checkers.c2_one_winner import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import ControlRecording

NOT_RUNNING, STOPPED = sessions.COMMAND_OUTCOME_NOT_RUNNING, sessions.COMMAND_OUTCOME_STOPPED


def with_log(log: list[event_pb2.Event]) -> ControlRecording:
    recording = made.sound()
    made.tell(recording, log)
    return recording


def test_a_sound_run_passes() -> None:
    recording = made.sound()
    told = made.execution(made.ONE, sessions.EXECUTION_OUTCOME_COMPLETED)
    recording.calls.append(
        made.send("one", "one", made.IN_ONE, started=calls.InputStarted(input_id=made.IN_ONE, execution=told))
    )
    recording.calls.append(made.stops(told=made.command(STOPPED)))
    verdict = check(recording)
    assert verdict.wrong == []
    assert verdict.checked > 10


@pytest.mark.parametrize("execution_id", [made.ONE, made.TWO, made.GATE_A])
def test_an_ending_that_was_told_otherwise_is_seen(execution_id: str) -> None:
    recording = made.sound()
    told = made.execution(execution_id, sessions.EXECUTION_OUTCOME_FAILED)
    recording.calls.append(
        made.send("x", "x", made.IN_ONE, started=calls.InputStarted(input_id=made.IN_ONE, execution=told))
    )
    assert check(recording).wrong


def test_a_stop_that_says_otherwise_than_the_ending_is_seen() -> None:
    recording = made.sound()
    recording.rows[KEY].commands[made.STOP] = made.command(NOT_RUNNING)
    recording.rows[KEY].commands[made.STOP].settled_at.seconds = 9
    assert check(recording).wrong
    too_late = made.sound()
    too_late.rows[KEY].commands[made.STOP] = made.command(STOPPED, target=made.ONE)
    assert check(too_late).wrong


def test_a_stop_that_came_after_the_end_had_nothing_to_stop() -> None:
    recording = made.sound()
    recording.rows[KEY].commands[made.STOP] = made.command(NOT_RUNNING)
    recording.rows[KEY].commands[made.STOP].created_at.seconds = 9
    recording.rows[KEY].commands[made.STOP].settled_at.seconds = 9
    assert check(recording).wrong == []


def test_what_came_of_a_command_and_changed_is_seen() -> None:
    recording = made.sound()
    recording.calls.append(made.stops(request_id="again", told=made.command(NOT_RUNNING)))
    assert check(recording).wrong


def test_two_answers_that_were_both_accepted_are_seen() -> None:
    recording = made.sound()
    recording.calls.append(made.answers(made.GATE_A, made.ALLOWED, "the same by somebody else"))
    assert check(recording).wrong == []
    recording.calls.append(made.answers(made.GATE_A, made.DENIED))
    assert check(recording).wrong


def test_an_interaction_that_is_answered_or_resolved_twice_or_never_is_seen() -> None:
    log = made.events()
    assert check(with_log(made.inserted(log, 13, made.answer(19, made.GATE_A, "call-a", made.ALLOWED)))).wrong
    cancelled = event_pb2.INTERACTION_RESOLUTION_CANCELLED
    again = made.resolved(19, made.GATE_A, "call-a", made.ALLOWED, cancelled)
    assert check(with_log(made.inserted(log, 13, again))).wrong
    assert check(with_log(made.without(log, 13))).wrong
    open_one = made.sound()
    open_one.rows[KEY].interactions[made.GATE_A].state = sessions.INTERACTION_STATE_PENDING
    assert check(open_one).wrong


def test_an_input_that_was_removed_and_ran_is_seen() -> None:
    recording = made.sound()
    request = calls.RemoveInputRequest(request_id="remove two", input_id=made.IN_TWO)
    recording.calls.append(made.call(request))
    assert check(recording).wrong == []
    recording.calls.append(made.call(request, calls.RemoveInputResponse()))
    assert check(recording).wrong
    assert check(with_log(made.inserted(made.events(), 14, made.removed(19, made.IN_TWO)))).wrong
