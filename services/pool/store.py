"""The pool's schema as seen from Python: named SQL in, rows out. It decides nothing.

Whatever changes a session goes through `Store.changing`: it locks the session row first, and writes the row and the
facts that were added back in one statement just before the commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Protocol

import asyncpg

from services.chassis.postgres import Connection, Pool, Queries
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    Fact,
    Finished,
    Input,
    InputState,
    Key,
    OutboxRow,
    Outcome,
    Replica,
    Request,
    Session,
    View,
)

SCHEMA = "pool"

# Every query goes by an index; a plan made while a table is still empty must not become a scan of the full one.
PLANNER = {"enable_seqscan": "off", "jit": "off"}


class Changed(Protocol):
    """Hears of each commit on a session. `admitted_at`: when the request came that made it, on the monotonic clock."""

    def __call__(self, key: Key, *, admitted_at: float | None = None) -> None:
        """Look at the session's rows."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PickedUp:
    """An execution that this replica drives from now on, with all that its turn starts from."""

    execution: Execution
    spec: bytes
    ended_execution_id: str | None
    finished: Finished | None
    content: bytes
    expected_transcript: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A session as a reader sees it."""

    session: Session
    execution: Execution | None
    queued: int
    open_gates: int


class Changing:
    """One transaction on one session, whose row is locked. `session` is the row as it will be written."""

    def __init__(self, connection: Connection, queries: Queries, session: Session) -> None:
        self._connection = connection
        self._queries = queries
        self._read = session
        self._facts: list[Fact] = []
        self.session = session

    @property
    def key(self) -> Key:
        """Whose transaction it is."""
        return self.session.key

    @property
    def facts(self) -> int:
        """How many facts this transaction tells."""
        return len(self._facts)

    def change(
        self,
        *,
        epoch: int | None = None,
        queue_paused: bool | None = None,
        spec: bytes | None = None,
        execution_id: str | None = None,
        deleted_at: datetime | None = None,
    ) -> None:
        """Change columns of the session row; what is not given stays."""
        given = {
            "epoch": epoch,
            "queue_paused": queue_paused,
            "spec": spec,
            "execution_id": execution_id,
            "deleted_at": deleted_at,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.session = dataclasses.replace(self.session, **changes)  # type: ignore[arg-type]

    def ended(self, execution_id: str, finished: Finished | None) -> None:
        """Note the last execution that was settled, and who wrote the last finished turn."""
        self.session = dataclasses.replace(self.session, ended_execution_id=execution_id, finished=finished)

    def tell(self, *facts: Fact) -> None:
        """Add facts to the outbox, in order."""
        self._facts += facts

    async def view(self, request_id: str = "") -> View:
        """What else is known, read after the lock."""
        row = await self._connection.fetchrow(self._queries.view, *self.key, request_id)
        assert row is not None
        request = None
        if row["request_method"] is not None:
            request = Request(
                row["request_method"],
                row["request_fingerprint"],
                _text(row["request_input_id"]),
                _text(row["request_command_id"]),
            )
        active = _execution(row) if row["execution_id"] is not None else None
        return View(request, active, row["queued"], row["open_gates"])

    async def execution(self, execution_id: str) -> Execution | None:
        """An execution of this session."""
        row = await self._connection.fetchrow(self._queries.execution, *self.key, execution_id)
        return _execution(row) if row is not None else None

    async def insert_request(
        self,
        request_id: str,
        method: str,
        fingerprint: bytes,
        *,
        input_id: str | None = None,
        command_id: str | None = None,
    ) -> None:
        """Note what was accepted under a request id."""
        await self._connection.execute(
            self._queries.insert_request, *self.key, request_id, method, fingerprint, input_id, command_id
        )

    async def admit(
        self,
        *,
        request_id: str,
        fingerprint: bytes,
        input_id: str,
        execution_id: str | None,
        content: bytes,
        spec: bytes | None,
        expected_transcript: bytes | None,
        traceparent: str,
    ) -> Execution | None:
        """Store a request with its input: promoted to a new execution at the session's epoch when one is named, else
        at the end of the queue."""
        row = await self._connection.fetchrow(
            self._queries.admit,
            *self.key,
            request_id,
            fingerprint,
            input_id,
            execution_id,
            content,
            spec,
            expected_transcript,
            traceparent,
            self.session.epoch,
        )
        return _execution(row) if row is not None else None

    async def promote(self, input_id: str, execution_id: str) -> Execution:
        """Give an input that waits to a new execution at the session's epoch."""
        row = await self._connection.fetchrow(self._queries.promote, input_id, self.session.epoch, execution_id)
        assert row is not None, "the session row is locked and the input was just seen waiting"
        return _execution(row)

    async def queue(self, *, offset: int = 0, limit: int = 1) -> list[Input]:
        """Inputs that wait, by rank."""
        rows = await self._connection.fetch(self._queries.queue, *self.key, offset, limit)
        return [_input(row) for row in rows]

    async def input(self, input_id: str) -> Input | None:
        """An input of this session."""
        row = await self._connection.fetchrow(self._queries.input, *self.key, input_id)
        return _input(row) if row is not None else None

    async def remove_inputs(self, input_id: str | None = None) -> list[str]:
        """Take one input out of the queue, or all of them; the ids of those that were waiting."""
        rows = await self._connection.fetch(self._queries.remove_inputs, *self.key, input_id)
        return [str(row["input_id"]) for row in rows]

    async def update_input(self, input_id: str, content: bytes) -> bool:
        """Replace the content of an input that waits; False when it does not wait."""
        return await self._connection.fetchval(self._queries.update_input, input_id, content) is not None

    async def settle(
        self, execution_id: str, outcome: Outcome, code: str, sequence: int, commands: CommandOutcome
    ) -> Execution | None:
        """Close an execution and its open commands; None when it was closed before."""
        row = await self._connection.fetchrow(
            self._queries.settle, execution_id, outcome, code, sequence, str(commands)
        )
        return _execution(row) if row is not None else None

    async def end_by_pool(
        self, execution_id: str, state: ExecutionState, ending_event_id: str, *, epoch: int
    ) -> Execution | None:
        """Bind an execution to an ending of the outbox, written at `epoch`; None when it ends already."""
        row = await self._connection.fetchrow(self._queries.end_by_pool, execution_id, state, ending_event_id, epoch)
        return _execution(row) if row is not None else None

    async def stop(self, execution_id: str) -> Execution | None:
        """Move an execution to STOPPING; None when it is no longer where a Stop can reach it."""
        row = await self._connection.fetchrow(self._queries.stop, execution_id)
        return _execution(row) if row is not None else None

    async def raise_epoch(self, execution_id: str) -> Execution | None:
        """Take an execution from its driver by the session's epoch; None when it ended or is not below it."""
        row = await self._connection.fetchrow(self._queries.raise_epoch, execution_id, self.session.epoch)
        return _execution(row) if row is not None else None

    async def open_gates(self, execution_id: str) -> list[str]:
        """The interactions of an execution that are not closed."""
        rows = await self._connection.fetch(self._queries.open_gates, execution_id)
        return [str(row["interaction_id"]) for row in rows]

    async def insert_command(
        self,
        command_id: str,
        kind: CommandKind,
        execution_id: str | None,
        state: CommandState,
        outcome: CommandOutcome | None,
    ) -> Command:
        """Store a command."""
        row = await self._connection.fetchrow(
            self._queries.insert_command, command_id, *self.key, kind, execution_id, state, outcome
        )
        assert row is not None
        return _command(row)

    async def command(self, command_id: str) -> Command | None:
        """A command of this session."""
        row = await self._connection.fetchrow(self._queries.command, *self.key, command_id)
        return _command(row) if row is not None else None

    async def open_cancel(self, execution_id: str) -> Command | None:
        """The cancel of an execution that is still open."""
        row = await self._connection.fetchrow(self._queries.open_cancel, execution_id)
        return _command(row) if row is not None else None

    async def step(self, execution_id: str, ending_event_id: str | None, epoch: int) -> None:
        """Move an execution, and the ending that it is bound to, to a higher epoch; who drives it below that is out."""
        await self._connection.execute(self._queries.step, execution_id, ending_event_id, epoch)

    async def rewrite_fact(self, number: int, event_id: str, event: bytes) -> None:
        """Replace a fact in its place."""
        await self._connection.execute(self._queries.rewrite_fact, *self.key, number, event_id, event)

    async def refuse_fact(self, number: int, reason: str) -> None:
        """Mark a fact that history will never take."""
        await self._connection.execute(self._queries.refuse_fact, *self.key, number, reason)

    async def save(self) -> None:
        """Write the session row and the facts, if there is anything to write."""
        if not self._facts and self.session == self._read:
            return
        first = self.session.outbox_number + 1
        self.session = dataclasses.replace(self.session, outbox_number=self.session.outbox_number + len(self._facts))
        now = self.session
        await self._connection.execute(
            self._queries.save_session,
            *self.key,
            now.epoch,
            now.holder,
            now.queue_paused,
            now.spec,
            now.execution_id,
            now.ended_execution_id,
            now.finished.agent if now.finished is not None else None,
            now.finished.session_id if now.finished is not None else None,
            list(range(first, first + len(self._facts))),
            [fact.event_id for fact in self._facts],
            [fact.event for fact in self._facts],
            [fact.execution_id for fact in self._facts],
            [fact.transition for fact in self._facts],
            now.outbox_number,
            now.deleted_at,
            now.finished.execution_id if now.finished is not None else None,
        )
        self._facts = []
        self._read = now


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
            changing = Changing(connection, self._queries, _session(row))
            yield changing
            await changing.save()

    async def session(self, key: Key) -> Session | None:
        """The row of a session."""
        row = await self._pool.fetchrow(self._queries.session, *key)
        return _session(row) if row is not None else None

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
        executions = {row["execution_id"]: _execution(row) for row in found}
        return [
            Shown(_session(row), executions.get(row["execution_id"]), row["queued"], row["open_gates"]) for row in rows
        ]

    async def execution(self, key: Key, execution_id: str) -> Execution | None:
        """One execution."""
        row = await self._pool.fetchrow(self._queries.execution, *key, execution_id)
        return _execution(row) if row is not None else None

    async def active_execution(self, key: Key) -> Execution | None:
        """The execution of a session that has not ended."""
        row = await self._pool.fetchrow(self._queries.active_execution, *key)
        return _execution(row) if row is not None else None

    async def command(self, key: Key, command_id: str) -> Command | None:
        """One command."""
        row = await self._pool.fetchrow(self._queries.command, *key, command_id)
        return _command(row) if row is not None else None

    async def queue(self, key: Key, *, offset: int, limit: int) -> list[Input]:
        """Inputs that wait, by rank."""
        return [_input(row) for row in await self._pool.fetch(self._queries.queue, *key, offset, limit)]

    async def unstarted_inputs(self, key: Key) -> list[Input]:
        """Inputs that were given to an execution that has not reached the agent."""
        return [_input(row) for row in await self._pool.fetch(self._queries.unstarted_inputs, *key)]

    async def pick_up(self, key: Key, holder: str) -> PickedUp | None:
        """Take the pending execution of a session to drive it; None when there is none, or another has it."""
        row = await self._pool.fetchrow(self._queries.pick_up, *key, holder)
        if row is None:
            return None
        return PickedUp(
            _execution(row),
            row["session_spec"],
            _text(row["ended_execution_id"]),
            _finished(row["finished_agent"], row["finished_session_id"], row["finished_execution_id"]),
            row["input_content"] or b"",
            row["expected_transcript"],
        )

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
        )
        return row is not None

    async def claim_cancel(self, execution_id: str, holder: str, lease: float) -> Command | None:
        """Take the pending cancel of an execution for delivery, for `lease` seconds."""
        row = await self._pool.fetchrow(self._queries.claim_cancel, execution_id, holder, lease)
        return _command(row) if row is not None else None

    async def return_commands(self) -> list[Key]:
        """Put commands whose delivery took too long back to PENDING; whose they are."""
        return _keys(await self._pool.fetch(self._queries.return_commands))

    async def outbox(self, key: Key, limit: int) -> list[OutboxRow]:
        """The oldest facts of a session that wait."""
        rows = await self._pool.fetch(self._queries.outbox, *key, limit)
        return [
            OutboxRow(row["number"], str(row["event_id"]), row["event"], _text(row["execution_id"]), row["transition"])
            for row in rows
        ]

    async def acknowledge(self, key: Key, numbers: Sequence[int], sequence: int) -> None:
        """Forget facts that history has; the highest of their sequences is `sequence`."""
        await self._pool.execute(self._queries.acknowledge, *key, numbers, sequence)

    async def rewrite_fact(self, key: Key, number: int, event_id: str, event: bytes) -> None:
        """Replace the bytes of a fact of which history has stored nothing."""
        await self._pool.execute(self._queries.rewrite_fact, *key, number, event_id, event)

    async def outbox_overdue(self, age: float, limit: int) -> list[Key]:
        """Sessions with facts that wait for more than `age` seconds."""
        return _keys(await self._pool.fetch(self._queries.outbox_overdue, age, limit))

    async def outbox_depth(self) -> int:
        """How many facts wait."""
        depth: int = await self._pool.fetchval(self._queries.outbox_depth)
        return depth

    async def waiting_work(self, limit: int) -> list[Key]:
        """Sessions with an execution that nobody picked up, or a command that nobody has."""
        return _keys(await self._pool.fetch(self._queries.waiting_work, limit))

    async def unfinished(self) -> list[Execution]:
        """Every execution that has not ended, oldest first."""
        return [_execution(row) for row in await self._pool.fetch(self._queries.unfinished)]

    async def driven_by(self, holder: str) -> list[Execution]:
        """The executions that a holder drives by the rows."""
        return [_execution(row) for row in await self._pool.fetch(self._queries.driven_by, holder)]

    async def clear_holder(self, key: Key, holder: str) -> None:
        """Say that a holder keeps nothing of a session, unless it drives it."""
        await self._pool.execute(self._queries.clear_holder, *key, holder)

    async def forget_holders(self, holder: str) -> None:
        """Say that nobody but `holder` keeps anything."""
        await self._pool.execute(self._queries.forget_holders, holder)

    async def to_purge(self, limit: int) -> list[tuple[Key, int]]:
        """Sessions whose deletion was accepted and is not done, with their epochs."""
        rows = await self._pool.fetch(self._queries.to_purge, limit)
        return [(Key(row["project"], row["session"]), row["epoch"]) for row in rows]

    async def purge(self, key: Key) -> None:
        """Delete all rows of a deleted session but its own."""
        await self._pool.execute(self._queries.purge, *key)

    async def register_replica(self, holder: str, address: str) -> None:
        """Add a replica."""
        await self._pool.execute(self._queries.register_replica, holder, address)

    async def beat(self, holder: str, *, draining: bool, driving: Iterable[str], entries: int) -> None:
        """Say that a replica lives, and what it does."""
        await self._pool.execute(self._queries.beat, holder, draining, list(driving), entries)

    async def remove_replica(self, holder: str) -> None:
        """Remove a replica that ended."""
        await self._pool.execute(self._queries.remove_replica, holder)

    async def forget_replicas(self, holder: str) -> None:
        """Remove every replica but `holder`."""
        await self._pool.execute(self._queries.forget_replicas, holder)

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


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _keys(rows: Sequence[asyncpg.Record]) -> list[Key]:
    return list(dict.fromkeys(Key(row["project"], row["session"]) for row in rows))


def _finished(agent: str | None, session_id: str | None, execution_id: object) -> Finished | None:
    if agent is None or session_id is None or execution_id is None:
        return None
    return Finished(agent, session_id, str(execution_id))


def _session(row: asyncpg.Record) -> Session:
    return Session(
        Key(row["project"], row["session"]),
        row["epoch"],
        _text(row["holder"]),
        row["queue_paused"],
        row["spec"],
        _text(row["execution_id"]),
        _text(row["ended_execution_id"]),
        _finished(row["harness_agent"], row["harness_session_id"], row["harness_execution_id"]),
        row["outbox_number"],
        row["history_sequence"],
        row["created_at"],
        row["updated_at"],
        row["deleted_at"],
    )


def _execution(row: asyncpg.Record) -> Execution:
    return Execution(
        str(row["execution_id"]),
        Key(row["project"], row["session"]),
        row["epoch"],
        row["admitted_epoch"],
        ExecutionState(row["state"]),
        Outcome(row["outcome"]) if row["outcome"] is not None else None,
        row["failure_code"],
        _text(row["input_id"]),
        _text(row["source_execution_id"]),
        row["tries"],
        _text(row["driver"]),
        _text(row["ending_event_id"]),
        row["agent"],
        row["harness_session_id"],
        row["traceparent"],
        row["created_at"],
        row["started_at"],
        row["settled_at"],
        row["ending_sequence"],
    )


def _input(row: asyncpg.Record) -> Input:
    return Input(
        str(row["input_id"]),
        Key(row["project"], row["session"]),
        InputState(row["state"]),
        row["content"],
        row["spec"],
        row["expected_transcript"],
        _text(row["steer_command_id"]),
        _text(row["execution_id"]),
        row["traceparent"],
        row["created_at"],
        row["rank"],
    )


def _command(row: asyncpg.Record) -> Command:
    return Command(
        str(row["command_id"]),
        Key(row["project"], row["session"]),
        CommandKind(row["kind"]),
        _text(row["execution_id"]),
        CommandState(row["state"]),
        CommandOutcome(row["outcome"]) if row["outcome"] is not None else None,
        row["attempts"],
        _text(row["claimed_by"]),
        _text(row["steer_input_id"]),
        row["created_at"],
        row["settled_at"],
    )
