"""C1 accepted is durable: an accepted input, change, answer or stop is stored, and readers are told of it."""

from __future__ import annotations

from collections import defaultdict

from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from tests.checkers.verdict import Verdict
from tests.support.control_recording import Call, ControlRecording, answered, messages_in, started, text_of
from tests.support.recording import Key


def check(recording: ControlRecording) -> Verdict:
    """Whatever was answered as accepted is found again, and under one request id always the same.

    Of a run that did not settle only the identities are checked: facts may be on their way.
    """
    verdict = Verdict()
    _same_again(recording, verdict)
    if not recording.settled:
        return verdict
    for key in recording.rows:
        _inputs(recording, key, verdict)
        _changes(recording, key, verdict)
        _stops(recording, key, verdict)
        _answers(recording, key, verdict)
    return verdict


def made_by(call: Call) -> str:
    """The id of what an accepted call made; empty for one that makes nothing."""
    response = call.response
    if isinstance(response, calls.SendInputResponse):
        result = response.WhichOneof("result")
        return str(getattr(response, result).input_id) if result else ""
    if isinstance(response, calls.StopExecutionResponse):
        return response.command.command_id
    return ""


def _same_again(recording: ControlRecording, verdict: Verdict) -> None:
    made: dict[tuple[Key, type[Message], str], set[str]] = defaultdict(set)
    for call in recording.calls:
        if call.accepted:
            made[call.session, type(call.request), getattr(call.request, "request_id", "")].add(made_by(call))
    for (key, kind, request_id), ids in made.items():
        what = f"{key}: {kind.__name__} {request_id!r}"
        verdict.expect(len(ids) == 1, f"{what} was answered with {len(ids)} identities: {sorted(ids)}")


def _inputs(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    events = recording.events(key)
    ran = {event.execution_started.input_id: event.execution_id for event in started(events)}
    queued = {event.input_queued.input_id: event.input_queued for event in events if event.HasField("input_queued")}
    says = {
        event.message_completed.message_id: text_of(event.message_completed.content)
        for event in events
        if event.message_completed.role == content_pb2.ROLE_USER
    }
    for call, request in recording.accepted(calls.SendInputRequest):
        if call.session != key:
            continue
        input_id = made_by(call)
        what = f"{key}: input {input_id} of {request.request_id!r}"
        verdict.expect(input_id in ran or input_id in queued, f"{what} was accepted, and no reader heard of it")
        told = says.get(input_id)
        if told is not None:
            texts = {text_of(request.content)} | {
                text_of(update.content)
                for _, update in recording.possible(key, calls.UpdateInputRequest)
                if update.input_id == input_id
            }
            verdict.expect(told in texts, f"{what} runs with a text that nobody sent")
        if input_id in queued:
            verdict.expect(
                text_of(queued[input_id].content) == text_of(request.content), f"{what} was queued with another text"
            )
    for input_id, execution_id in ran.items():
        if input_id:
            verdict.expect(
                input_id in says, f"{key}: {execution_id} runs {input_id}, and the message is not in the log"
            )


def _changes(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    events = recording.events(key)
    removed = {event.input_removed.input_id for event in events if event.HasField("input_removed")}
    for call, remove in recording.accepted(calls.RemoveInputRequest):
        if call.session == key:
            verdict.expect(remove.input_id in removed, f"{key}: readers do not know that {remove.input_id} was removed")
    updates = {
        (event.input_updated.input_id, text_of(event.input_updated.content))
        for event in events
        if event.HasField("input_updated")
    }
    for call, update in recording.accepted(calls.UpdateInputRequest):
        if call.session == key:
            told = (update.input_id, text_of(update.content)) in updates
            verdict.expect(told, f"{key}: readers do not know of the change of {update.input_id}")
    _last_text(events, key, verdict)


def _last_text(events: list[event_pb2.Event], key: Key, verdict: Verdict) -> None:
    """What runs is the text that readers were told last."""
    text: dict[str, str] = {}
    for event in events:
        if event.HasField("input_queued"):
            text[event.input_queued.input_id] = text_of(event.input_queued.content)
        elif event.HasField("input_updated"):
            text[event.input_updated.input_id] = text_of(event.input_updated.content)
        elif event.message_completed.role == content_pb2.ROLE_USER:
            input_id = event.message_completed.message_id
            if input_id in text:
                same = text[input_id] == text_of(event.message_completed.content)
                verdict.expect(same, f"{key}: {input_id} runs with another text than the one it had last")


def _stops(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    commands = recording.rows[key].commands
    for call in recording.calls:
        if call.session != key or call.response is None:
            continue
        for told in messages_in(call.response, sessions.Command):
            found = commands.get(told.command_id)
            what = f"{key}: command {told.command_id}"
            verdict.expect(found is not None, f"{what} was accepted, and is not known")
            if found is not None:
                # Its kind may change: a steer that a Stop takes back is a cancel.
                same = found.execution_id == told.execution_id
                verdict.expect(same, f"{what} is not the one that was accepted")
                verdict.expect(
                    found.outcome != sessions.COMMAND_OUTCOME_UNSPECIFIED,
                    f"{what} was accepted, and nothing came of it",
                )


def _answers(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    told = answered(recording.events(key))
    shown = recording.rows[key].interactions
    for call, request in recording.accepted(calls.AnswerInteractionsRequest):
        if call.session != key:
            continue
        for answer in request.answers:
            what = f"{key}: the answer to {answer.interaction_id}"
            heard = told.get(answer.interaction_id, [])
            verdict.expect(
                any((one.decision, one.answer_json) == (answer.decision, answer.answer_json) for one in heard),
                f"{what} was accepted, and no reader heard of it",
            )
            row = shown.get(answer.interaction_id)
            same = row is not None and (row.decision, row.answer_json) == (answer.decision, answer.answer_json)
            verdict.expect(same, f"{what} was accepted, and is not what is stored")
