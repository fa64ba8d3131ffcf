"""The gates of one session, and the states of an execution that go with them, inside of a transaction that holds its
row. It decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime

import asyncpg

from services.chassis.postgres import Connection, Queries
from services.pool import records
from services.pool.control.executions import leading_to
from services.pool.rows import Decision, Execution, ExecutionState, Gate, GateKind, Key, Resolution


@dataclasses.dataclass(frozen=True, slots=True)
class GateRow:
    """A gate that is to be stored."""

    interaction_id: str
    tool_call_id: str
    request_key: str
    kind: GateKind
    request: bytes
    input_digest: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerRow:
    """An answer that is to be stored."""

    interaction_id: str
    decision: Decision | None
    answer_json: str | None


class GateRows:
    """Named SQL on the gates of a session whose row is locked. What is returned is ordered as it was asked."""

    def __init__(self, connection: Connection, queries: Queries, key: Key) -> None:
        self._connection = connection
        self._queries = queries
        self._key = key

    async def wait(self, execution: Execution, holder: str) -> datetime | None:
        """Move an execution to WAITING if `holder` drives it at that epoch; the time of this transaction. None when it
        does not, or the execution is where nothing is asked any more."""
        row = await self._connection.fetchrow(
            self._queries.wait, execution.execution_id, execution.epoch, holder, leading_to(ExecutionState.WAITING)
        )
        return row["moment"] if row is not None else None

    async def insert(self, execution_id: str, gates: Sequence[GateRow], expires_at: datetime) -> list[Gate]:
        """Store gates; those that were not there before."""
        return _gates(
            await self._connection.fetch(
                self._queries.insert_gates,
                *self._key,
                execution_id,
                [gate.interaction_id for gate in gates],
                [gate.tool_call_id for gate in gates],
                [gate.request_key for gate in gates],
                [gate.kind for gate in gates],
                [gate.request for gate in gates],
                [gate.input_digest for gate in gates],
                expires_at,
            )
        )

    async def named(self, interaction_ids: Iterable[str]) -> list[Gate]:
        """Those of these gates that this session has."""
        return _gates(await self._connection.fetch(self._queries.gates, *self._key, list(interaction_ids)))

    async def of(self, execution_id: str) -> list[Gate]:
        """All gates of an execution."""
        return _gates(await self._connection.fetch(self._queries.gates_of, execution_id))

    async def counts(self, execution_id: str) -> tuple[int, int]:
        """How many gates of an execution wait for an answer, and how many for their answer to be passed on."""
        row = await self._connection.fetchrow(self._queries.gate_counts, execution_id)
        assert row is not None
        return row["pending"], row["answered"]

    async def answer(self, answers: Sequence[AnswerRow], answered_by: str) -> list[Gate]:
        """PENDING → ANSWERED, of those that are still open."""
        return _gates(
            await self._connection.fetch(
                self._queries.answer_gates,
                *self._key,
                [answer.interaction_id for answer in answers],
                [answer.decision for answer in answers],
                [answer.answer_json for answer in answers],
                answered_by,
            )
        )

    async def consume(self, consumer: str, interaction_ids: Iterable[str]) -> list[Gate]:
        """ANSWERED → CONSUMED, by the execution `consumer`; those that were ANSWERED."""
        return _gates(
            await self._connection.fetch(self._queries.consume_gates, *self._key, consumer, list(interaction_ids))
        )

    async def close(self, execution_id: str | None, resolution: Resolution) -> list[Gate]:
        """PENDING or ANSWERED → CLOSED, of an execution or of the whole session; those that were open."""
        return _gates(await self._connection.fetch(self._queries.close_gates, *self._key, execution_id, resolution))

    async def expire(self) -> list[Gate]:
        """Close those whose time is over."""
        return _gates(await self._connection.fetch(self._queries.expire_gates, *self._key))

    async def go_on(self, execution_id: str) -> bool:
        """WAITING → RUNNING when no gate of the execution waits for an answer; whether it was moved."""
        return await self._connection.fetchrow(self._queries.go_on, execution_id) is not None

    async def run_picked(self, execution: Execution, holder: str, agent: str, harness_session_id: str) -> bool:
        """The same as `Store.run`, in this transaction."""
        row = await self._connection.fetchrow(
            self._queries.run_picked,
            execution.execution_id,
            execution.epoch,
            holder,
            agent,
            harness_session_id,
            leading_to(ExecutionState.RUNNING),
        )
        return row is not None

    async def continue_(
        self, execution_id: str, epoch: int, source_execution_id: str, traceparent: str
    ) -> Execution | None:
        """A new execution that goes on with what `source_execution_id` has asked. None when it was gone on with before,
        or something is under way. An empty `traceparent` takes that of the source."""
        row = await self._connection.fetchrow(
            self._queries.continue_source, *self._key, execution_id, epoch, source_execution_id, traceparent
        )
        return records.execution(row) if row is not None else None

    async def continuation(self, source_execution_id: str) -> Execution | None:
        """The execution that went on with what another has asked."""
        row = await self._connection.fetchrow(self._queries.continuation, source_execution_id)
        return records.execution(row) if row is not None else None


def _gates(rows: Sequence[asyncpg.Record]) -> list[Gate]:
    return sorted(map(records.gate, rows), key=lambda gate: (gate.created_at, gate.interaction_id))
