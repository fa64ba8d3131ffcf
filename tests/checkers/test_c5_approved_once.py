"""The checker of C5 sees red: leave that was used twice, given by nobody, for another call, or for something denied."""

from __future__ import annotations

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import event_pb2
from tests.checkers import control_pieces as made
from tests.checkers.c5_approved_once import check
from tests.checkers.pieces import KEY, event
from tests.support.control_recording import ControlRecording, Ran, Rows, Told

POLICY = event_pb2.INTERACTION_RESOLUTION_POLICY


def with_log(log: list[event_pb2.Event]) -> ControlRecording:
    recording = made.sound()
    made.tell(recording, log)
    return recording


def test_a_sound_run_passes() -> None:
    verdict = check(made.sound())
    assert verdict.wrong == []
    assert verdict.checked > 10


def test_leave_that_the_agent_was_told_twice_is_seen() -> None:
    recording = made.sound()
    recording.told.append(Told(made.ONE, "a", "allow_once"))
    assert check(recording).wrong


def test_leave_for_what_was_denied_or_never_asked_is_seen() -> None:
    for told in (Told(made.ONE, "b", "allow_always"), Told(made.TWO, "a", "allow_once")):
        recording = made.sound()
        recording.told.append(told)
        assert check(recording).wrong
    said_no = made.sound()
    said_no.told.append(Told(made.TWO, "c", "reject_once"))
    said_no.told.append(Told(made.TWO, "d", "cancelled"))
    assert check(said_no).wrong == []


def test_a_tool_that_ran_twice_is_seen() -> None:
    recording = made.sound()
    recording.ran.append(Ran(made.ONE, "call-a", "a"))
    assert check(recording).wrong


def test_an_answer_that_nobody_gave_is_seen() -> None:
    recording = made.sound()
    recording.calls = [one for one in recording.calls if "answer" not in getattr(one.request, "request_id", "")]
    assert check(recording).wrong
    log = made.events()
    log[9] = made.answer(10, made.GATE_A, "call-a", made.DENIED)
    assert check(with_log(log)).wrong


def test_consumed_without_an_answer_or_against_it_is_seen() -> None:
    assert check(with_log(made.without(made.events(), 10))).wrong
    for other in (
        made.resolved(11, made.GATE_A, "call-a", made.DENIED),
        made.resolved(11, made.GATE_A, "call-b", made.ALLOWED),
    ):
        log = made.events()
        log[10] = other
        assert check(with_log(log)).wrong
    assert check(
        with_log([made.answer(19, made.GATE_A, "call-a", made.ALLOWED), *made.without(made.events(), 10)])
    ).wrong


def test_consumed_twice_or_in_secret_is_seen() -> None:
    again = made.resolved(19, made.GATE_A, "call-a", made.ALLOWED)
    assert check(with_log([*made.events(), again])).wrong
    assert check(with_log(made.without(made.events(), 11))).wrong
    secret = made.sound()
    secret.rows[KEY].interactions["x"] = sessions.Interaction(state=sessions.INTERACTION_STATE_CONSUMED)
    assert check(secret).wrong


def test_leave_by_policy_counts() -> None:
    by_policy = made.resolved(19, "policy", "call-p", made.ALLOWED, POLICY)
    by_policy.execution_id = made.TWO
    ran = event(
        20,
        "tool.completed",
        execution_id=made.TWO,
        tool_completed=event_pb2.ToolCompleted(tool_call_id="call-p", name="p"),
    )
    recording = with_log([*made.events(), by_policy, ran])
    recording.told.append(Told(made.TWO, "p", "allow_once"))
    assert check(recording).wrong == []
    recording.told.append(Told(made.TWO, "p", "allow_once"))
    assert check(recording).wrong
    untold = made.sound()
    untold.told.append(Told(made.TWO, "p", "allow_once"))
    assert check(untold).wrong
    untold.policy_allows = True
    assert check(untold).wrong == []


def test_a_continuation_may_use_what_was_given_to_its_source_once() -> None:
    recording = made.sound()
    goes_on = made.started(16, made.TWO, 2, "", source_execution_id=made.ONE)
    paused = made.ended(14, "execution.paused", made.ONE, 1)
    made.tell(recording, [*made.events()[:13], paused, goes_on])
    recording.told = [Told(made.TWO, "a", "allow_once")]
    assert check(recording).wrong == []
    recording.told.append(Told(made.ONE, "a", "allow_once"))
    assert check(recording).wrong


def test_the_same_call_once_more_gets_the_same_decision_once() -> None:
    log = made.events()[:13]
    goes_on = made.started(16, made.TWO, 2, "", source_execution_id=made.ONE)
    log += [made.ended(14, "execution.paused", made.ONE, 1), goes_on]
    again = made.resolved(17, "again", "call-c", made.ALLOWED)
    again.execution_id = made.TWO
    recording = with_log([*log, again])
    recording.told = [Told(made.TWO, "a", "allow_once")]
    assert check(recording).wrong == []
    more = made.resolved(18, "and again", "call-d", made.ALLOWED)
    more.execution_id = made.TWO
    assert check(with_log([*log, again, more])).wrong
    call_of_b = event(
        19,
        "tool.completed",
        execution_id=made.TWO,
        tool_completed=event_pb2.ToolCompleted(tool_call_id="call-c", name="b"),
    )
    assert check(with_log([*log, again, call_of_b])).wrong


def test_a_second_continuation_or_one_of_what_was_not_paused_is_seen() -> None:
    paused = [made.started(1, made.ONE, 1, made.IN_ONE), made.ended(2, "execution.paused", made.ONE, 1)]
    goes_on = made.started(3, made.TWO, 2, "", source_execution_id=made.ONE)
    empty = ControlRecording(rows={KEY: Rows()})
    made.tell(empty, [*paused, goes_on])
    assert check(empty).wrong == []
    made.tell(empty, [*paused, goes_on, made.started(4, made.GATE_A, 3, "", source_execution_id=made.ONE)])
    assert check(empty).wrong
    made.tell(empty, [paused[0], goes_on])
    assert check(empty).wrong
