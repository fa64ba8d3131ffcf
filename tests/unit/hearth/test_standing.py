"""How a session stands for one who chats in it, whichever of calls, events and looks is heard first."""

from __future__ import annotations

from hearth.cli.standing import Standing
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import content_pb2, event_pb2


def event(event_type: str, execution: str = "", **body: object) -> event_pb2.Event:
    return event_pb2.Event(type=event_type, execution_id=execution, **body)  # type: ignore[arg-type]


def started(execution: str) -> event_pb2.Event:
    return event("execution.started", execution, execution_started=event_pb2.ExecutionStarted())


def completed(execution: str) -> event_pb2.Event:
    return event("execution.completed", execution, execution_completed=event_pb2.ExecutionCompleted())


def paused(execution: str) -> event_pb2.Event:
    return event("execution.paused", execution, execution_paused=event_pb2.ExecutionPaused())


def queued(input_id: str, text: str = "x") -> event_pb2.Event:
    content = [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    return event("input.queued", input_queued=event_pb2.InputQueued(input_id=input_id, content=content))


def promoted(input_id: str, execution: str) -> event_pb2.Event:
    body = event_pb2.InputPromoted(input_id=input_id, execution_id=execution)
    return event("input.promoted", input_promoted=body)


def asks(interaction_id: str) -> event_pb2.Event:
    body = event_pb2.InteractionRequested(interaction_id=interaction_id)
    return event("interaction.requested", interaction_requested=body)


def answered(interaction_id: str) -> event_pb2.Event:
    body = event_pb2.InteractionAnswered(interaction_id=interaction_id)
    return event("interaction.answered", interaction_answered=body)


def session(execution: str = "", *, ended: bool = False, paused: bool = False) -> control_pb2.Session:
    state = control_pb2.EXECUTION_STATE_TERMINAL if ended else control_pb2.EXECUTION_STATE_RUNNING
    return control_pb2.Session(
        execution=control_pb2.Execution(execution_id=execution, state=state), queue_paused=paused
    )


def after(*events: event_pb2.Event) -> Standing:
    standing = Standing()
    for one in events:
        standing.take(one)
    return standing


def works(standing: Standing) -> tuple[bool, bool]:
    return standing.working, standing.listening


def test_a_turn_works_from_its_admission_to_its_ending() -> None:
    standing = Standing()
    assert works(standing) == (False, True)
    standing.begun("e1")
    assert works(standing) == (True, False)
    standing.take(started("e1"))
    standing.take(completed("e1"))
    assert works(standing) == (False, True)


def test_an_ending_that_overtakes_its_admission_stays_an_ending() -> None:
    standing = after(completed("e1"))
    standing.begun("e1")
    standing.take(started("e1"))
    assert not standing.working


def test_what_waits_works_on_unless_the_queue_is_paused() -> None:
    standing = after(started("e1"), queued("i1"), completed("e1"))
    # Until the pool has settled the turn nobody knows what becomes of the queue.
    assert standing.settling == "e1"
    assert standing.working
    standing.settled(session("e1", ended=True))
    assert standing.working
    standing.take(promoted("i1", "e2"))
    assert (standing.running, standing.waiting) == ("e2", {})

    standing = after(started("e1"), queued("i1"), completed("e1"))
    standing.settled(session("e1", ended=True, paused=True))
    assert works(standing) == (False, True)
    assert standing.waiting == {"i1": "x"}
    standing.begun("e2")
    assert works(standing) == (True, False)


def test_an_input_that_left_the_queue_does_not_come_back() -> None:
    standing = after(promoted("i1", "e2"), completed("e2"))
    standing.queued("i1", "late answer of the call")
    assert standing.waiting == {}
    removed = event("input.removed", input_removed=event_pb2.InputRemoved(input_id="i2"))
    standing.take(removed)
    standing.take(queued("i2"))
    assert standing.waiting == {}
    assert not standing.working


def test_what_is_asked_is_open_once() -> None:
    standing = after(started("e1"), asks("a"), asks("b"))
    assert works(standing) == (True, True)
    standing.answered(["a"])
    standing.take(asks("a"))
    standing.take(answered("a"))
    assert list(standing.asked) == ["b"]
    standing.take(answered("b"))
    assert works(standing) == (True, False)
    resolved = event("interaction.resolved", interaction_resolved=event_pb2.InteractionResolved(interaction_id="c"))
    standing.take(resolved)
    standing.take(asks("c"))
    assert standing.asked == {}


def test_inputs_behind_a_paused_turn_wait_for_the_answer() -> None:
    standing = after(started("e1"), asks("a"), queued("i1"), paused("e1"))
    standing.settled(session("e1", ended=True))
    assert works(standing) == (False, True)
    standing.answered(["a"])
    standing.begun("e2")
    assert works(standing) == (True, False)


def test_a_look_at_the_session_shows_what_came_before() -> None:
    standing = Standing()
    waiting = control_pb2.Input(input_id="i1", state=control_pb2.INPUT_STATE_PENDING)
    begins = control_pb2.Input(input_id="i0", state=control_pb2.INPUT_STATE_PROMOTED)
    asked = control_pb2.Interaction(
        state=control_pb2.INTERACTION_STATE_PENDING, request=event_pb2.InteractionRequested(interaction_id="a")
    )
    standing.shown(session("e1"), [begins, waiting], [asked])
    assert (standing.running, list(standing.waiting), list(standing.asked)) == ("e1", ["i1"], ["a"])
    standing.shown(session("e1", ended=True, paused=True), [], [])
    assert standing.running == "e1", "only the log ends a turn for one who reads it"
