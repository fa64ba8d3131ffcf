"""Rows as the contracts show them."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from hearth.pool.v1 import pool_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from services.pool.control import facts
from services.pool.control.inputs import Sent
from services.pool.control.interactions import Answered
from services.pool.control.starts import content_of
from services.pool.credentials import Credential
from services.pool.rows import Command, CommandKind, Execution, Gate, Input, InputState, Replica
from services.pool.store import Shown
from services.pool.warm.entries import Entry

_KINDS = {
    CommandKind.CANCEL: sessions.COMMAND_KIND_CANCEL,
    CommandKind.STEER: sessions.COMMAND_KIND_STEER,
    CommandKind.ANSWER: sessions.COMMAND_KIND_ANSWER,
}


def execution(row: Execution) -> sessions.Execution:
    """An execution."""
    return sessions.Execution(
        execution_id=row.execution_id,
        epoch=row.epoch,
        state=sessions.ExecutionState.Value(f"EXECUTION_STATE_{row.state}"),
        outcome=sessions.ExecutionOutcome.Value(f"EXECUTION_OUTCOME_{row.outcome or 'UNSPECIFIED'}"),
        failure_code=row.failure_code,
        input_id=row.input_id or "",
        source_execution_id=row.source_execution_id or "",
        tries=row.tries,
        created_at=timestamp(row.created_at),
        started_at=timestamp(row.started_at),
        settled_at=timestamp(row.settled_at),
        ending_sequence=row.ending_sequence,
    )


def input_(row: Input) -> sessions.Input:
    """An input."""
    return sessions.Input(
        input_id=row.input_id,
        state=sessions.InputState.Value(f"INPUT_STATE_{row.state}"),
        content=content_of(row.content),
        rank=row.rank,
        steer=row.steer_command_id is not None and row.state is InputState.PENDING,
        execution_id=row.execution_id or "",
        created_at=timestamp(row.created_at),
    )


def command(row: Command) -> sessions.Command:
    """A command."""
    return sessions.Command(
        command_id=row.command_id,
        kind=_KINDS.get(row.kind, sessions.COMMAND_KIND_UNSPECIFIED),
        execution_id=row.execution_id or "",
        state=sessions.CommandState.Value(f"COMMAND_STATE_{row.state}"),
        outcome=sessions.CommandOutcome.Value(f"COMMAND_OUTCOME_{row.outcome or 'UNSPECIFIED'}"),
        created_at=timestamp(row.created_at),
        settled_at=timestamp(row.settled_at),
    )


def interaction(row: Gate) -> sessions.Interaction:
    """Something that an agent asked."""
    return sessions.Interaction(
        interaction_id=row.interaction_id,
        state=sessions.InteractionState.Value(f"INTERACTION_STATE_{row.state}"),
        execution_id=row.execution_id,
        request=event_pb2.InteractionRequested.FromString(row.request),
        decision=facts.decision_of(row),
        answer_json=row.answer_json or "",
        answered_by=row.answered_by or "",
        resolution=facts.resolution_of(row),
        created_at=timestamp(row.created_at),
    )


def answered(result: Answered) -> calls.AnswerInteractionsResponse:
    """What became of answers."""
    return calls.AnswerInteractionsResponse(
        interactions=[interaction(gate) for gate in result.gates],
        still_open=result.still_open,
        execution=execution(result.execution) if result.execution is not None else None,
    )


def session(shown: Shown) -> sessions.Session:
    """A session."""
    row = shown.session
    return sessions.Session(
        session=row.key.message(),
        epoch=row.epoch,
        execution=execution(shown.execution) if shown.execution is not None else None,
        queued_inputs=shown.queued,
        queue_paused=row.queue_paused,
        open_interactions=shown.open_gates,
        holder=row.holder or "",
        history_sequence=row.history_sequence,
        spec=sessions.SessionSpec.FromString(row.spec),
        created_at=timestamp(row.created_at),
        updated_at=timestamp(row.updated_at),
    )


def sent(result: Sent) -> calls.SendInputResponse:
    """What became of an input."""
    response = calls.SendInputResponse(resumed_input_ids=result.resumed)
    if result.execution is not None:
        response.started.CopyFrom(started(result))
    elif result.state is InputState.REMOVED:
        response.removed.input_id = result.input_id
    elif result.command is not None:
        response.steered.CopyFrom(steered(result))
    else:
        response.queued.input_id = result.input_id
        response.queued.rank = result.rank
    return response


def started(result: Sent) -> calls.InputStarted:
    """An input that was given to an execution."""
    assert result.execution is not None
    return calls.InputStarted(input_id=result.input_id, execution=execution(result.execution))


def steered(result: Sent) -> calls.InputSteered:
    """An input that waits for a cancel."""
    assert result.command is not None
    return calls.InputSteered(input_id=result.input_id, command=command(result.command))


def sent_now(result: Sent) -> calls.SendInputNowResponse:
    """What became of an input that was to run before all others."""
    if result.execution is not None:
        return calls.SendInputNowResponse(started=started(result))
    if result.command is not None:
        return calls.SendInputNowResponse(steered=steered(result))
    if result.state is InputState.REMOVED:
        return calls.SendInputNowResponse(removed=calls.InputGone(input_id=result.input_id))
    return calls.SendInputNowResponse(queued=calls.InputWaiting(input_id=result.input_id, rank=result.rank))


def entry(found: Entry) -> pool_pb2.Entry:
    """A live agent session."""
    return pool_pb2.Entry(
        session=found.key.message(),
        entry_id=found.entry_id,
        state=pool_pb2.EntryState.Value(f"ENTRY_STATE_{found.state}"),
        sandbox_id=found.live.sandbox_id if found.live is not None else "",
        agent=found.live.agent if found.live is not None else "",
        epoch=found.claim.epoch,
        turns=found.turns,
        used_at=timestamp(found.used_at),
        expires_at=timestamp(found.expires_at),
    )


def credential(row: Credential) -> sessions.Credential:
    """A credential, without its value."""
    return sessions.Credential(
        name=row.name,
        generation=row.generation,
        expires_at=timestamp(row.expires_at),
        updated_at=timestamp(row.updated_at),
    )


def replica(row: Replica) -> pool_pb2.Replica:
    """A pool process."""
    return pool_pb2.Replica(
        holder=row.holder,
        address=row.address,
        started_at=timestamp(row.started_at),
        beat_at=timestamp(row.beat_at),
        draining=row.draining,
        driving=len(row.driving),
        entries=row.entries,
    )


def timestamp(at: datetime | None) -> Timestamp | None:
    """A point in time, if there is one."""
    if at is None:
        return None
    message = Timestamp()
    message.FromDatetime(at)
    return message
