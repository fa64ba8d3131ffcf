"""The checker of C4 sees red: an input that is lost, in two places, run twice, overtaken, or removed by nobody."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers import control_pieces as made
from tests.checkers.c4_inputs import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import ControlRecording, Prompt


def with_log(log: list[event_pb2.Event]) -> ControlRecording:
    recording = made.sound()
    made.tell(recording, log)
    return recording


def test_a_sound_run_passes() -> None:
    verdict = check(made.sound())
    assert verdict.wrong == []
    assert verdict.checked > 8


def test_a_lost_input_is_seen() -> None:
    recording = made.sound()
    recording.rows[KEY].waiting.clear()
    assert check(recording).wrong
    recording.settled = False
    assert check(recording).wrong == []
    assert check(with_log(made.without(made.events(), 7))).wrong
    assert check(with_log(made.without(made.events(), 16))).wrong


def test_an_input_in_two_places_is_seen() -> None:
    recording = made.sound()
    waiting = recording.rows[KEY].waiting
    waiting.append(sessions.Input(input_id=made.IN_TWO, state=sessions.INPUT_STATE_PENDING, rank=2))
    assert check(recording).wrong
    waiting[-1].state = sessions.INPUT_STATE_PROMOTED
    assert check(recording).wrong == []
    waiting[-1].CopyFrom(waiting[0])
    assert check(recording).wrong


def test_an_input_that_was_started_twice_is_seen() -> None:
    assert check(with_log([*made.events(), made.started(19, made.GATE_A, 3, made.IN_TWO)])).wrong


def test_a_prompt_that_was_handed_over_twice_is_seen() -> None:
    recording = made.sound()
    recording.prompts.append(Prompt(made.TWO, "two, changed"))
    assert check(recording).wrong


def test_a_completion_without_a_prompt_is_seen() -> None:
    recording = made.sound()
    recording.prompts = [prompt for prompt in recording.prompts if prompt.execution_id != made.ONE]
    assert check(recording).wrong
    stopped_early = made.sound()
    stopped_early.prompts = [prompt for prompt in stopped_early.prompts if prompt.execution_id != made.TWO]
    assert check(stopped_early).wrong == []


@pytest.mark.parametrize("reason", ["user", "kill"])
def test_a_removal_that_nobody_asked_for_is_seen(reason: str) -> None:
    recording = with_log([*made.events(), made.removed(19, made.WAITS, reason)])
    recording.rows[KEY].waiting.clear()
    assert check(recording).wrong
    recording.calls.append(made.call(calls.RemoveInputRequest(request_id="r", input_id=made.WAITS)))
    recording.calls.append(made.call(calls.KillSessionRequest(request_id="k")))
    assert check(recording).wrong == []


def test_an_overtaken_input_is_seen() -> None:
    overtaken = made.events()
    # WAITS is promoted before IN_TWO, which was there first.
    overtaken.insert(14, made.promoted(19, made.WAITS, made.GATE_A))
    assert check(with_log(overtaken)).wrong
    asked_for = with_log(overtaken)
    asked_for.calls.append(made.call(calls.SendInputNowRequest(request_id="n", input_id=made.WAITS)))
    assert check(asked_for).wrong == []
