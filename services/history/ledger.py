"""What becomes of an event: the decision table of the log, pure.

Decisions are made here, in Python, and nowhere else. The state they stand on carries a `revision`, a uuid that every
change of the log replaces. The write that follows is one call of `history.append_group`: it locks the log rows, goes on
only where the revision is still the one decided on and none of the new ids is taken, and commits. So a group costs one
round trip while this process is the only writer of its sessions, never holds a lock while Python runs, and two replicas
can work on one session without ever trusting what they remember: whoever is late reads again and decides again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from hearth.history.v1 import history_pb2

APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
CONFLICT = history_pb2.APPEND_OUTCOME_CONFLICT
QUARANTINED = history_pb2.APPEND_OUTCOME_QUARANTINED
ALREADY_ENDED = history_pb2.APPEND_OUTCOME_ALREADY_ENDED
RETRY = history_pb2.APPEND_OUTCOME_RETRY
INVALID = history_pb2.APPEND_OUTCOME_INVALID
SET_ABORTED = history_pb2.APPEND_OUTCOME_SET_ABORTED

# Beside an ending's reason in the ledger row; the event itself keeps the whole text.
_REASON_CHARACTERS = 255
_NO_REASON = "not told"


class Kind(Enum):
    """What an event does to the ledger."""

    SESSION = 1  # a fact decided elsewhere: no fence
    GAP = 2  # a session event that says that something is missing for good
    STARTED = 3
    OUTPUT = 4  # counted by the manifest
    ENDING = 5


class Manifest(NamedTuple):
    """What an ending's writer says the log must hold of its epoch."""

    runner_events: int
    incomplete: bool
    incomplete_reason: str


@dataclass(slots=True)
class Record:
    """A valid event. Ids are uuids in lower-case text; `digest` is 32 bytes over what makes two events equal."""

    event_id: str
    digest: bytes
    kind: Kind
    type: str
    execution_id: str  # empty for a session event
    epoch: int
    raw: bytes  # the event as it was received
    manifest: Manifest | None = None  # of an ending
    gap_reason: str = ""


class Ending(NamedTuple):
    """The event that closed an execution."""

    event_id: str
    type: str
    epoch: int
    sequence: int


class Execution(NamedTuple):
    """A row of the ledger."""

    epoch: int
    ending: Ending | None = None
    incomplete: bool = False
    incomplete_reason: str = ""


class Stored(NamedTuple):
    """An event that is kept already; sequence 0: in quarantine, for `reason`."""

    digest: bytes
    sequence: int
    reason: str = ""


class LogState(NamedTuple):
    """A log, and the executions that were looked up. `revision` is empty for a log that does not exist yet."""

    revision: str = ""
    id: int = 0
    log_id: str = ""
    head: int = 0
    tail_id: str = ""  # id of the event at the head
    epoch: int = 0  # highest seen
    execution_id: str = ""  # the one at that epoch
    runner_events: int = 0  # what a manifest of that execution and epoch is compared with
    gap_reason: str = ""
    deleted: bool = False
    executions: Mapping[str, Execution] = MappingProxyType({})

    @property
    def ended(self) -> bool:
        """Whether the execution that holds the epoch has ended."""
        current = self.executions.get(self.execution_id)
        return current is not None and current.ending is not None


class Decision(NamedTuple):
    """The answer for one event."""

    outcome: history_pb2.AppendOutcome.ValueType
    sequence: int = 0
    reason: str = ""
    winner: Ending | None = None
    current_epoch: int = 0
    missing: int = 0
    problems: tuple[tuple[str, str], ...] = ()  # (field, description)


class Quarantined(NamedTuple):
    """A record to be kept aside."""

    record: Record
    reason: str
    current_epoch: int


@dataclass(slots=True)
class Writes:
    """What a draft wants stored; the state after it is `Draft.state`."""

    appended: list[tuple[int, Record]] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    # Rows of the ledger to be made, and to be changed.
    opened: dict[str, Execution] = field(default_factory=dict)
    changed: dict[str, Execution] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.appended or self.quarantined)


def unread(state: LogState, records: Iterable[Record]) -> set[str]:
    """Executions that must be looked up before `records` can be decided on `state`.

    One that `execution.started` opens above the epoch of the log is taken for new; the write checks that it is.
    """
    found: set[str] = set()
    opening: set[str] = set()
    for record in records:
        execution_id = record.execution_id
        if not execution_id or execution_id in state.executions or execution_id in opening:
            continue
        if record.kind is Kind.STARTED and record.epoch > state.epoch:
            opening.add(execution_id)
        else:
            found.add(execution_id)
    return found


class Draft:
    """Decides events one after the other on top of a state, gathering what is to be written.

    `stored` holds those of their ids that the log has already. Executions that are not in the state do not exist.
    """

    def __init__(self, state: LogState, stored: Mapping[str, Stored] | None = None) -> None:
        self.writes = Writes()
        self._before = state
        self._stored = dict(stored or {})
        self._executions = dict(state.executions)
        self._head = state.head
        self._tail_id = state.tail_id
        self._epoch = state.epoch
        self._execution_id = state.execution_id
        self._runner_events = state.runner_events
        self._gap_reason = state.gap_reason

    @property
    def state(self) -> LogState:
        """The log as it will be; its revision is still that of the state it stands on."""
        before = self._before
        return LogState(
            before.revision,
            before.id,
            before.log_id,
            self._head,
            self._tail_id,
            self._epoch,
            self._execution_id,
            self._runner_events,
            self._gap_reason,
            before.deleted,
            self._executions,
        )

    def decide(self, record: Record) -> Decision:
        """What becomes of one event that stands for itself."""
        stored = self._stored.get(record.event_id)
        if stored is not None:
            return self._known(record, stored)
        if self._before.deleted:
            return Decision(INVALID, reason="LOG_DELETED")
        if record.execution_id:
            refusal = self._fence(record)
            if refusal is not None:
                return refusal
        return self._append(record)

    def decide_set(self, records: Sequence[Record]) -> list[Decision]:
        """What becomes of an atomic set: all of its events are in the log afterwards, or none of them is new there.

        Events that are refused by a fence are kept in quarantine even so, for whoever asks what a fenced runner wrote.
        """
        before = self._copy()
        decisions = [self.decide(record) for record in records]
        if all(decision.sequence for decision in decisions):
            return decisions
        self._restore(before)
        return [self._without_set(record, decision) for record, decision in zip(records, decisions, strict=True)]

    def _without_set(self, record: Record, decision: Decision) -> Decision:
        """The answer for an event of a set that is not stored; what its set would have changed has been undone."""
        if decision.outcome in (QUARANTINED, ALREADY_ENDED):
            again = self._fence(record)
            if again is not None and again.outcome in (QUARANTINED, ALREADY_ENDED):
                return again
            return Decision(SET_ABORTED)
        if decision.outcome == APPENDED or (decision.outcome == DUPLICATE and record.event_id not in self._stored):
            return Decision(SET_ABORTED)
        return decision

    def _known(self, record: Record, stored: Stored) -> Decision:
        if stored.digest != record.digest:
            return Decision(CONFLICT, reason="EVENT_CONFLICT")
        if stored.sequence:
            return Decision(DUPLICATE, stored.sequence)
        execution = self._executions.get(record.execution_id)
        winner = execution.ending if execution is not None else None
        return Decision(DUPLICATE, reason=stored.reason, winner=winner, current_epoch=self._epoch)

    def _fence(self, record: Record) -> Decision | None:
        """Why runner output is not appended; None when it is its turn to write."""
        execution = self._executions.get(record.execution_id)
        if execution is not None and execution.ending is not None:
            self._keep_aside(record, "EXECUTION_ENDED", self._epoch)
            outcome = ALREADY_ENDED if record.kind is Kind.ENDING else QUARANTINED
            return Decision(outcome, reason="EXECUTION_ENDED", winner=execution.ending, current_epoch=self._epoch)
        if record.epoch < self._epoch:
            return self._quarantine(record, "STALE_EPOCH")
        if record.epoch == self._epoch and record.execution_id != self._execution_id:
            return self._quarantine(record, "EPOCH_TAKEN")
        if execution is None and record.kind is not Kind.STARTED:
            return Decision(INVALID, reason="UNKNOWN_EXECUTION")
        if record.manifest is not None and not record.manifest.incomplete:
            missing = record.manifest.runner_events - self._counted(record)
            if missing > 0:
                return Decision(RETRY, missing=missing)
        return None

    def _counted(self, record: Record) -> int:
        """Runner events stored of the epoch of `record`; a higher epoch than that of the log begins at none."""
        return self._runner_events if record.epoch == self._epoch else 0

    def _append(self, record: Record) -> Decision:
        self._head += 1
        self._tail_id = record.event_id
        self.writes.appended.append((self._head, record))
        self._stored[record.event_id] = Stored(record.digest, self._head)
        if record.kind is Kind.GAP:
            self._gap_reason = self._gap_reason or _bounded(record.gap_reason)
        elif record.execution_id:
            self._drive(record)
        return Decision(APPENDED, self._head)

    def _drive(self, record: Record) -> None:
        """Move the ledger by one event that may write."""
        if record.epoch > self._epoch:
            self._epoch = record.epoch
            self._execution_id = record.execution_id
            self._runner_events = 0
            known = self._executions.get(record.execution_id)
            self._put(
                record.execution_id, Execution(record.epoch) if known is None else known._replace(epoch=record.epoch)
            )
        if record.kind is Kind.OUTPUT:
            self._runner_events += 1
        elif record.manifest is not None:
            self._end(record, record.manifest)

    def _end(self, record: Record, manifest: Manifest) -> None:
        execution = self._executions[record.execution_id]
        incomplete, reason = execution.incomplete, execution.incomplete_reason
        if manifest.incomplete:
            incomplete, reason = True, reason or _bounded(manifest.incomplete_reason)
        elif manifest.runner_events == self._runner_events:
            incomplete, reason = False, ""
        ending = Ending(record.event_id, record.type, record.epoch, self._head)
        self._put(record.execution_id, Execution(record.epoch, ending, incomplete, reason))

    def _put(self, execution_id: str, execution: Execution) -> None:
        new = execution_id not in self._executions or execution_id in self.writes.opened
        (self.writes.opened if new else self.writes.changed)[execution_id] = execution
        self._executions[execution_id] = execution

    def _quarantine(self, record: Record, reason: str) -> Decision:
        self._keep_aside(record, reason, self._epoch)
        return Decision(QUARANTINED, reason=reason, current_epoch=self._epoch)

    def _keep_aside(self, record: Record, reason: str, current_epoch: int) -> None:
        self.writes.quarantined.append(Quarantined(record, reason, current_epoch))
        self._stored[record.event_id] = Stored(record.digest, 0, reason)

    def _copy(self) -> Draft:
        copy = Draft(self.state, self._stored)
        copy.writes = Writes(
            list(self.writes.appended),
            list(self.writes.quarantined),
            dict(self.writes.opened),
            dict(self.writes.changed),
        )
        return copy

    def _restore(self, copy: Draft) -> None:
        self.writes = copy.writes
        self._stored = copy._stored
        self._executions = copy._executions
        self._head, self._tail_id = copy._head, copy._tail_id
        self._epoch, self._execution_id = copy._epoch, copy._execution_id
        self._runner_events, self._gap_reason = copy._runner_events, copy._gap_reason


def _bounded(reason: str) -> str:
    """A reason as it fits into a row: Postgres takes no NUL, and its reader no essay."""
    return reason.replace("\0", "")[:_REASON_CHARACTERS] or _NO_REASON
