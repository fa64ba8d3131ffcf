"""The checker of C3 sees red: a Stop that hit another execution than the one meant, an end that nobody asked for."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from services.chassis.errors import FailedPrecondition
from tests.checkers import control_pieces as made
from tests.checkers.c3_aimed import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import ControlRecording


def ended_by(reason: str, command_id: str = made.STOP) -> ControlRecording:
    """The run, with a last ending that has this reason, and without the Stop of it."""
    recording = made.sound()
    made.tell(recording, [*made.events()[:-1], made.stopped(18, made.TWO, 2, reason, command_id)])
    recording.calls.pop()
    return recording


def test_a_sound_run_passes() -> None:
    verdict = check(made.sound())
    assert verdict.wrong == []
    assert verdict.checked >= 3


def test_a_stop_that_hit_another_execution_is_seen() -> None:
    recording = made.sound()
    recording.calls[-1] = made.stops(made.ONE, told=made.command(target=made.TWO))
    assert check(recording).wrong


@pytest.mark.parametrize(("seen", "fine"), [(1, False), (2, True), (9, True)])
def test_a_stop_by_epoch_hits_nothing_newer(seen: int, fine: bool) -> None:
    recording = made.sound()
    recording.calls[-1] = made.stops("", seen=seen)
    assert (check(recording).wrong == []) == fine


def test_an_end_that_nobody_asked_for_is_seen() -> None:
    assert check(ended_by("user")).wrong
    refused = ended_by("user")
    refused.calls.append(
        made.call(
            calls.StopExecutionRequest(request_id="stop", execution_id=made.TWO),
            error=FailedPrecondition("another one runs", reason="EXECUTION_MISMATCH"),
        )
    )
    assert check(refused).wrong
    without_answer = ended_by("user")
    without_answer.calls.append(made.call(calls.StopExecutionRequest(request_id="stop", execution_id=made.TWO)))
    assert check(without_answer).wrong == []


@pytest.mark.parametrize("reason", ["steer", "killed", "shutdown", "runner lost", "a whim"])
def test_an_end_for_a_reason_that_nobody_gave_is_seen(reason: str) -> None:
    assert check(ended_by(reason)).wrong


def test_an_end_for_a_reason_that_somebody_gave_passes() -> None:
    steered = ended_by("steer")
    steered.calls.append(made.call(calls.SendInputRequest(request_id="s", on_busy=sessions.ON_BUSY_STEER)))
    killed = ended_by("killed")
    killed.calls.append(made.call(calls.KillSessionRequest(request_id="k")))
    shut_down = ended_by("shutdown")
    shut_down.shutdowns = 1
    for recording in (steered, killed, shut_down):
        assert check(recording).wrong == []


def test_an_end_by_a_command_that_is_aimed_elsewhere_is_seen() -> None:
    recording = made.sound()
    recording.rows[KEY].commands[made.STOP].execution_id = made.ONE
    assert check(recording).wrong
    unknown = made.sound()
    made.tell(unknown, [*made.events()[:-1], made.stopped(18, made.TWO, 2, "user", made.GATE_A)])
    assert check(unknown).wrong
