"""Values of this service as messages of the contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.history import wire
from services.history.ledger import Decision, Ending, Execution
from services.history.store import Bounds, HeadRow, QuarantineRow
from services.history.validate import Key


def set_results(decided: Iterable[Sequence[Decision]]) -> list[history_pb2.AppendSetResult]:
    """The answers to one request."""
    return [history_pb2.AppendSetResult(results=[result(decision) for decision in found]) for found in decided]


def result(decision: Decision) -> history_pb2.AppendResult:
    """The answer for one event."""
    made = history_pb2.AppendResult(outcome=decision.outcome, sequence=decision.sequence)
    if decision.reason:
        made.reason = decision.reason
        made.current_epoch = decision.current_epoch
        for field, description in decision.problems:
            made.problems.add(field=field, description=description)
    if decision.missing:
        made.missing = decision.missing
    if decision.winner is not None:
        made.winner.CopyFrom(ending(decision.winner))
    return made


def ending(found: Ending) -> history_pb2.Ending:
    """The ending that stands."""
    return history_pb2.Ending(event_id=found.event_id, type=found.type, epoch=found.epoch, sequence=found.sequence)


def ledger_entry(execution_id: str, execution: Execution) -> history_pb2.LedgerEntry:
    """A row of the ledger."""
    return history_pb2.LedgerEntry(
        execution_id=execution_id,
        epoch=execution.epoch,
        ending=None if execution.ending is None else ending(execution.ending),
        incomplete=execution.incomplete,
        incomplete_reason=execution.incomplete_reason,
    )


def bounds(found: Bounds) -> history_pb2.Bounds:
    """What is kept, as a reader is told."""
    return history_pb2.Bounds(log_id=found.log_id, oldest=kept_from(found), head=found.head)


def kept_from(found: Bounds) -> int:
    """Sequence of the oldest event kept; 0 when nothing is."""
    return found.oldest if found.oldest <= found.head and not found.deleted else 0


def head(key: Key, row: HeadRow) -> history_pb2.Head:
    """Where a log stands. A deleted log has no head any more, but still fences."""
    made = history_pb2.Head(
        session=session_pb2.SessionKey(project=key[0], session=key[1]),
        epoch=row.epoch,
        execution_id=row.execution_id,
        ended=row.ended or (row.bounds.deleted and bool(row.execution_id)),
        head=session_pb2.Cursor(),
    )
    if row.bounds.log_id and not row.bounds.deleted:
        made.head.log_id = row.bounds.log_id
        made.head.sequence = row.bounds.head
        made.head.tag = wire.tag(row.tail_id)
        made.oldest = kept_from(row.bounds)
    return made


def quarantined(row: QuarantineRow) -> history_pb2.QuarantinedEvent:
    """An event that was kept aside."""
    made = history_pb2.QuarantinedEvent(
        event=event_pb2.Event.FromString(row.body), reason=row.reason, current_epoch=row.current_epoch
    )
    made.quarantined_at.FromDatetime(row.quarantined_at)
    return made
