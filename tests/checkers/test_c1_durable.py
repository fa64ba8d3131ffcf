"""The checker of C1 sees red: something accepted that nobody hears of, another text, a stop of which nothing came."""

from __future__ import annotations

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.checkers import control_pieces as made
from tests.checkers.c1_durable import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import ControlRecording


def broken_log(*numbers: int) -> ControlRecording:
    recording = made.sound()
    made.tell(recording, made.without(made.events(), *numbers))
    return recording


def test_a_sound_run_passes() -> None:
    verdict = check(made.sound())
    assert verdict.wrong == []
    assert verdict.checked > 15


@pytest.mark.parametrize(
    "numbers",
    [(1, 2), (2,), (3, 15, 16, 17, 18), (4, 7), (5,), (6,), (7,), (10,), (12,)],
    ids=lambda numbers: "-".join(map(str, numbers)),
)
def test_what_readers_never_hear_of_is_seen(numbers: tuple[int, ...]) -> None:
    recording = broken_log(*numbers)
    assert check(recording).wrong
    recording.settled = False
    assert check(recording).wrong == []


def test_another_text_is_seen() -> None:
    for place, other in (
        (2, made.says(2, made.ONE, made.IN_ONE, "other")),
        (3, made.queued(3, made.IN_TWO, "other")),
        (17, made.says(17, made.TWO, made.IN_TWO, "two")),
    ):
        recording, log = made.sound(), made.events()
        log[place - 1] = other
        made.tell(recording, log)
        assert check(recording).wrong


def test_two_identities_of_one_request_are_seen() -> None:
    recording = made.sound()
    recording.calls.append(made.send("four", "four", made.WAITS))
    assert check(recording).wrong == []
    recording.settled = False
    recording.calls.append(made.send("four", "four", made.IN_TWO))
    assert check(recording).wrong
    stopped_twice = made.sound()
    stopped_twice.settled = False
    stopped_twice.calls.append(made.stops(told=sessions.Command(command_id=made.GATE_A)))
    assert check(stopped_twice).wrong


def test_a_stop_that_is_forgotten_or_never_decided_is_seen() -> None:
    for change in ("gone", "undecided", "another"):
        recording = made.sound()
        commands = recording.rows[KEY].commands
        if change == "gone":
            commands.clear()
        elif change == "undecided":
            commands[made.STOP].outcome = sessions.COMMAND_OUTCOME_UNSPECIFIED
        else:
            commands[made.STOP].execution_id = made.ONE
        assert check(recording).wrong, change


def test_an_answer_that_is_stored_otherwise_is_seen() -> None:
    recording = made.sound()
    recording.rows[KEY].interactions[made.GATE_A].decision = made.DENIED
    assert check(recording).wrong
    forgotten = made.sound()
    del forgotten.rows[KEY].interactions[made.GATE_B]
    assert check(forgotten).wrong


def test_calls_without_an_answer_promise_nothing() -> None:
    recording = made.sound()
    recording.calls.append(made.call(calls.SendInputRequest(request_id="five", content=made.text("five"))))
    recording.calls.append(made.call(calls.RemoveInputRequest(request_id="six", input_id=made.WAITS)))
    assert check(recording).wrong == []
