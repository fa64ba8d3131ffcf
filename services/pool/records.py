"""Rows as asyncpg gives them, as the values that the rest of the pool knows."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from services.pool.attachments import Attachment
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Decision,
    Execution,
    ExecutionState,
    Finished,
    Gate,
    GateKind,
    GateState,
    Input,
    InputState,
    Key,
    Outcome,
    Resolution,
    Session,
)


def text(value: object) -> str | None:
    return None if value is None else str(value)


def keys(rows: Sequence[asyncpg.Record]) -> list[Key]:
    return list(dict.fromkeys(Key(row["project"], row["session"]) for row in rows))


def finished(agent: str | None, session_id: str | None, execution_id: object) -> Finished | None:
    if agent is None or session_id is None or execution_id is None:
        return None
    return Finished(agent, session_id, str(execution_id))


def session(row: asyncpg.Record) -> Session:
    return Session(
        Key(row["project"], row["session"]),
        row["epoch"],
        text(row["holder"]),
        row["queue_paused"],
        row["spec"],
        text(row["execution_id"]),
        text(row["ended_execution_id"]),
        finished(row["harness_agent"], row["harness_session_id"], row["harness_execution_id"]),
        row["outbox_number"],
        row["history_sequence"],
        row["created_at"],
        row["updated_at"],
        row["deleted_at"],
    )


def execution(row: asyncpg.Record) -> Execution:
    return Execution(
        str(row["execution_id"]),
        Key(row["project"], row["session"]),
        row["epoch"],
        row["admitted_epoch"],
        ExecutionState(row["state"]),
        Outcome(row["outcome"]) if row["outcome"] is not None else None,
        row["failure_code"],
        text(row["input_id"]),
        text(row["source_execution_id"]),
        row["tries"],
        text(row["driver"]),
        text(row["ending_event_id"]),
        row["agent"],
        row["harness_session_id"],
        row["traceparent"],
        row["created_at"],
        row["started_at"],
        row["settled_at"],
        row["ending_sequence"],
    )


def input_(row: asyncpg.Record) -> Input:
    return Input(
        str(row["input_id"]),
        Key(row["project"], row["session"]),
        InputState(row["state"]),
        row["content"],
        row["spec"],
        row["expected_transcript"],
        text(row["steer_command_id"]),
        text(row["execution_id"]),
        row["traceparent"],
        row["created_at"],
        row["rank"],
    )


def attachment(row: asyncpg.Record) -> Attachment:
    return Attachment(str(row["attachment_id"]), row["name"], row["media_type"], row["digest"], row["size_bytes"])


def command(row: asyncpg.Record) -> Command:
    return Command(
        str(row["command_id"]),
        Key(row["project"], row["session"]),
        CommandKind(row["kind"]),
        text(row["execution_id"]),
        CommandState(row["state"]),
        CommandOutcome(row["outcome"]) if row["outcome"] is not None else None,
        row["attempts"],
        text(row["claimed_by"]),
        text(row["steer_input_id"]),
        row["created_at"],
        row["settled_at"],
    )


def gate(row: asyncpg.Record) -> Gate:
    return Gate(
        str(row["interaction_id"]),
        Key(row["project"], row["session"]),
        str(row["execution_id"]),
        row["tool_call_id"],
        row["request_key"],
        GateKind(row["kind"]),
        GateState(row["state"]),
        row["request"],
        row["input_digest"],
        Decision(row["decision"]) if row["decision"] is not None else None,
        row["answer_json"],
        row["answered_by"],
        Resolution(row["resolution"]) if row["resolution"] is not None else None,
        text(row["consumed_by"]),
        row["created_at"],
        row["answered_at"],
        row["closed_at"],
        row["expires_at"],
    )
