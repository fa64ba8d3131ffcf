"""What a producer appends, one class for each way of it, and the tally that each execution keeps of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from hearth._appending import Item, event_field
from hearth._publishing import FrameBuffer
from hearth.errors import CallError
from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, session_pb2

logger = logging.getLogger(__name__)

ENDINGS = frozenset(
    {"execution_completed", "execution_paused", "execution_stopped", "execution_failed", "execution_lost"}
)
# How often an ending is corrected before its writer is told to look into it.
CORRECTIONS = 3

# A parked item: length of its events, how many, length of its trace, whether they are a set, frames_through (-1: none),
# until when it waits for those.
_RECORD = struct.Struct("<IHHBqd")

_FENCED = frozenset({history_pb2.APPEND_OUTCOME_QUARANTINED, history_pb2.APPEND_OUTCOME_ALREADY_ENDED})
_MALFORMED = frozenset({history_pb2.APPEND_OUTCOME_INVALID, history_pb2.APPEND_OUTCOME_CONFLICT})


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a writer must stop.

    `reason`: `STALE_EPOCH`, `EPOCH_TAKEN` or `FENCED` (another writer has the session), `EXECUTION_ENDED` (`winner` is
    the ending that stands, if it is known), or `HISTORY_UNAVAILABLE` (too much waits for the history, `detail` says
    more; the ending may still be written, and will be incomplete). `by` is `history`, `relay` or `producer`.
    """

    reason: str
    by: str
    current_epoch: int = 0
    current_execution_id: str = ""
    winner: history_pb2.Ending | None = None
    detail: str = ""


class WriterRefused(CallError):
    """Nothing more may be written by this writer; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        full = refusal.reason == "HISTORY_UNAVAILABLE"
        super().__init__(
            grpc.StatusCode.UNAVAILABLE if full else grpc.StatusCode.FAILED_PRECONDITION,
            f"refused by the {refusal.by}; the writer must stop",
            reason=refusal.reason,
        )
        self.refusal = refusal


class Tally:
    """What an execution wrote at one epoch: how many events the log must hold, how many bytes wait, what is missing.

    `refuse` is called with the reason when history no longer takes this writer's output.
    """

    def __init__(
        self, key: tuple[str, str], execution: session_pb2.ExecutionRef, refuse: Callable[[Refusal], None]
    ) -> None:
        self.key = key
        self.execution = execution
        self.waiting_bytes = 0
        self._refuse = refuse
        self._counted = 0
        self._missing = ""

    def count(self, events: int) -> None:
        """Events that the log must hold before the ending."""
        self._counted += events

    def miss(self, events: int, why: str) -> None:
        """Something will not be in the log; `events` of it were counted."""
        self._counted -= events
        self._missing = self._missing or why

    def judge(self, result: history_pb2.AppendResult, *, counted: int) -> None:
        """The final result of an event; `counted` is 1 when the manifest counts it."""
        duplicate = result.outcome == history_pb2.APPEND_OUTCOME_DUPLICATE
        if result.outcome == history_pb2.APPEND_OUTCOME_APPENDED or (duplicate and result.sequence):
            return
        # A duplicate without a sequence was kept out of the log the first time; why is not told again.
        if duplicate or result.outcome in _FENCED:
            winner = result.winner if result.HasField("winner") else None
            reason = result.reason or ("FENCED" if winner is None else "EXECUTION_ENDED")
            self._refuse(Refusal(reason, "history", result.current_epoch, winner=winner))
            return
        self.miss(counted, "history refused an event of the run")
        logger.error(
            "event refused for good",
            extra={
                "execution": self.execution.execution_id,
                "epoch": self.execution.epoch,
                "outcome": history_pb2.AppendOutcome.Name(result.outcome),
                "reason": result.reason,
                "problems": [f"{problem.field}: {problem.description}" for problem in result.problems],
            },
        )

    def fill_manifest(self, ending: event_pb2.Event) -> None:
        """Write the tally into an ending. What it says of being incomplete already, stays."""
        manifest = getattr(ending, ending.WhichOneof("body") or "").summary.manifest
        manifest.runner_events = self._counted
        if self._missing:
            manifest.incomplete = True
            manifest.incomplete_reason = manifest.incomplete_reason or self._missing


class Fact(Item):
    """An event that stands for itself."""

    __slots__ = ("future",)

    def __init__(self, content: bytes) -> None:
        super().__init__(event_field(content))
        self.future: asyncio.Future[history_pb2.AppendResult] = new_future()

    def settle(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        _resolve(self.future, results[0])
        return True

    def fail(self, error: Exception) -> None:
        _fail(self.future, error)


class Output(Item):
    """Events of a run: one, or an atomic set. `counted` has a 1 for each that the manifest counts, else a 0.

    `future` is that of what was parked, which nobody may want any more.
    """

    __slots__ = ("counted", "future", "tally", "waiting")

    def __init__(
        self,
        tally: Tally,
        wire: bytes,
        counted: Sequence[int],
        *,
        future: asyncio.Future[Any] | None,
        atomic: bool = False,
        barrier: bool = False,
    ) -> None:
        super().__init__(wire, len(counted), atomic=atomic, barrier=barrier)
        self.owner = self.tally = tally
        self.counted = counted
        self.future = future
        self.waiting = 0

    def wait(self) -> None:
        """Its bytes wait from now on, until it is settled or fails."""
        self.waiting = len(self.wire)
        self.tally.waiting_bytes += self.waiting

    def settle(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        self._waits_no_more()
        self._judge(results)
        _resolve(self.future, self._answer(results))
        return True

    def fail(self, error: Exception) -> None:
        self._waits_no_more()
        self.tally.miss(sum(self.counted), "an event of the run could not be sent")
        _fail(self.future, error)

    def pack(self) -> bytes:
        """Everything of it that is not its owner's, as one record."""
        through = -1 if self.frames is None else self.frames_through
        head = _RECORD.pack(len(self.wire), self.count, len(self.trace), self.atomic, through, self.hold_until)
        return b"".join((head, bytes(self.counted), self.trace, self.wire))

    def _judge(self, results: Sequence[history_pb2.AppendResult]) -> None:
        for result, counted in zip(results, self.counted, strict=True):
            self.tally.judge(result, counted=counted)

    def _answer(self, results: Sequence[history_pb2.AppendResult]) -> object:
        return list(results) if self.atomic else results[0]

    def _waits_no_more(self) -> None:
        self.tally.waiting_bytes -= self.waiting
        self.waiting = 0


def unpack(
    tally: Tally, frames: FrameBuffer, content: bytes, futures: Sequence[asyncio.Future[Any] | None]
) -> list[Item]:
    """The items of records that were joined, waiting again; `futures` has one entry for each."""
    items: list[Item] = []
    at = 0
    for future in futures:
        size, count, trace, atomic, through, hold_until = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        counted, at = content[at : at + count], at + count
        item_trace, at = content[at : at + trace], at + trace
        wire, at = content[at : at + size], at + size
        item = Output(tally, wire, counted, future=future, atomic=bool(atomic))
        item.trace = item_trace
        if through >= 0:
            item.frames, item.frames_through, item.hold_until = frames, through, hold_until
        item.wait()
        items.append(item)
    return items


class EndingSet(Output):
    """The ending of a run, and what goes into one atomic set with it.

    `ended` is called with its result, or with None when it was not sent.
    """

    __slots__ = ("_before", "_corrections", "_ended", "_ending", "_tried")

    def __init__(
        self,
        tally: Tally,
        ending: event_pb2.Event,
        before: Sequence[event_pb2.Event],
        ended: Callable[[history_pb2.AppendResult | None], None],
    ) -> None:
        counted = [*(1 for _ in before), 0]
        super().__init__(tally, b"", counted, future=new_future(), barrier=True)
        tally.count(sum(counted))
        self._ending = ending
        self._before = [event.SerializeToString() for event in before]
        self._ended = ended
        self._corrections = 0
        self.encode()

    def encode(self) -> None:
        """Take what the tally says now into the bytes. Only while no bytes of it can be in the log."""
        self.tally.fill_manifest(self._ending)
        events = [*self._before, self._ending.SerializeToString()]
        self.wire = b"".join(map(event_field, events))
        self.counted = [*(1 for _ in self._before), 0]
        self.count = len(events)
        self.atomic = len(events) > 1

    def settle(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        if self._corrections < CORRECTIONS and self._correct(results):
            self._corrections += 1
            self.encode()
            return False
        super().settle(results)
        self._ended(results[-1])
        return True

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._ended(None)

    def _correct(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        """Change what history did not like, of a set of which nothing is stored; False when that is not the case."""
        if results[-1].outcome == history_pb2.APPEND_OUTCOME_RETRY:
            # Whatever this run wrote was answered before its ending was, so there is nothing left to send again.
            self.tally.miss(0, f"{results[-1].missing} events of the run are not in the log")
            return True
        refused = [index for index, result in enumerate(results[:-1]) if result.outcome in _MALFORMED]
        if results[-1].outcome != history_pb2.APPEND_OUTCOME_SET_ABORTED or not refused:
            return False
        for index in reversed(refused):
            self.tally.judge(results[index], counted=1)
            del self._before[index]
        return True

    def _answer(self, results: Sequence[history_pb2.AppendResult]) -> object:
        return results[-1]


def type_of(event: event_pb2.Event) -> str:
    """The dotted type that belongs to the body of an event."""
    body = event.WhichOneof("body")
    if body is None:
        raise ValueError("an event needs a body")
    return event.custom.type if body == "custom" else body.replace("_", ".", 1)


def entity_of(event: event_pb2.Event) -> str:
    """The id of what an event of a run is about."""
    match event.WhichOneof("body"):
        case "message_completed":
            return event.message_completed.message_id
        case "tool_completed":
            return event.tool_completed.tool_call_id
        case _:
            return event.execution_id


def too_large(size: int, allowed: int) -> CallError:
    """The error for events that can never be appended."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, f"{size} bytes; {allowed} are allowed", reason="TOO_LARGE")


def new_future() -> asyncio.Future[Any]:
    """A future of the running loop."""
    return asyncio.get_running_loop().create_future()


def _resolve(future: asyncio.Future[Any] | None, result: object) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
        # The owner may not care; asyncio would complain of an error that nobody looked at.
        future.exception()
