"""The ending of a turn, written: by the turn itself into the log, or by the pool into its outbox."""

from __future__ import annotations

import asyncio

from hearth.errors import CallError
from hearth.history.v1 import history_pb2
from hearth.producer import ExecutionWriter, WriterRefused
from hearth.types.v1 import event_pb2
from services.pool.control import facts
from services.pool.control.executions import Winner
from services.pool.log import winner_by, winner_of
from services.pool.rows import Execution, ExecutionState
from services.pool.turns.room import Fenced, TurnFailed, TurnRoom
from services.pool.turns.signals import Signals, end, first_of


async def append_ending(
    writer: ExecutionWriter, signals: Signals, event: event_pb2.Event, before: list[event_pb2.Event]
) -> Winner:
    """Write an ending, in one set with what completes its output; the ending that stands, whoever wrote it. History may
    be away for as long as it likes.

    Raises `Fenced` when somebody else has the session, and `TurnFailed` when it cannot be written at all.
    """
    try:
        result = await _unless_fenced(signals, writer.ending(event, before=before))
    except WriterRefused as error:
        if error.refusal.winner is not None:
            return winner_of(error.refusal.winner)
        raise Fenced(error.refusal.current_epoch) from error
    except CallError as error:
        raise TurnFailed("HISTORY_UNAVAILABLE", f"the ending could not be written: {error.reason}") from error
    winner = winner_by(result, event)
    if winner is None:
        raise Fenced(result.current_epoch)
    return winner


async def end_failed(
    room: TurnRoom, execution: Execution, failed: TurnFailed, summary: event_pb2.EndingSummary
) -> None:
    """Have the pool end an execution as failed, unless somebody else ends it or has it by now."""
    async with room.store.changing(execution.key) as changing:
        row = await changing.execution(execution.execution_id) if changing is not None else None
        if changing is None or row is None or row.epoch != execution.epoch:
            return
        fact = facts.failed(
            execution.execution_id,
            execution.epoch,
            code=failed.code,
            message=failed.message,
            at=room.clock.now(),
            incomplete="" if row.state is ExecutionState.PENDING else "the run failed",
            retryable=failed.retryable,
            summary=summary,
        )
        if await changing.end_by_pool(execution.execution_id, row.state, fact.event_id, epoch=row.epoch):
            changing.tell(fact)
    room.outbox.wake(execution.key)


async def _unless_fenced(
    signals: Signals, appended: asyncio.Future[history_pb2.AppendResult]
) -> history_pb2.AppendResult:
    signal = asyncio.create_task(signals.next())
    try:
        while not appended.done():
            if signals.fenced:
                raise Fenced
            await first_of(appended, signal)
            if signal.done():
                signal = asyncio.create_task(signals.next())
        return appended.result()
    finally:
        await end(signal)
