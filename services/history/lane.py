"""A lane of the committer: one queue, one commit at a time, on one connection.

The state of a log that was written lately is remembered and decided on without reading it; the write then finds out
whether it was still the present one (see `ledger`). A decision that nothing is written for proves nothing that way, so
it is made again on what is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import asyncpg

from services.chassis.clock import Ids
from services.chassis.errors import HearthError, dependency_unavailable
from services.chassis.interceptors import shutting_down
from services.chassis.postgres import Connection, Pool
from services.history import store
from services.history.ledger import (
    CONFLICT,
    INVALID,
    RETRY,
    SET_ABORTED,
    Decision,
    Draft,
    LogState,
    Record,
    Stored,
    unread,
)
from services.history.metrics import Metrics
from services.history.spans import CommitSpan, committing
from services.history.validate import Key
from services.history.work import Part, Work, halves

logger = logging.getLogger(__name__)

# Read, decide, write; then once more as somebody else was faster; then with the rows locked. Even that can fail, when
# another process makes the log in between; it can hardly do so again and again.
_ATTEMPTS = 6
_OPTIMISTIC_ATTEMPTS = 2
# Decisions that nothing is written for: the write cannot tell that they were made on an old state.
_UNPROVEN = frozenset({RETRY, INVALID, CONFLICT, SET_ABORTED})


class Notices(Protocol):
    """Where committed events are told of."""

    def committed(
        self, key: Key, log_id: str, previous_id: str, events: Sequence[tuple[int, Record]], traceparent: str
    ) -> None:
        """`events` (sequence, record) are durable; `previous_id` is the id of the event before them. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the committer. Sizes are bytes."""

    lanes: int = 2
    group_events: int = 1_000
    group_bytes: int = 4 * 1024 * 1024
    queue_events: int = 50_000
    queue_bytes: int = 64 * 1024 * 1024
    remembered_logs: int = 10_000


# The newest state of logs that were written lately. Never trusted: each write compares its revision.
Remembered = OrderedDict[Key, LogState]


class _Broken(Exception):
    """The connection is not to be used again; the callers know already."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """What was decided for one log, and for each of its parts."""

    plan: store.Plan
    decisions: list[list[Decision]]

    @property
    def proven(self) -> bool:
        """Whether writing the plan shows that every decision was made on the present state."""
        return not any(found.outcome in _UNPROVEN for part in self.decisions for found in part)


class Lane:
    """One queue, one commit at a time, one connection."""

    def __init__(
        self, pool: Pool, notices: Notices, ids: Ids, limits: Limits, *, metrics: Metrics, remembered: Remembered
    ) -> None:
        self._pool = pool
        self._notices = notices
        self._ids = ids
        self._metrics = metrics
        self._limits = limits
        self._queue: deque[Work] = deque()
        self._filled = asyncio.Event()
        self._remembered = remembered
        # Of the commit in flight.
        self._span: CommitSpan | None = None
        # Of what waits or is in flight: events, bytes, and how many works of each log.
        self.events = 0
        self.size = 0
        self.works: dict[Key, int] = {}
        # Whether a group is in flight.
        self.committing = False
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, work: Work) -> None:
        """Queue a work."""
        self._queue.append(work)
        self.events += len(work.records)
        self.size += work.size
        self.works[work.key] = self.works.get(work.key, 0) + 1
        self._filled.set()
        self.idle.clear()

    async def run(self) -> None:
        """Commit for ever. When this is cancelled, what is in flight or waits fails."""
        try:
            while True:
                await self._filled.wait()
                try:
                    async with self._pool.acquire() as connection:
                        await self._use(connection)
                except _Broken:
                    continue
                except Exception as error:  # noqa: BLE001 - whatever kept a connection away, the callers must hear of it
                    self._give_up(self._take(), error)
        finally:
            self._fail(list(self._queue), shutting_down())

    async def _use(self, connection: Connection) -> None:
        """Commit group after group on one connection, until it breaks; then raises `_Broken`."""
        while True:
            await self._filled.wait()
            if _is_lost(connection):
                raise _Broken
            group = self._take()
            if not group:
                continue
            try:
                await self._commit(group, connection)
            except Exception as error:  # noqa: BLE001 - whatever it is, the callers of the group must hear of it
                self._give_up(group, error)
                self._remembered.clear()
                if not _is_lost(connection):
                    connection.terminate()
                raise _Broken from None
            except asyncio.CancelledError:
                self._fail(group, shutting_down())
                raise
            self._done(group)

    def _take(self) -> list[Work]:
        """The next group. What stands behind a failed request of its stream fails here, uncommitted."""
        group: list[Work] = []
        events = size = 0
        while self._queue:
            work = self._queue[0]
            if work.order.failure is not None:
                self._fail([self._queue.popleft()], work.order.failure)
                continue
            events += len(work.records)
            size += work.size
            if group and (events > self._limits.group_events or size > self._limits.group_bytes):
                break
            group.append(self._queue.popleft())
        return group

    def _give_up(self, group: Sequence[Work], error: Exception) -> None:
        failure = store.failure_of(error)
        self._metrics.failed(failure.reason)
        self._fail(group, failure)

    def _fail(self, works: Sequence[Work], error: HearthError) -> None:
        for work in works:
            work.fail(error)
        self._done(works)

    def _done(self, works: Sequence[Work]) -> None:
        for work in works:
            self.events -= len(work.records)
            self.size -= work.size
            self.works[work.key] -= 1
            if not self.works[work.key]:
                del self.works[work.key]
        if not self._queue:
            self._filled.clear()
            if not self.events:
                self.idle.set()

    async def _commit(self, group: Sequence[Work], connection: Connection) -> None:
        began = time.perf_counter()
        self.committing = True
        try:
            with committing(group) as self._span:
                await self._settle([Part(work, 0, len(work.records)) for work in group], connection)
        finally:
            self.committing = False
        self._metrics.committed(time.perf_counter() - began, (work.decisions for work in group))

    async def _settle(self, parts: Sequence[Part], connection: Connection) -> None:
        """Commit and answer every part. Data that Postgres refuses is found by halving and answered INVALID."""
        try:
            await self._write(parts, connection)
        except Exception as error:
            if not store.refuses_data(error):
                raise
            if len(parts) == 1 and parts[0].single:
                self._refuse(parts[0], error)
                return
            for half in halves(parts):
                await self._settle(half, connection)

    def _refuse(self, part: Part, error: Exception) -> None:
        project, session = part.work.key
        logger.error(
            "Postgres refuses an event",
            extra={
                "project": project,
                "session": session,
                "event_ids": [record.event_id for record in part.records],
                "sqlstate": getattr(error, "sqlstate", None),
            },
        )
        refused = Decision(INVALID, reason="INVALID_FIELD", problems=(("", "the database refuses to store it"),))
        part.work.answer([refused] * len(part.records))

    async def _write(self, parts: Sequence[Part], connection: Connection) -> None:
        waiting: dict[Key, list[Part]] = {}
        for part in parts:
            waiting.setdefault(part.work.key, []).append(part)
        for attempt in range(_ATTEMPTS):
            if attempt < _OPTIMISTIC_ATTEMPTS:
                written = await self._try(waiting, connection, fresh=attempt > 0)
            else:
                async with connection.transaction():
                    written = await self._try(waiting, connection, fresh=True, lock=True)
            for decided, state in written:
                self._committed(decided, state, waiting.pop(decided.plan.key))
            for key in waiting:
                self._remembered.pop(key, None)
            if not waiting:
                return
        raise dependency_unavailable("Postgres", "keeps changing the logs that are written to")

    async def _try(
        self, waiting: Mapping[Key, Sequence[Part]], connection: Connection, *, fresh: bool, lock: bool = False
    ) -> list[tuple[_Decided, LogState]]:
        """Decide and write once; what was written, with the state after it. Logs that had changed are not in it."""
        decided, unknown = ({}, set(waiting)) if fresh else self._from_memory(waiting)
        if unknown:
            wanted = {key: _wanted(waiting[key]) for key in waiting if key in unknown}
            readings = await store.read_logs(connection, wanted, lock=lock)
            for key, reading in readings.items():
                state = reading.state
                if not state.id:
                    state = state._replace(log_id=self._ids.new(), revision=self._ids.new())
                decided[key] = _decide(key, state, reading.stored, waiting[key])
        unchanged = [(found, found.plan.before) for found in decided.values() if not found.plan.draft.writes]
        changing = [found for found in decided.values() if found.plan.draft.writes]
        if not changing:
            return unchanged
        states = await store.write_logs(connection, [found.plan for found in changing], revision=self._ids.new())
        return unchanged + [(found, state) for found, state in zip(changing, states, strict=True) if state is not None]

    def _from_memory(self, waiting: Mapping[Key, Sequence[Part]]) -> tuple[dict[Key, _Decided], set[Key]]:
        """What can be decided without reading, and the logs that must be read."""
        decided: dict[Key, _Decided] = {}
        unknown: set[Key] = set()
        for key, parts in waiting.items():
            state = self._remembered.get(key)
            if state is not None and not unread(state, (record for part in parts for record in part.records)):
                found = _decide(key, state, {}, parts)
                if found.proven:
                    decided[key] = found
                    continue
            unknown.add(key)
        return decided, unknown

    def _committed(self, decided: _Decided, state: LogState, parts: Sequence[Part]) -> None:
        key, before, draft = decided.plan
        if state.id:
            self._remembered[key] = state
            self._remembered.move_to_end(key)
            if len(self._remembered) > self._limits.remembered_logs:
                self._remembered.popitem(last=False)
        if draft.writes.appended:
            traceparent = self._span.traceparent(parts[0].work) if self._span is not None else ""
            self._notices.committed(key, state.log_id, before.tail_id, draft.writes.appended, traceparent)
        for part, decisions in zip(parts, decided.decisions, strict=True):
            part.work.answer(decisions)


def _is_lost(connection: Connection) -> bool:
    """Whether the connection broke. The pool takes a broken one back at once, and then refuses even this question."""
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        return True


def _wanted(parts: Sequence[Part]) -> store.Wanted:
    records = [record for part in parts for record in part.records]
    executions = frozenset(record.execution_id for record in records if record.execution_id)
    return store.Wanted(executions, tuple(dict.fromkeys(record.event_id for record in records)))


def _decide(key: Key, state: LogState, stored: Mapping[str, Stored], parts: Sequence[Part]) -> _Decided:
    draft = Draft(state, stored)
    decisions = [
        draft.decide_set(part.records) if part.work.atomic else [draft.decide(record) for record in part.records]
        for part in parts
    ]
    return _Decided(store.Plan(key, state, draft), decisions)
