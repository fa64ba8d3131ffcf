"""C2 one winner: of a stop, an answer, a completion and a steer that race one wins, and each caller hears the truth."""

from __future__ import annotations

from collections import Counter, defaultdict

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording, answered, endings, messages_in, started
from tests.support.recording import Key

OUTCOMES = {
    "execution.completed": sessions.EXECUTION_OUTCOME_COMPLETED,
    "execution.paused": sessions.EXECUTION_OUTCOME_PAUSED,
    "execution.stopped": sessions.EXECUTION_OUTCOME_STOPPED,
    "execution.failed": sessions.EXECUTION_OUTCOME_FAILED,
    "execution.lost": sessions.EXECUTION_OUTCOME_LOST,
}

# What may have come of a cancel whose execution ended so.
_OF_CANCELS = {
    "execution.completed": {sessions.COMMAND_OUTCOME_NOT_RUNNING},
    "execution.paused": {sessions.COMMAND_OUTCOME_NOT_RUNNING},
    "execution.failed": {sessions.COMMAND_OUTCOME_NOT_RUNNING, sessions.COMMAND_OUTCOME_FAILED},
    "execution.stopped": {sessions.COMMAND_OUTCOME_STOPPED},
    "execution.lost": {sessions.COMMAND_OUTCOME_LOST},
}


def check(recording: ControlRecording) -> Verdict:
    """Nothing that was told as decided was told otherwise, then or later; what excludes each other did not both win."""
    verdict = Verdict()
    for key, rows in recording.rows.items():
        events = recording.events(key)
        ended = endings(events)
        for call in recording.calls:
            if call.session != key or call.response is None:
                continue
            for execution in messages_in(call.response, sessions.Execution):
                _told_execution(execution, ended, f"{key}: {type(call.request).__name__}", verdict)
            for command in messages_in(call.response, sessions.Command):
                if command.outcome:
                    now = rows.commands.get(command.command_id)
                    same = now is not None and now.outcome == command.outcome
                    verdict.expect(same, f"{key}: what came of {command.command_id} was told, and changed since")
        for command in rows.commands.values():
            _command(command, ended, key, verdict)
        _one_answer(recording, key, events, verdict)
        _removed_or_run(recording, key, events, verdict)
    return verdict


def _told_execution(told: sessions.Execution, ended: dict[str, event_pb2.Event], where: str, verdict: Verdict) -> None:
    if not told.outcome:
        return
    event = ended.get(told.execution_id)
    verdict.expect(
        event is not None and OUTCOMES[event.type] == told.outcome,
        f"{where} told that {told.execution_id} ended with"
        f" {sessions.ExecutionOutcome.Name(told.outcome)}, the log says {event.type if event else 'nothing'}",
    )


def _command(command: sessions.Command, ended: dict[str, event_pb2.Event], key: Key, verdict: Verdict) -> None:
    if command.kind not in (sessions.COMMAND_KIND_CANCEL, sessions.COMMAND_KIND_STEER) or not command.outcome:
        return
    event = ended.get(command.execution_id)
    if event is None or command.outcome in (sessions.COMMAND_OUTCOME_SUPERSEDED, sessions.COMMAND_OUTCOME_STARTED):
        return
    # One that came after the end had nothing to stop, however that was.
    late = command.outcome == sessions.COMMAND_OUTCOME_NOT_RUNNING and command.settled_at == command.created_at
    verdict.expect(
        late or command.outcome in _OF_CANCELS[event.type],
        f"{key}: {command.execution_id} has {event.type}, and its cancel says"
        f" {sessions.CommandOutcome.Name(command.outcome)}",
    )


def _one_answer(recording: ControlRecording, key: Key, events: list[event_pb2.Event], verdict: Verdict) -> None:
    taken: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for call, request in recording.accepted(calls.AnswerInteractionsRequest):
        if call.session == key:
            for answer in request.answers:
                taken[answer.interaction_id].add((answer.decision, answer.answer_json))
    for interaction_id, answers in taken.items():
        verdict.expect(len(answers) == 1, f"{key}: {len(answers)} different answers to {interaction_id} were accepted")
    for interaction_id, heard in answered(events).items():
        verdict.expect(len(heard) == 1, f"{key}: readers heard {len(heard)} answers to {interaction_id}")
    closed = Counter(
        event.interaction_resolved.interaction_id for event in events if event.HasField("interaction_resolved")
    )
    for interaction_id, times in closed.items():
        verdict.expect(times == 1, f"{key}: {interaction_id} was resolved {times} times")
    if recording.settled:
        for interaction_id, row in recording.rows[key].interactions.items():
            over = row.state in (sessions.INTERACTION_STATE_CONSUMED, sessions.INTERACTION_STATE_CLOSED)
            verdict.expect(
                over == bool(closed[interaction_id]),
                f"{key}: {interaction_id} is {sessions.InteractionState.Name(row.state)}, readers heard otherwise",
            )


def _removed_or_run(recording: ControlRecording, key: Key, events: list[event_pb2.Event], verdict: Verdict) -> None:
    ran = {event.execution_started.input_id for event in started(events)}
    for call, request in recording.accepted(calls.RemoveInputRequest):
        if call.session == key:
            verdict.expect(request.input_id not in ran, f"{key}: {request.input_id} was removed, and ran")
    for event in events:
        if event.HasField("input_removed"):
            gone = event.input_removed.input_id
            verdict.expect(gone not in ran, f"{key}: readers heard that {gone} was removed, and ran")
