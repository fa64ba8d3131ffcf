"""What the pool's tables hold, as plain values: the store makes them, decisions take them."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from hearth.sandbox.v1 import sandbox_pb2
from hearth.types.v1 import session_pb2


class Key(NamedTuple):
    """Names one conversation."""

    project: str
    session: str

    @classmethod
    def of(cls, message: session_pb2.SessionKey) -> Key:
        """The key of a message that was checked."""
        return cls(message.project, message.session)

    def message(self) -> session_pb2.SessionKey:
        """The key as the contracts have it."""
        return session_pb2.SessionKey(project=self.project, session=self.session)

    def __str__(self) -> str:
        return f"{self.project}/{self.session}"


class Claim(NamedTuple):
    """A lease on the sandbox of a session: epoch, then try within it; try 0 closes whatever came before the epoch."""

    epoch: int
    attempt: int

    def message(self) -> sandbox_pb2.Claim:
        """The claim as the contracts have it."""
        return sandbox_pb2.Claim(epoch=self.epoch, attempt=self.attempt)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.attempt}"


class ExecutionState(StrEnum):
    """State of an execution; only TERMINAL has an outcome."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    STOPPING = "STOPPING"
    TERMINAL = "TERMINAL"


class Outcome(StrEnum):
    """How an execution ended."""

    COMPLETED = "COMPLETED"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    LOST = "LOST"


class InputState(StrEnum):
    """State of an input."""

    PENDING = "PENDING"
    PROMOTED = "PROMOTED"
    REMOVED = "REMOVED"


class CommandKind(StrEnum):
    """What a command asks for."""

    CANCEL = "CANCEL"
    STEER = "STEER"
    ANSWER = "ANSWER"
    # One that a newer replica wrote: it is shown and settled with its execution, and nothing else is done with it.
    UNKNOWN = "UNKNOWN"

    @classmethod
    def _missing_(cls, value: object) -> CommandKind:
        return cls.UNKNOWN


class CommandState(StrEnum):
    """State of the delivery of a command; the last two have an outcome."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    APPLIED = "APPLIED"
    OBSOLETE = "OBSOLETE"


class CommandOutcome(StrEnum):
    """What came of a command."""

    STOPPED = "STOPPED"
    ANSWERED = "ANSWERED"
    STARTED = "STARTED"
    NOT_RUNNING = "NOT_RUNNING"
    SUPERSEDED = "SUPERSEDED"
    FAILED = "FAILED"
    LOST = "LOST"


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """Whose own record of the conversation may be loaded: the agent, its id of the session, and the last execution in
    it."""

    agent: str
    session_id: str
    execution_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """A row of `pool.session`. `spec` is a serialized SessionSpec; epochs, numbers and sequences count from 1."""

    key: Key
    epoch: int
    holder: str | None
    queue_paused: bool
    spec: bytes
    execution_id: str | None
    ended_execution_id: str | None
    finished: Finished | None
    outbox_number: int
    history_sequence: int
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """A row of `pool.execution`. `ending_event_id` is set when the pool itself ends it: then nobody may run it."""

    execution_id: str
    key: Key
    epoch: int
    admitted_epoch: int
    state: ExecutionState
    outcome: Outcome | None
    failure_code: str
    input_id: str | None
    source_execution_id: str | None
    tries: int
    driver: str | None
    ending_event_id: str | None
    agent: str | None
    harness_session_id: str | None
    traceparent: str
    created_at: datetime
    started_at: datetime | None
    settled_at: datetime | None
    ending_sequence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A row of `pool.input`. `content` is a serialized session Input with nothing but its content; `rank` counts from 1
    and is 0 for an input that does not wait."""

    input_id: str
    key: Key
    state: InputState
    content: bytes
    spec: bytes | None
    expected_transcript: bytes | None
    steer_command_id: str | None
    execution_id: str | None
    traceparent: str
    created_at: datetime
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A row of `pool.command`."""

    command_id: str
    key: Key
    kind: CommandKind
    execution_id: str | None
    state: CommandState
    outcome: CommandOutcome | None
    attempts: int
    claimed_by: str | None
    steer_input_id: str | None
    created_at: datetime
    settled_at: datetime | None


class GateKind(StrEnum):
    """What a gate waits for."""

    APPROVAL = "APPROVAL"
    QUESTION = "QUESTION"
    CLIENT_TOOL = "CLIENT_TOOL"


class GateState(StrEnum):
    """State of a gate; the last two have a resolution."""

    PENDING = "PENDING"
    ANSWERED = "ANSWERED"
    CONSUMED = "CONSUMED"
    CLOSED = "CLOSED"


class Decision(StrEnum):
    """What somebody decided about an approval."""

    ALLOWED = "ALLOWED"
    DENIED = "DENIED"


class Resolution(StrEnum):
    """How a gate came to its end."""

    CONSUMED = "CONSUMED"
    POLICY = "POLICY"
    EXECUTION_ENDED = "EXECUTION_ENDED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """A row of `pool.gate`. `request` is a serialized InteractionRequested, `input_digest` the SHA-256 of the canonical
    arguments in it. `execution_id` asked; `consumed_by` is the execution that handed the answer to an agent."""

    interaction_id: str
    key: Key
    execution_id: str
    tool_call_id: str
    request_key: str
    kind: GateKind
    state: GateState
    request: bytes
    input_digest: bytes
    decision: Decision | None
    answer_json: str | None
    answered_by: str | None
    resolution: Resolution | None
    consumed_by: str | None
    created_at: datetime
    answered_at: datetime | None
    closed_at: datetime | None
    expires_at: datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A row of `pool.request`: what was accepted under a request id."""

    method: str
    fingerprint: bytes
    input_id: str | None
    command_id: str | None
    attachment_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row of `pool.outbox` that waits. `transition` is `STARTED`, `ENDED` or empty."""

    number: int
    event_id: str
    event: bytes
    execution_id: str | None
    transition: str


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """A row of `pool.replica`."""

    holder: str
    address: str
    draining: bool
    driving: tuple[str, ...]
    entries: int
    started_at: datetime
    beat_at: datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """An event to be told with the change that makes it true. `transition` is `STARTED`, `ENDED` or empty."""

    event_id: str
    event: bytes
    execution_id: str | None = None
    transition: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What stands beside a locked session row: a request accepted before, and what runs and waits. `carried`: the next
    execution has answers to pass on, or has to say that it is not known what became of one."""

    request: Request | None
    active: Execution | None
    queued: int
    open_gates: int
    carried: bool = False
