"""A small sound run of one session for the self-tests of the checkers of sessions, which each break something in it.

In it a first message runs, asks for leave twice and is answered, while a second one waits, is changed, and then runs
and is stopped; a third one is removed, a fourth waits.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis.errors import HearthError
from tests.checkers.pieces import KEY, event, stored
from tests.support.control_recording import Call, ControlRecording, Opened, Prompt, Ran, Rows, Told
from tests.support.recording import Log

ONE, TWO = (f"e{number}000000-0000-4000-8000-000000000000" for number in (1, 2))
IN_ONE, IN_TWO, GONE, WAITS = (f"a{number}000000-0000-4000-8000-000000000000" for number in (1, 2, 3, 4))
GATE_A, GATE_B = (f"b{number}000000-0000-4000-8000-000000000000" for number in (1, 2))
STOP = "c1000000-0000-4000-8000-000000000000"
ALLOWED, DENIED = event_pb2.DECISION_ALLOWED, event_pb2.DECISION_DENIED
CONSUMED = event_pb2.INTERACTION_RESOLUTION_CONSUMED

_ticks = itertools.count(1)


def text(words: str) -> list[content_pb2.ContentPart]:
    """A message of one text."""
    return [content_pb2.ContentPart(text=content_pb2.TextPart(text=words))]


def call(request: Message, response: Message | None = None, error: HearthError | None = None) -> Call:
    """A call of KEY, answered at once if it has an answer."""
    began = next(_ticks)
    answered = next(_ticks) if response is not None or error is not None else 0
    return Call(KEY, request, began, answered, response, error)


def execution(
    execution_id: str,
    outcome: sessions.ExecutionOutcome.ValueType = sessions.EXECUTION_OUTCOME_UNSPECIFIED,
    **fields: object,
) -> sessions.Execution:
    """An execution; one without an outcome runs."""
    state = sessions.EXECUTION_STATE_TERMINAL if outcome else sessions.EXECUTION_STATE_RUNNING
    return sessions.Execution(execution_id=execution_id, state=state, outcome=outcome, **fields)  # type: ignore[arg-type]


def started(number: int, execution_id: str, epoch: int, input_id: str, **fields: object) -> event_pb2.Event:
    """`execution.started`."""
    body = event_pb2.ExecutionStarted(input_id=input_id, **fields)  # type: ignore[arg-type]
    return event(number, "execution.started", execution_id=execution_id, epoch=epoch, execution_started=body)


def says(number: int, execution_id: str, input_id: str, words: str) -> event_pb2.Event:
    """The message of a user that an execution runs."""
    body = event_pb2.MessageCompleted(message_id=input_id, role=content_pb2.ROLE_USER, content=text(words))
    made = event(number, "message.completed", message_completed=body)
    made.scope, made.execution_id = event_pb2.EVENT_SCOPE_SESSION, execution_id
    return made


def requested(number: int, interaction_id: str, tool_call_id: str) -> event_pb2.Event:
    """`interaction.requested`."""
    body = event_pb2.InteractionRequested(
        interaction_id=interaction_id,
        tool_call_id=tool_call_id,
        tool_name=tool_call_id.removeprefix("call-"),
        kind=event_pb2.INTERACTION_KIND_APPROVAL,
    )
    return event(number, "interaction.requested", interaction_requested=body)


def answer(
    number: int, interaction_id: str, tool_call_id: str, decision: event_pb2.Decision.ValueType
) -> event_pb2.Event:
    """`interaction.answered`."""
    body = event_pb2.InteractionAnswered(interaction_id=interaction_id, tool_call_id=tool_call_id, decision=decision)
    return event(number, "interaction.answered", interaction_answered=body)


def resolved(
    number: int,
    interaction_id: str,
    tool_call_id: str,
    decision: event_pb2.Decision.ValueType,
    how: event_pb2.InteractionResolution.ValueType = CONSUMED,
) -> event_pb2.Event:
    """`interaction.resolved`."""
    body = event_pb2.InteractionResolved(
        interaction_id=interaction_id, tool_call_id=tool_call_id, decision=decision, resolution=how
    )
    return event(number, "interaction.resolved", interaction_resolved=body)


def queued(number: int, input_id: str, words: str) -> event_pb2.Event:
    """`input.queued`."""
    return event(number, input_queued=event_pb2.InputQueued(input_id=input_id, content=text(words)))


def promoted(number: int, input_id: str, execution_id: str) -> event_pb2.Event:
    """`input.promoted`."""
    body = event_pb2.InputPromoted(input_id=input_id, execution_id=execution_id)
    return event(number, "input.promoted", input_promoted=body)


def removed(number: int, input_id: str, reason: str = "user") -> event_pb2.Event:
    """`input.removed`."""
    body = event_pb2.InputRemoved(input_id=input_id, reason=reason)
    return event(number, "input.removed", input_removed=body)


def updated(number: int, input_id: str, words: str) -> event_pb2.Event:
    """`input.updated`."""
    body = event_pb2.InputUpdated(input_id=input_id, content=text(words))
    return event(number, "input.updated", input_updated=body)


def ended(number: int, kind: str, execution_id: str, epoch: int, *, how: str = "", **fields: object) -> event_pb2.Event:
    """An ending; `how` its turn began, `fields` are those of its body."""
    made = event(number, kind, execution_id=execution_id, epoch=epoch)
    body = getattr(made, kind.replace(".", "_"))
    body.summary.manifest.SetInParent()
    body.summary.how = how
    for name, value in fields.items():
        setattr(body, name, value)
    return made


def stopped(
    number: int, execution_id: str, epoch: int, reason: str = "user", command_id: str = STOP
) -> event_pb2.Event:
    """`execution.stopped`."""
    return ended(number, "execution.stopped", execution_id, epoch, reason=reason, command_id=command_id)


def events() -> list[event_pb2.Event]:
    """The log of the run."""
    return [
        started(1, ONE, 1, IN_ONE),
        says(2, ONE, IN_ONE, "one"),
        queued(3, IN_TWO, "two"),
        queued(4, GONE, "three"),
        queued(5, WAITS, "four"),
        updated(6, IN_TWO, "two, changed"),
        removed(7, GONE),
        requested(8, GATE_A, "call-a"),
        requested(9, GATE_B, "call-b"),
        answer(10, GATE_A, "call-a", ALLOWED),
        resolved(11, GATE_A, "call-a", ALLOWED),
        answer(12, GATE_B, "call-b", DENIED),
        resolved(13, GATE_B, "call-b", DENIED),
        ended(14, "execution.completed", ONE, 1),
        promoted(15, IN_TWO, TWO),
        started(16, TWO, 2, IN_TWO),
        says(17, TWO, IN_TWO, "two, changed"),
        stopped(18, TWO, 2),
    ]


def rows() -> Rows:
    """What the pool shows after the run."""
    completed, outcome = sessions.EXECUTION_OUTCOME_COMPLETED, sessions.EXECUTION_OUTCOME_STOPPED
    consumed = sessions.INTERACTION_STATE_CONSUMED
    return Rows(
        sessions.Session(epoch=2, queued_inputs=1, queue_paused=True),
        [sessions.Input(input_id=WAITS, state=sessions.INPUT_STATE_PENDING, rank=1, content=text("four"))],
        {
            ONE: execution(ONE, completed, ending_sequence=14, input_id=IN_ONE),
            TWO: execution(TWO, outcome, ending_sequence=18, input_id=IN_TWO),
        },
        {STOP: command(sessions.COMMAND_OUTCOME_STOPPED)},
        {
            GATE_A: sessions.Interaction(interaction_id=GATE_A, execution_id=ONE, state=consumed, decision=ALLOWED),
            GATE_B: sessions.Interaction(interaction_id=GATE_B, execution_id=ONE, state=consumed, decision=DENIED),
        },
    )


def command(
    outcome: sessions.CommandOutcome.ValueType = sessions.COMMAND_OUTCOME_UNSPECIFIED, target: str = TWO
) -> sessions.Command:
    """The cancel of TWO."""
    return sessions.Command(command_id=STOP, kind=sessions.COMMAND_KIND_CANCEL, execution_id=target, outcome=outcome)


def send(request_id: str, words: str, input_id: str, **result: Message) -> Call:
    """A SendInput that was accepted: as queued, or as `started`."""
    response = calls.SendInputResponse(queued=calls.InputWaiting(input_id=input_id, rank=1))
    if result:
        response = calls.SendInputResponse(**result)  # type: ignore[arg-type]
    return call(calls.SendInputRequest(request_id=request_id, content=text(words)), response)


def answers(interaction_id: str, decision: event_pb2.Decision.ValueType, request_id: str = "") -> Call:
    """An AnswerInteractions that was accepted."""
    request = calls.AnswerInteractionsRequest(
        request_id=request_id or f"answer {interaction_id} {decision}",
        answers=[sessions.InteractionAnswer(interaction_id=interaction_id, decision=decision)],
    )
    return call(request, calls.AnswerInteractionsResponse())


def stops(
    execution_id: str = TWO, *, request_id: str = "stop", told: sessions.Command | None = None, seen: int = 0
) -> Call:
    """A StopExecution that was accepted."""
    request = calls.StopExecutionRequest(request_id=request_id, execution_id=execution_id, seen_epoch=seen)
    return call(request, calls.StopExecutionResponse(command=told or command()))


def asked(
    execution_id: str,
    words: str,
    process: int = 1,
    *,
    record: str = "r",
    at: float = 0.0,
    context: str = "",
    **opened: Any,
) -> Prompt:
    """A prompt as an agent wrote it down that was `opened` with something."""
    return Prompt(execution_id, words, context, record, Opened((process, 0.0), **opened), at)


def sound() -> ControlRecording:
    """The run, with nothing wrong."""
    recording = ControlRecording(
        calls=[
            send("one", "one", IN_ONE, started=calls.InputStarted(input_id=IN_ONE, execution=execution(ONE))),
            send("two", "two", IN_TWO),
            send("three", "three", GONE),
            send("four", "four", WAITS),
            call(
                calls.UpdateInputRequest(request_id="update", input_id=IN_TWO, content=text("two, changed")),
                calls.UpdateInputResponse(),
            ),
            call(calls.RemoveInputRequest(request_id="remove", input_id=GONE), calls.RemoveInputResponse()),
            answers(GATE_A, ALLOWED),
            answers(GATE_B, DENIED),
            stops(),
        ],
        rows={KEY: rows()},
        prompts=[Prompt(ONE, "one"), Prompt(TWO, "two, changed")],
        turns=[asked(ONE, "one"), asked(TWO, "two, changed")],
        told=[Told(ONE, "a", "allow_once"), Told(ONE, "b", "reject_once")],
        ran=[Ran(ONE, "call-a", "a")],
        settled=True,
    )
    tell(recording, events())
    return recording


def tell(recording: ControlRecording, log: list[event_pb2.Event]) -> None:
    """Make this the log of the run."""
    recording.logs = {KEY: Log(stored(*log))}


def without(log: list[event_pb2.Event], *numbers: int) -> list[event_pb2.Event]:
    """A log without the events at these places, counted from 1."""
    return [one for place, one in enumerate(log, 1) if place not in numbers]


def inserted(log: list[event_pb2.Event], after: int, *more: event_pb2.Event) -> list[event_pb2.Event]:
    """A log with more events behind a place."""
    return [*log[:after], *copy.deepcopy(list(more)), *log[after:]]
