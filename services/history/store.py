"""The log in Postgres: the only place that runs the SQL of this service, and turns rows into values and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg

from services.chassis.errors import HearthError, as_hearth_error, internal
from services.chassis.postgres import Connection, Pool, Queries
from services.history.ledger import Draft, Ending, Execution, LogState, Stored, Writes
from services.history.validate import Key

logger = logging.getLogger(__name__)

SCHEMA = "history"
_HIGHEST_AFTER = 2**62
QUERIES = Queries.load("services.history")

# Every query of this service is bound by an index. A plan that is made while a table is still empty would be a scan,
# and would stay one for the life of the connection.
PLANNER = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    # A statement of a group must see what the one before it waited for.
    "default_transaction_isolation": "read committed",
}

# SQLSTATE classes: data that does not fit its type or a constraint, or is too big.
_DATA = ("22", "23", "54")


def refuses_data(error: Exception) -> bool:
    """Whether Postgres (or its client) refused the data of a statement: the same statement fails again."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_DATA)
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)


def failure_of(error: Exception) -> HearthError:
    """What the callers of a failed group are told."""
    found = as_hearth_error(error)
    if found is None:
        logger.error("a commit failed by a defect", exc_info=error)
        return internal()
    if found is not error:
        logger.warning("a commit failed, a dependency is away", extra={"cause": type(error).__name__})
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """What must be known of a log before a decision: these executions, and which of these event ids are taken."""

    executions: frozenset[str] = frozenset()
    event_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class Reading:
    """A log as it was read."""

    state: LogState
    stored: dict[str, Stored] = field(default_factory=dict)


class Plan(NamedTuple):
    """What is to be written to one log: the state that was decided on, and the draft made from it."""

    key: Key
    before: LogState
    draft: Draft


async def read_logs(connection: Connection, wanted: Mapping[Key, Wanted], *, lock: bool = False) -> dict[Key, Reading]:
    """The present state of each log; with `lock` (inside of a transaction) it stays so until the transaction ends.

    The log rows are read first: whatever is read after them and is newer makes a write fail on their revision.
    """
    keys = list(wanted)
    readings = {key: Reading(LogState()) for key in keys}
    query = QUERIES.lock_logs if lock else QUERIES.read_logs
    rows = await connection.fetch(query, [key[0] for key in keys], [key[1] for key in keys])
    found = [(keys[row["place"] - 1], row) for row in rows]
    executions: list[tuple[Key, int, str]] = []
    events: list[tuple[Key, int, str]] = []
    for key, row in found:
        readings[key].state = _state(row)
        current = {readings[key].state.execution_id} - {""}
        executions += [(key, row["id"], execution_id) for execution_id in wanted[key].executions | current]
        events += [(key, row["id"], event_id) for event_id in wanted[key].event_ids]
    known: dict[Key, dict[str, Execution]] = {key: {} for key in keys}
    for key, row in await _look_up(connection, QUERIES.read_executions, executions):
        known[key][str(row["execution_id"])] = execution_of(row)
    for key, reading in readings.items():
        reading.state = reading.state._replace(executions=known[key])
    places = {(key, event_id) for key, _, event_id in events}
    assert len(places) == len(events), "each id is asked for once"
    for (key, event_id), row in await _look_up_ids(connection, events):
        readings[key].stored[event_id] = Stored(row["digest"], row["sequence"], row["reason"])
    return readings


async def _look_up(
    connection: Connection, query: str, asked: Sequence[tuple[Key, int, str]]
) -> list[tuple[Key, asyncpg.Record]]:
    if not asked:
        return []
    rows = await connection.fetch(query, [log for _, log, _ in asked], [id_ for _, _, id_ in asked])
    return [(asked[row["place"] - 1][0], row) for row in rows]


async def _look_up_ids(
    connection: Connection, asked: Sequence[tuple[Key, int, str]]
) -> list[tuple[tuple[Key, str], asyncpg.Record]]:
    if not asked:
        return []
    rows = await connection.fetch(QUERIES.read_stored, [log for _, log, _ in asked], [id_ for _, _, id_ in asked])
    return [((asked[row["place"] - 1][0], asked[row["place"] - 1][2]), row) for row in rows]


async def write_logs(connection: Connection, plans: Sequence[Plan], *, revision: str) -> list[LogState | None]:
    """Write each plan, whole or not at all, in one call; the new states, None where the log had changed since.

    `revision` is a fresh uuid: the one that the logs get. The state of a log that does not exist yet carries the
    `log_id` and the `revision` to make it with, and the id 0.
    """
    states = [plan.draft.state for plan in plans]
    ids: list[int] = await connection.fetchval(QUERIES.append_group, *_arguments(plans, states, revision))
    return [_settled(state, written, revision) if written else None for state, written in zip(states, ids, strict=True)]


def _settled(state: LogState, row_id: int, revision: str) -> LogState:
    """The state as it is remembered: of the executions, only the one that holds the epoch."""
    current = state.executions
    if len(current) > 1:
        current = {state.execution_id: current[state.execution_id]}
    return state._replace(id=row_id, revision=revision, executions=current)


def _arguments(plans: Sequence[Plan], states: Sequence[LogState], revision: str) -> list[Any]:
    logs: list[tuple[Any, ...]] = []
    new: list[tuple[Any, ...]] = []
    driven: list[tuple[Any, ...]] = []
    events: list[tuple[Any, ...]] = []
    executions: list[tuple[Any, ...]] = []
    quarantine: list[tuple[Any, ...]] = []
    for place, (plan, state) in enumerate(zip(plans, states, strict=True), start=1):
        before, writes = plan.before, plan.draft.writes
        logs.append((before.id, before.revision, state.head, state.tail_id or None, state.runner_events))
        if not before.id:
            new.append((place, *plan.key, before.log_id))
        if writes.opened or writes.changed or state.gap_reason != before.gap_reason:
            driven.append((place, state.epoch, state.execution_id or None, state.ended, state.gap_reason))
        events += [(place, sequence, it.event_id, it.digest, it.raw) for sequence, it in writes.appended]
        executions += [(place, *columns) for columns in _execution_columns(writes)]
        quarantine += [
            (place, it.event_id, it.execution_id, it.digest, it.raw, reason, current_epoch)
            for it, reason, current_epoch in writes.quarantined
        ]
    known, after = _columns(logs, 5)[:2], _columns(logs, 5)[2:]
    rest = [(new, 4), (driven, 5), (events, 5), (executions, 9), (quarantine, 7)]
    return [*known, revision, *after, *(column for rows, width in rest for column in _columns(rows, width))]


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


def _execution_columns(writes: Writes) -> Iterable[tuple[Any, ...]]:
    for is_new, rows in ((True, writes.opened), (False, writes.changed)):
        for execution_id, execution in rows.items():
            ending = execution.ending
            yield (
                execution_id,
                is_new,
                execution.epoch,
                ending.event_id if ending else None,
                ending.type if ending else None,
                ending.sequence if ending else None,
                execution.incomplete,
                execution.incomplete_reason,
            )


def _state(row: asyncpg.Record) -> LogState:
    return LogState(
        revision=str(row["revision"]),
        id=row["id"],
        log_id=str(row["log_id"]),
        head=row["head"],
        tail_id=text(row["tail_id"]),
        epoch=row["epoch"],
        execution_id=text(row["execution_id"]),
        runner_events=row["runner_events"],
        gap_reason=row["gap_reason"],
        deleted=row["deleted"],
    )


def execution_of(row: asyncpg.Record) -> Execution:
    """The ledger row of any query that selects its columns."""
    ending = None
    if row["ending_id"] is not None:
        ending = Ending(str(row["ending_id"]), row["ending_type"], row["ending_epoch"], row["ending_sequence"])
    return Execution(row["epoch"], ending, row["incomplete"], row["incomplete_reason"])


def text(value: object) -> str:
    """A uuid column as text; empty for null."""
    return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is kept of a log. `oldest` is head + 1 when nothing is; without a log all of it is empty."""

    log_id: str = ""
    oldest: int = 1
    head: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One event as it is stored."""

    sequence: int
    event_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Events after a sequence, and what surrounds them, from one view of the log."""

    bounds: Bounds
    # Id of the event at the sequence asked from, where one is known: stored, or trimmed last.
    at_cursor: str = ""
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Where a log stands. `tail_id` is the id of the event at the head."""

    bounds: Bounds = Bounds()
    tail_id: str = ""
    epoch: int = 0
    execution_id: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One view of a log: its head, its newest execution, why it is incomplete, and events below a sequence."""

    head: HeadRow
    execution: Execution | None = None
    incomplete_reason: str = ""
    rows: tuple[Row, ...] = ()
    # Id of the event at the sequence that the page ends before; empty when it is not stored.
    at_before: str = ""


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """An event that was kept aside; `id` orders them."""

    id: int
    body: bytes
    reason: str
    current_epoch: int
    quarantined_at: datetime


class Store:
    """What readers and operators ask of the log. Each method takes a connection of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def page(self, key: Key, after: int, *, rows: int, size: int) -> Page:
        """At most `rows` events after a sequence, of about `size` bytes together (one of them always fits)."""
        # The query adds up to `rows` and one to it; no log comes near to where that would not fit.
        after = min(after, _HIGHEST_AFTER)
        async with self._pool.acquire() as connection:
            row = await connection.fetchrow(QUERIES.read_page, *key, after, rows, size)
        if row is None:
            return Page(Bounds())
        bounds = _bounds(row)
        at_cursor = row["at_cursor"]
        if at_cursor is None and after == bounds.oldest - 1:
            at_cursor = row["before_oldest_id"]
        events: tuple[Row, ...] = ()
        if row["sequences"] is not None:
            events = tuple(
                Row(sequence, str(event_id), body)
                for sequence, event_id, body in zip(row["sequences"], row["ids"], row["bodies"], strict=True)
            )
        return Page(bounds, text(at_cursor), events)

    async def heads(self, keys: Sequence[Key]) -> list[HeadRow]:
        """Where each log stands, in the order asked."""
        async with self._pool.acquire() as connection:
            rows = await connection.fetch(QUERIES.read_heads, [key[0] for key in keys], [key[1] for key in keys])
        heads = [HeadRow()] * len(keys)
        for row in rows:
            heads[row["place"] - 1] = _head(row)
        return heads

    async def snapshot(self, key: Key, before: int | None, *, rows: int, size: int) -> Snapshot:
        """The log from one view: at most `rows` events below `before` (None: from the head down), ascending."""
        async with (
            self._pool.acquire() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            row = await connection.fetchrow(QUERIES.snapshot_log, *key)
            if row is None:
                return Snapshot(HeadRow())
            head = _head(row)
            if head.bounds.deleted:
                return Snapshot(head)
            execution = None
            if head.execution_id:
                found = await connection.fetchrow(QUERIES.snapshot_execution, row["id"], head.execution_id)
                execution = None if found is None else execution_of(found)
            at_before = None
            if before is not None:
                at_before = await connection.fetchval(QUERIES.event_id_at, row["id"], before)
            end = head.bounds.head + 1 if before is None else before
            events = await connection.fetch(QUERIES.snapshot_events, row["id"], end, rows, size)
        return Snapshot(
            head,
            execution,
            row["gap_reason"] or row["incomplete_reason"] or "",
            tuple(Row(event["sequence"], str(event["event_id"]), event["body"]) for event in events),
            text(at_before),
        )

    async def mark_incomplete(self, key: Key, execution_id: str, reason: str) -> Execution | None:
        """Mark an execution; its row as it is now, None when the log does not know it (or is deleted)."""
        async with self._pool.acquire() as connection:
            row = await connection.fetchrow(QUERIES.mark_incomplete, *key, execution_id, reason)
        return None if row is None else execution_of(row)

    async def quarantined(
        self, key: Key, execution_id: str, after: int, *, rows: int, size: int
    ) -> list[QuarantineRow]:
        """What was kept aside after the row `after`, oldest first; `execution_id` empty: of all executions."""
        async with self._pool.acquire() as connection:
            found = await connection.fetch(QUERIES.list_quarantined, *key, after, execution_id or None, rows, size)
        return [
            QuarantineRow(row["id"], row["body"], row["reason"], row["current_epoch"], row["quarantined_at"])
            for row in found
        ]

    async def bounds(self, key: Key) -> tuple[int, Bounds]:
        """Row id and bounds of a log; id 0 when there is none."""
        async with self._pool.acquire() as connection:
            row = await connection.fetchrow(QUERIES.bounds, *key)
        return (0, Bounds()) if row is None else (row["id"], _bounds(row))

    async def trim_batch(self, log: int, through: int, batch: int) -> int | None:
        """Remove up to `batch` of the oldest events; the new `oldest`, None when the log was deleted meanwhile."""
        async with self._pool.acquire() as connection:
            oldest: int | None = await connection.fetchval(QUERIES.trim_batch, log, through, batch)
        return oldest

    async def next_expiry(self, logs: int, every: timedelta) -> tuple[int, int] | None:
        """First and last row id of the next logs to be looked at for old events; None when it is not time for any.

        Each is given out once in a round, whoever asks; a round begins `every` after the last one began.
        """
        async with self._pool.acquire() as connection:
            row = await connection.fetchrow(QUERIES.next_expiry, logs, every)
        return None if row is None or row["last"] is None else (row["first"], row["last"])

    async def expired_logs(self, first: int, last: int, age: timedelta) -> list[int]:
        """Those from `first` to `last` whose oldest event is older than `age`, and in which nothing runs."""
        async with self._pool.acquire() as connection:
            rows = await connection.fetch(QUERIES.expired_logs, first, last, age)
        return [row["id"] for row in rows]

    async def expire_batch(self, log: int, age: timedelta, batch: int) -> int:
        """Remove up to `batch` of the oldest events that are older than `age`; how many, 0 when none may go (yet)."""
        async with self._pool.acquire() as connection:
            removed: int = await connection.fetchval(QUERIES.expire_batch, log, age, batch)
        return removed

    async def delete_log(self, key: Key) -> tuple[int, bool]:
        """Make the tombstone; the row id, and whether everything else is gone already."""
        async with self._pool.acquire() as connection:
            row = await connection.fetchrow(QUERIES.delete_log, *key)
        assert row is not None
        return row["id"], row["purged"]

    async def purge_batch(self, log: int, batch: int) -> int:
        """Remove up to `batch` rows of each table of a deleted log; 0 when none was left."""
        async with self._pool.acquire() as connection:
            removed: int = await connection.fetchval(QUERIES.purge_batch, log, batch)
        return removed

    async def logs_to_purge(self, limit: int) -> list[int]:
        """Deleted logs of which something is left."""
        async with self._pool.acquire() as connection:
            rows = await connection.fetch(QUERIES.logs_to_purge, limit)
        return [row["id"] for row in rows]


def _bounds(row: asyncpg.Record) -> Bounds:
    return Bounds(str(row["log_id"]), row["oldest"], row["head"], row["deleted"])


def _head(row: asyncpg.Record) -> HeadRow:
    return HeadRow(_bounds(row), text(row["tail_id"]), row["epoch"], text(row["execution_id"]), row["ended"])
