"""The pool's schema as seen from Python: named SQL in, rows out. It decides nothing.

Whatever changes a session goes through `Store.changing`: it locks the session row first, and writes the row and the
facts that were added back in one statement just before the commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Protocol

import asyncpg

from services.chassis.postgres import Connection, Pool, Queries
from services.pool import records
from services.pool.changing import Changing
from services.pool.control.executions import leading_to
from services.pool.rows import (
    Command,
    Execution,
    ExecutionState,
    Finished,
    Gate,
    Input,
    Key,
    OutboxRow,
    Replica,
    Session,
)

SCHEMA = "pool"

# Every query goes by an index; a plan made while a table is still empty must not become a scan of the full one.
PLANNER = {"enable_seqscan": "off", "jit": "off"}


@dataclasses.dataclass(frozen=True, slots=True)
class PickedUp:
    """An execution that this replica drives from now on, with all that its turn starts from.

    `continued`: gates that executions before it have left to be told of, in the order in which they were asked. Those
    that are ANSWERED are passed on by it (`Interactions.begin`); one that is CONSUMED was passed on by another, and
    only the log may know what came of that; one that is CLOSED was never answered.
    """

    execution: Execution
    spec: bytes
    ended_execution_id: str | None
    finished: Finished | None
    content: bytes
    expected_transcript: bytes | None
    continued: Sequence[Gate] = ()


class Changed(Protocol):
    """Hears of each commit on a session. `admitted_at`: when the request came that made it, on the monotonic clock.
    `picked`: what this replica has picked up by it. `facts`: what it told, if it is known."""

    def __call__(
        self,
        key: Key,
        *,
        admitted_at: float | None = None,
        picked: PickedUp | None = None,
        facts: Sequence[OutboxRow] = (),
    ) -> None:
        """Look at the session's rows."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A session as a reader sees it."""

    session: Session
    execution: Execution | None
    queued: int
    open_gates: int


class Store:
    """Reads, single statements, and transactions on one session."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queries = Queries.load("services.pool")

    @asynccontextmanager
    async def changing(self, key: Key, *, make: bool = False) -> AsyncIterator[Changing | None]:
        """A transaction on a session, committed when the block ends well.

        None when there is no such session; with `make` it is made, and a block that raises leaves none behind.
        """
        async with self._pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(self._queries.lock_session, *key)
            if row is None and make:
                await connection.execute(self._queries.make_session, *key)
                row = await connection.fetchrow(self._queries.lock_session, *key)
            if row is None:
                yield None
                return
            changing = Changing(connection, self._queries, records.session(row))
            yield changing
            await changing.save()

    async def attachment_content(self, key: Key, attachment_id: str) -> bytes | None:
        """The bytes of an attachment of a session."""
        content: bytes | None = await self._pool.fetchval(self._queries.attachment_content, *key, attachment_id)
        return content

    async def session(self, key: Key) -> Session | None:
        """The row of a session."""
        row = await self._pool.fetchrow(self._queries.session, *key)
        return records.session(row) if row is not None else None

    async def shown_session(self, key: Key) -> Shown | None:
        """A session with its newest execution."""
        async with self._pool.acquire() as connection, connection.transaction(isolation="repeatable_read"):
            row = await connection.fetchrow(self._queries.shown_session, *key)
            return (await self._shown(connection, [row]))[0] if row is not None else None

    async def shown_sessions(self, project: str, after: tuple[datetime, str] | None, limit: int) -> list[Shown]:
        """Sessions of a project, newest change first, after (updated_at, session id) of the last one of a page."""
        async with self._pool.acquire() as connection, connection.transaction(isolation="repeatable_read"):
            rows = await connection.fetch(self._queries.shown_sessions, project, *(after or (None, "")), limit)
            return await self._shown(connection, rows)

    async def _shown(self, connection: Connection, rows: Sequence[asyncpg.Record]) -> list[Shown]:
        ids = [row["execution_id"] for row in rows if row["execution_id"] is not None]
        found = await connection.fetch(self._queries.executions, ids) if ids else []
        executions = {row["execution_id"]: records.execution(row) for row in found}
        return [
            Shown(records.session(row), executions.get(row["execution_id"]), row["queued"], row["open_gates"])
            for row in rows
        ]

    async def execution(self, key: Key, execution_id: str) -> Execution | None:
        """One execution."""
        row = await self._pool.fetchrow(self._queries.execution, *key, execution_id)
        return records.execution(row) if row is not None else None

    async def active_execution(self, key: Key) -> Execution | None:
        """The execution of a session that has not ended."""
        row = await self._pool.fetchrow(self._queries.active_execution, *key)
        return records.execution(row) if row is not None else None

    async def command(self, key: Key, command_id: str) -> Command | None:
        """One command."""
        row = await self._pool.fetchrow(self._queries.command, *key, command_id)
        return records.command(row) if row is not None else None

    async def queue(self, key: Key, *, offset: int, limit: int) -> list[Input]:
        """Inputs that wait, by rank."""
        return [records.input_(row) for row in await self._pool.fetch(self._queries.queue, *key, offset, limit)]

    async def unstarted_inputs(self, key: Key) -> list[Input]:
        """Inputs that were given to an execution that has not reached the agent."""
        return [records.input_(row) for row in await self._pool.fetch(self._queries.unstarted_inputs, *key)]

    async def pick_up(self, key: Key, holder: str) -> PickedUp | None:
        """Take the pending execution of a session to drive it; None when there is none, or another has it."""
        row = await self._pool.fetchrow(self._queries.pick_up, *key, holder)
        if row is None:
            return None
        execution, ended = records.execution(row), records.text(row["ended_execution_id"])
        return PickedUp(
            execution,
            row["session_spec"],
            ended,
            records.finished(row["finished_agent"], row["finished_session_id"], row["finished_execution_id"]),
            row["input_content"] or b"",
            row["expected_transcript"],
            await self._carried(execution) if row["carried"] else (),
        )

    async def _carried(self, execution: Execution) -> list[Gate]:
        rows = await self._pool.fetch(self._queries.carried_gates, *execution.key, execution.source_execution_id)
        return [records.gate(row) for row in rows]

    async def gates(self, execution_id: str) -> list[Gate]:
        """What an execution has asked, in order."""
        return [records.gate(row) for row in await self._pool.fetch(self._queries.gates_of, execution_id)]

    async def named_gates(self, key: Key, interaction_ids: Sequence[str]) -> list[Gate]:
        """Those of these gates that a session has."""
        return [records.gate(row) for row in await self._pool.fetch(self._queries.gates, *key, interaction_ids)]

    async def list_gates(
        self, key: Key, *, pending_only: bool, after: tuple[datetime, str] | None, limit: int
    ) -> list[Gate]:
        """Gates of a session, oldest first, after (created_at, id) of the last one of a page. `pending_only`: those
        that can still be answered."""
        rows = await self._pool.fetch(self._queries.list_gates, *key, pending_only, *(after or (None, None)), limit)
        return [records.gate(row) for row in rows]

    async def expired_gates(self, limit: int) -> list[Key]:
        """Sessions with gates whose time is over."""
        return records.keys(await self._pool.fetch(self._queries.expired_gates, limit))

    async def unheard_gates(self, holder: str, limit: int) -> list[Key]:
        """Sessions whose turn, driven by `holder`, waits for answers and has not taken one that is there."""
        return records.keys(await self._pool.fetch(self._queries.unheard_gates, holder, limit))

    async def give_back(self, execution: Execution, holder: str) -> None:
        """Let go of an execution that did not reach the agent; the try does not count."""
        await self._pool.execute(self._queries.give_back, execution.execution_id, holder, execution.epoch)

    async def count_try(self, execution: Execution, holder: str, change: int) -> None:
        """Change the number of tries of an execution that is still pending."""
        await self._pool.execute(self._queries.count_try, execution.execution_id, holder, execution.epoch, change)

    async def run(self, execution: Execution, holder: str, agent: str, harness_session_id: str) -> bool:
        """Move an execution to RUNNING, if it is still this holder's at its epoch and nothing else ends it."""
        row = await self._pool.fetchrow(
            self._queries.run,
            *execution.key,
            execution.execution_id,
            execution.epoch,
            holder,
            agent,
            harness_session_id,
            leading_to(ExecutionState.RUNNING),
        )
        return row is not None

    async def unasked(self, execution: Execution, holder: str) -> None:
        """Note that the agent of an execution of this holder was not asked, and never will be."""
        await self._pool.execute(self._queries.unasked, execution.execution_id, holder, execution.epoch)

    async def claim_cancel(self, execution_id: str, holder: str, lease: float, *, attempts: int) -> Command | None:
        """Take the pending cancel of an execution that `holder` drives for delivery, for `lease` seconds. None when
        there is none, another has it, or it was tried `attempts` times."""
        row = await self._pool.fetchrow(self._queries.claim_cancel, execution_id, holder, lease, attempts)
        return records.command(row) if row is not None else None

    async def outbox(self, key: Key, limit: int) -> list[OutboxRow]:
        """The oldest facts of a session that wait."""
        rows = await self._pool.fetch(self._queries.outbox, *key, limit)
        return [
            OutboxRow(
                row["number"], str(row["event_id"]), row["event"], records.text(row["execution_id"]), row["transition"]
            )
            for row in rows
        ]

    async def acknowledge(self, key: Key, numbers: Sequence[int], sequence: int) -> None:
        """Forget facts that history has; the highest of their sequences is `sequence`."""
        await self._pool.execute(self._queries.acknowledge, *key, numbers, sequence)

    async def rewrite_fact(self, key: Key, number: int, event_id: str, event: bytes) -> None:
        """Replace the bytes of a fact of which history has stored nothing."""
        await self._pool.execute(self._queries.rewrite_fact, *key, number, event_id, event)

    async def outbox_depth(self) -> int:
        """How many facts wait."""
        depth: int = await self._pool.fetchval(self._queries.outbox_depth)
        return depth

    async def driven_by(self, holder: str) -> list[Execution]:
        """The executions that a holder drives by the rows."""
        return [records.execution(row) for row in await self._pool.fetch(self._queries.driven_by, holder)]

    async def clear_holder(self, key: Key, holder: str) -> None:
        """Say that a holder keeps nothing of a session, unless it drives it."""
        await self._pool.execute(self._queries.clear_holder, *key, holder)

    async def to_purge(self, limit: int) -> list[tuple[Key, int]]:
        """Sessions whose deletion was accepted and is not done, with their epochs."""
        rows = await self._pool.fetch(self._queries.to_purge, limit)
        return [(Key(row["project"], row["session"]), row["epoch"]) for row in rows]

    async def purge(self, key: Key) -> None:
        """Delete all rows of a deleted session but its own."""
        await self._pool.execute(self._queries.purge, *key)

    async def replicas(self, after: str | None, limit: int) -> list[Replica]:
        """Replicas by id, after one."""
        rows = await self._pool.fetch(self._queries.replicas, after, limit)
        return [
            Replica(
                str(row["holder"]),
                row["address"],
                row["draining"],
                tuple(row["driving"]),
                row["entries"],
                row["started_at"],
                row["beat_at"],
            )
            for row in rows
        ]
