"""The checker of H6 for sessions sees red: rows and log that disagree about how, where or whether a run ended."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.checkers import control
from tests.checkers import control_pieces as made
from tests.checkers.h6_settled import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import ControlRecording

LOST = sessions.EXECUTION_OUTCOME_LOST


def with_log(*log: object) -> ControlRecording:
    recording = made.sound()
    made.tell(recording, list(log))  # type: ignore[arg-type]
    return recording


def test_a_sound_run_passes_all_checkers() -> None:
    assert check(made.sound()).wrong == []
    looked_at = control.check(made.sound())
    assert all(looked_at.values()), looked_at
    broken = made.sound()
    broken.rows[KEY].waiting.clear()
    with pytest.raises(AssertionError, match="C4"):
        control.check(broken)


def test_an_execution_that_never_ends_is_seen() -> None:
    recording = made.sound()
    row = recording.rows[KEY].executions[made.TWO]
    row.state = sessions.EXECUTION_STATE_STOPPING
    assert check(recording).wrong
    recording.settled = False
    assert check(recording).wrong == []


def test_an_ending_that_is_not_in_the_log_is_seen() -> None:
    assert check(with_log(*made.events()[:-1])).wrong


def test_another_outcome_or_place_is_seen() -> None:
    recording = made.sound()
    recording.rows[KEY].executions[made.TWO].outcome = LOST
    assert check(recording).wrong
    for place in (17, 19, 14):
        elsewhere = made.sound()
        elsewhere.rows[KEY].executions[made.TWO].ending_sequence = place
        assert check(elsewhere).wrong


def test_a_second_start_or_ending_is_seen() -> None:
    log = made.events()
    assert check(with_log(*log, made.started(19, made.ONE, 3, made.IN_ONE))).wrong
    assert check(with_log(*log, made.stopped(19, made.ONE, 3))).wrong
    assert check(with_log(*log, made.stopped(19, made.GATE_A, 3))).wrong


def test_an_execution_that_somebody_was_told_of_and_is_gone_is_seen() -> None:
    recording = made.sound()
    told = made.execution(made.GATE_A)
    recording.calls.append(
        made.send("x", "x", made.WAITS, started=calls.InputStarted(input_id=made.WAITS, execution=told))
    )
    assert check(recording).wrong


def test_two_that_run_at_once_are_seen() -> None:
    recording = made.sound()
    recording.settled = False
    for row in recording.rows[KEY].executions.values():
        row.state = sessions.EXECUTION_STATE_RUNNING
    assert check(recording).wrong
