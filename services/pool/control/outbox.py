"""The outbox: facts that were committed with what made them true, told to history in their order.

Each session has one line. Its facts go through the producer, in one queue with the output of its runner, so that
readers see them in the order in which they happened. A fact is forgotten once history has it; telling it again after a
crash gives the same answer. Endings that the pool itself writes settle their execution here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc

from hearth.errors import CallError
from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis import telemetry
from services.chassis.clock import Clock, derived_id
from services.chassis.errors import Unavailable
from services.pool.control import facts
from services.pool.control.executions import Winner
from services.pool.log import winner_by
from services.pool.rows import Key, OutboxRow
from services.pool.store import Store

logger = logging.getLogger(__name__)

_ROWS = 200
_REMEMBERED = 10_000
_STEPS_BEHIND = 3

_STORED = frozenset({history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE})
_FENCED = frozenset({history_pb2.APPEND_OUTCOME_QUARANTINED, history_pb2.APPEND_OUTCOME_ALREADY_ENDED})


class Teller(Protocol):
    """What the outbox needs of the producer."""

    def append(
        self, session: session_pb2.SessionKey, event: event_pb2.Event | bytes, *, traceparent: str = ""
    ) -> asyncio.Future[history_pb2.AppendResult]:
        """Append behind everything given for the session before, in the trace of the work that made it."""
        ...

    def end_frames(self, session: session_pb2.SessionKey, execution_id: str, epoch: int) -> None:
        """No frames of an execution come any more: not of a writer below `epoch` either."""
        ...


Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]]
Settle = Callable[[Key, str, Winner], Awaitable[object]]


@dataclasses.dataclass(slots=True)
class _Line:
    """What is asked of the facts of one session: `wanted` counts the calls, `told` how many of them are answered.

    `facts` are those that came with the calls since the last look, None when one of them came without: what it means
    must be read. `traceparent` is that of the last caller that has one.
    """

    wanted: int = 0
    told: int = 0
    facts: list[OutboxRow] | None = dataclasses.field(default_factory=list)
    traceparent: str = ""
    waiting: list[tuple[int, asyncio.Future[None]]] = dataclasses.field(default_factory=list)
    task: asyncio.Task[Any] | None = None


class Outbox:
    """Tells facts. `settle` closes an execution by its ending; `spawn` runs a task that outlives its caller."""

    def __init__(self, store: Store, producer: Teller, clock: Clock, *, settle: Settle, spawn: Spawn) -> None:
        self._store = store
        self._producer = producer
        self._clock = clock
        self._settle = settle
        self._spawn = spawn
        self._lines: dict[Key, _Line] = {}
        # Numbers of facts up to which nothing waits, of the sessions that were told of last.
        self._through: OrderedDict[Key, int] = OrderedDict()

    def wake(self, key: Key) -> None:
        """Tell the facts of a session soon; nobody waits for it."""
        self._ask(key, ())

    def told(self, key: Key, facts: Sequence[OutboxRow] = ()) -> asyncio.Future[None]:
        """Done when history has answered every fact of a session that was committed before the call.

        That may take as long as history is away. Fails with `Unavailable` when the facts wait for another attempt. Who
        does not care may drop it. Who has just committed `facts` saves them being read again.
        """
        line = self._ask(key, facts)
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((line.wanted, told))
        return told

    def _ask(self, key: Key, facts: Sequence[OutboxRow]) -> _Line:
        line = self._lines.setdefault(key, _Line())
        line.wanted += 1
        line.traceparent = telemetry.inject() or line.traceparent
        line.facts = [*line.facts, *facts] if facts and line.facts is not None else None
        if line.task is None:
            line.task = self._spawn(f"outbox {key}", self._run(key, line))
        return line

    async def _run(self, key: Key, line: _Line) -> None:
        try:
            # What the same commit has started goes first: the way to an agent is longer than the one to the log.
            for _ in range(_STEPS_BEHIND):
                await asyncio.sleep(0)
            while line.told < line.wanted:
                wanted = line.wanted
                facts, line.facts = line.facts, []
                traceparent, line.traceparent = line.traceparent, ""
                told = await self._tell(key, facts if facts and self._are_next(key, facts) else [], traceparent)
                line.told = wanted
                _answer(line, None)
                await self._forget(key, told)
        except Exception as error:  # noqa: BLE001 - whoever waits gets it, the rows stay, and a sweep tries again
            logger.warning("facts wait", extra={"session": str(key), "cause": f"{type(error).__name__}: {error}"})
            line.told = line.wanted
            _answer(line, error)
        finally:
            line.task = None
            if line.told < line.wanted:
                _answer(line, Unavailable("this process is shutting down", reason="SHUTTING_DOWN"))
            del self._lines[key]

    def _are_next(self, key: Key, facts: Sequence[OutboxRow]) -> bool:
        """Whether nothing waits before these facts, nor between them."""
        through = self._through.get(key)
        return through is not None and [fact.number for fact in facts] == list(
            range(through + 1, through + 1 + len(facts))
        )

    def _nothing_waits(self, key: Key, through: int) -> None:
        self._through[key] = through
        self._through.move_to_end(key)
        if len(self._through) > _REMEMBERED:
            self._through.popitem(last=False)

    async def _tell(self, key: Key, facts: Sequence[OutboxRow], traceparent: str) -> list[tuple[int, int]]:
        """Tell everything that waits, which is `facts` where some are given; (number, sequence) of what history has
        now."""
        told: list[tuple[int, int]] = []
        while True:
            rows = facts or await self._waiting(key, told)
            facts = ()
            if not rows:
                return told
            answers = await self._append(key, rows, traceparent)
            again = len(rows) >= _ROWS or len(answers) < len(rows)
            for row, answer in zip(rows, answers, strict=False):
                outcome = await self._take(key, row, answer)
                if outcome is None:
                    again = True
                else:
                    told.append((row.number, outcome))
            if not again:
                self._nothing_waits(key, rows[-1].number)
                return told

    async def _waiting(self, key: Key, told: Sequence[tuple[int, int]]) -> Sequence[OutboxRow]:
        return [row for row in await self._store.outbox(key, _ROWS + len(told)) if row.number not in dict(told)]

    async def _append(self, key: Key, rows: Sequence[OutboxRow], traceparent: str) -> list[history_pb2.AppendResult]:
        """The answers for the first of these rows, in their order; for as many as could be sent, at least one."""
        session = key.message()
        futures: list[asyncio.Future[history_pb2.AppendResult]] = []
        for row in rows:
            futures.append(self._producer.append(session, row.event, traceparent=traceparent))
            if futures[-1].done():
                # It was not taken; what comes behind it must not overtake it.
                break
        answers: list[history_pb2.AppendResult] = []
        for future in futures:
            try:
                answers.append(await asyncio.shield(future))
            except CallError as error:
                if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                    refused = history_pb2.APPEND_OUTCOME_INVALID
                    answers.append(history_pb2.AppendResult(outcome=refused, reason=error.reason))
                elif not answers:
                    raise Unavailable(error.message, reason=error.reason or "DEPENDENCY_UNAVAILABLE") from error
                break
        return answers

    async def _take(self, key: Key, row: OutboxRow, answer: history_pb2.AppendResult) -> int | None:
        """Act on an answer: a sequence (0 for none) when the row is done with, None when it is to be told again."""
        ended = row.transition == facts.ENDED
        if row.execution_id is not None and (ended or answer.HasField("winner")):
            winner = winner_by(answer, event_pb2.Event.FromString(row.event))
            if winner is not None:
                await self._settle(key, row.execution_id, winner)
                if ended:
                    self._producer.end_frames(key.message(), row.execution_id, winner.epoch)
                return answer.sequence
        stored = answer.outcome in _STORED
        if stored and answer.sequence:
            return answer.sequence
        if row.transition and (stored or answer.outcome in _FENCED):
            return None if await self._step_over(key, row, answer.current_epoch) else 0
        if ended and answer.outcome == history_pb2.APPEND_OUTCOME_RETRY:
            reason = f"{answer.missing} events of the run are not in the log"
            event = facts.with_incomplete_manifest(row.event, reason)
            await self._store.rewrite_fact(key, row.number, row.event_id, event)
        elif answer.outcome != history_pb2.APPEND_OUTCOME_SET_ABORTED:
            await self._refuse(key, row, answer)
        return None

    async def _step_over(self, key: Key, row: OutboxRow, current_epoch: int) -> bool:
        """History is ahead of the pool, as after a restored database: say it again under an epoch above both.

        Only if the row is still what the pool stands on; False when somebody else went on with the execution.
        """
        event = event_pb2.Event.FromString(row.event)
        async with self._store.changing(key) as changing:
            execution = await changing.execution(event.execution_id) if changing is not None else None
            if changing is None or execution is None or execution.outcome is not None:
                return False
            if row.transition == facts.ENDED and execution.ending_event_id != row.event_id:
                return False
            if row.transition == facts.STARTED and execution.epoch != event.epoch:
                return False
            changing.change(epoch=max(changing.session.epoch, current_epoch) + 1)
            event.epoch = changing.session.epoch
            event.event_id = derived_id("execution", event.execution_id, event.type, str(event.epoch))
            await changing.step(
                event.execution_id, event.event_id if row.transition == facts.ENDED else None, event.epoch
            )
            await changing.rewrite_fact(row.number, event.event_id, event.SerializeToString())
        logger.error(
            "history is ahead of the pool, stepped over it",
            extra={"session": str(key), "execution": event.execution_id, "epoch": event.epoch, "seen": current_epoch},
        )
        return True

    async def _refuse(self, key: Key, row: OutboxRow, answer: history_pb2.AppendResult) -> None:
        """History will never take this row: mark it, say that something is missing, and let nothing hang on it."""
        reason = answer.reason or history_pb2.AppendOutcome.Name(answer.outcome)
        event = event_pb2.Event.FromString(row.event)
        logger.error(
            "fact refused for good",
            extra={
                "session": str(key),
                "number": row.number,
                "type": event.type,
                "reason": reason,
                "problems": [f"{problem.field}: {problem.description}" for problem in answer.problems],
            },
        )
        async with self._store.changing(key) as changing:
            if changing is not None:
                await changing.refuse_fact(row.number, reason)
                if not event.HasField("history_incomplete"):
                    why = f"history refused an event of type {event.type}"
                    changing.tell(facts.history_incomplete(row.event_id, why, self._clock.now()))
        if row.execution_id is None:
            return
        if row.transition == facts.STARTED:
            code = "HISTORY_UNAVAILABLE"
            await self._settle(key, row.execution_id, Winner(row.event_id, "execution.failed", event.epoch, 0, code))
        elif row.transition == facts.ENDED:
            code = event.execution_failed.code
            await self._settle(key, row.execution_id, Winner(row.event_id, event.type, event.epoch, 0, code))

    async def _forget(self, key: Key, told: Sequence[tuple[int, int]]) -> None:
        if told:
            numbers = [number for number, _ in told]
            await self._store.acknowledge(key, numbers, max(sequence for _, sequence in told))


def _answer(line: _Line, error: Exception | None) -> None:
    waiting, line.waiting = line.waiting, []
    for wanted, future in waiting:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
            future.exception()
        elif wanted <= line.told:
            future.set_result(None)
        else:
            line.waiting.append((wanted, future))
