"""Which frames go to the relay next, and which are given up. Pure: values in, decisions out.

Frames are temporary, so everything here is bounded by letting go of the oldest: a hole in the indexes is what readers
are told as a gap, and what the lost frames carried comes complete with its event.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import grpc

from hearth._pipeline import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, ProtocolViolation
from hearth._wire import bytes_field, bytes_field_head, number_field
from hearth.errors import CallError, status_is_lost
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import session_pb2

logger = logging.getLogger(__name__)

REQUESTS_IN_FLIGHT = 2
REQUEST_BYTES = 1024 * 1024
# Ended executions whose last word waits for a relay that is away; without it the relay's buffer expires a little later.
ENDED_WAITING = 1_024

_ENDED = number_field(relay_pb2.FrameBatch.ENDED_FIELD_NUMBER, 1)

# Codes that say something is wrong with the frames themselves: sent again they would be refused again.
_REFUSED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


class FrameBuffer:
    """The frames of one execution at one epoch that the relay has not taken yet, ascending by index.

    `fenced` is called when the relay says that another writer has the session, with that writer.
    """

    __slots__ = ("_fresh", "_limit", "_sent", "dropped", "ended", "fenced", "head", "in_line", "trace")

    def __init__(
        self,
        session: session_pb2.SessionKey,
        execution: session_pb2.ExecutionRef,
        *,
        limit: int,
        fenced: Callable[[session_pb2.ExecutionRef], None],
    ) -> None:
        batch = relay_pb2.FrameBatch(session=session, execution_id=execution.execution_id, epoch=execution.epoch)
        self.head = batch.SerializeToString()
        # The trace that they belong to, as a field of a batch. It goes with the first frame.
        self.trace = b""
        self.fenced = fenced
        self.ended = False
        self.dropped = 0
        self.in_line = False
        self._limit = limit
        self._sent: deque[tuple[int, bytes]] = deque()
        self._fresh: deque[tuple[int, bytes]] = deque()

    def traced(self, traceparent: str) -> None:
        """They belong to this W3C trace context."""
        field = relay_pb2.FrameBatch.TRACEPARENT_FIELD_NUMBER
        self.trace = bytes_field(field, traceparent.encode()) if traceparent else b""

    def add(self, index: int, frame: bytes) -> None:
        """Keep a frame, serialized; lets go of the oldest when there are too many."""
        if len(self) >= self._limit:
            (self._sent or self._fresh).popleft()
            self.dropped += 1
        self._fresh.append((index, bytes_field(relay_pb2.FrameBatch.FRAMES_FIELD_NUMBER, frame)))

    def __len__(self) -> int:
        return len(self._sent) + len(self._fresh)

    @property
    def ready(self) -> bool:
        """Whether there is something to send."""
        return self.ended or bool(self._fresh)

    def holds(self, through: int) -> bool:
        """Whether a frame up to index `through` is still here."""
        oldest = self._sent or self._fresh
        return bool(oldest) and oldest[0][0] <= through

    def take(self, budget: int) -> tuple[list[bytes], bool]:
        """The batch to send next: its parts, of about `budget` bytes, and whether it says that no more will come."""
        parts = [self.head]
        while self._fresh and budget > 0:
            entry = self._fresh.popleft()
            self._sent.append(entry)
            if entry[0] == 0 and self.trace:
                parts.append(self.trace)
            parts.append(entry[1])
            budget -= len(entry[1])
        ended = self.ended and not self._fresh
        if ended:
            self.ended = False
            parts.append(_ENDED)
        return parts, ended

    def taken(self, through: int) -> None:
        """The relay has everything up to index `through`."""
        for frames in (self._sent, self._fresh):
            while frames and frames[0][0] <= through:
                frames.popleft()

    def give_up(self, through: int) -> None:
        """Let go of everything up to index `through`."""
        before = len(self)
        self.taken(through)
        self.dropped += before - len(self)

    def give_up_sent(self) -> None:
        """Let go of what was sent."""
        self.dropped += len(self._sent)
        self._sent.clear()

    def send_again(self) -> None:
        """What was sent is to be sent once more."""
        self._fresh.extendleft(reversed(self._sent))
        self._sent.clear()

    def clear(self) -> None:
        """Let go of everything, for good."""
        self.dropped += len(self)
        self._sent.clear()
        self._fresh.clear()
        self.ended = False


class FrameQueue:
    """The frames of all executions on their way through one Publish stream.

    A request goes at once when none was sent lately, else frames gather for `gather` seconds.
    """

    def __init__(self, *, gather: float) -> None:
        self._gather = gather
        self._line: deque[FrameBuffer] = deque()
        self._in_flight: deque[tuple[int, float, list[tuple[FrameBuffer, bool]]]] = deque()
        self._number = 0
        self._sent_at = float("-inf")
        self._paused_until = float("-inf")
        self._pauses = 0
        self._hurried = False
        # True once a frame was not taken in time, until the relay takes one again: no event waits for frames meanwhile.
        self.away = False
        self.requests = 0

    def add(self, buffer: FrameBuffer) -> bool:
        """The buffer has something to send. True when that changes what `take` and `next_time` say."""
        if buffer.in_line:
            return False
        if buffer.ended and len(self._line) >= ENDED_WAITING:
            buffer.ended = False
            return False
        buffer.in_line = True
        self._line.append(buffer)
        return len(self._line) == 1

    def hurry(self) -> None:
        """An event waits for frames: do not gather."""
        self._hurried = True

    @property
    def pending(self) -> bool:
        return bool(self._line or self._in_flight)

    @property
    def waiting_since(self) -> float | None:
        return self._in_flight[0][1] if self._in_flight else None

    def next_time(self, now: float) -> float | None:
        if not self._line or len(self._in_flight) >= REQUESTS_IN_FLIGHT:
            return None
        return max(now, self._may_send_at())

    def take(self, now: float) -> bytes | None:
        if len(self._in_flight) >= REQUESTS_IN_FLIGHT or now < self._may_send_at():
            return None
        parts: list[bytes] = []
        batches: list[tuple[FrameBuffer, bool]] = []
        budget = REQUEST_BYTES
        while self._line and budget > 0:
            buffer = self._line.popleft()
            buffer.in_line = False
            if not buffer.ready:
                continue
            batch, ended = buffer.take(budget)
            size = sum(map(len, batch))
            parts += (bytes_field_head(relay_service_pb2.PublishRequest.BATCHES_FIELD_NUMBER, size), *batch)
            batches.append((buffer, ended))
            budget -= size
            if buffer.ready:
                self.add(buffer)
        if not batches:
            return None
        self._number += 1
        self._in_flight.append((self._number, now, batches))
        self._sent_at = now
        self._hurried = False
        self.requests += 1
        parts.append(number_field(relay_service_pb2.PublishRequest.NUMBER_FIELD_NUMBER, self._number))
        return b"".join(parts)

    def received(self, response: relay_service_pb2.PublishResponse, now: float) -> None:
        if not self._in_flight or self._in_flight[0][0] != response.number:
            raise ProtocolViolation(f"an answer to request {response.number}, which is not the oldest one")
        batches = self._in_flight[0][2]
        if len(batches) != len(response.results):
            raise ProtocolViolation(f"{len(response.results)} results for {len(batches)} batches")
        self._in_flight.popleft()
        unavailable = False
        for (buffer, ended), result in zip(batches, response.results, strict=True):
            if result.outcome == relay_pb2.PUBLISH_OUTCOME_ACCEPTED:
                if result.HasField("through"):
                    buffer.taken(result.through)
                self.away = False
                self._pauses = 0
            elif result.outcome == relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE:
                self._send_again(buffer, ended)
                unavailable = True
            elif result.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED:
                buffer.clear()
                buffer.fenced(result.current)
            else:
                buffer.give_up_sent()
                logger.warning(
                    "frames refused",
                    extra={
                        "execution": result.execution.execution_id,
                        "outcome": relay_pb2.PublishOutcome.Name(result.outcome),
                        "problems": [f"{problem.field}: {problem.description}" for problem in result.problems],
                    },
                )
        if unavailable:
            self.away = True
            self._pauses += 1
            self._paused_until = now + min(FIRST_BACKOFF_SECONDS * 2**self._pauses, MAX_BACKOFF_SECONDS)

    def lost(self, error: CallError | None, now: float) -> None:
        refused = error is not None and error.code in _REFUSED and not status_is_lost(error)
        for _, _, batches in self._in_flight:
            for buffer, ended in batches:
                if refused:
                    buffer.give_up_sent()
                else:
                    self._send_again(buffer, ended)
        self._in_flight.clear()
        self._number = 0
        self._sent_at = float("-inf")
        if error is not None:
            self.away = True

    def _send_again(self, buffer: FrameBuffer, ended: bool) -> None:
        buffer.send_again()
        buffer.ended = buffer.ended or ended
        self.add(buffer)

    def _may_send_at(self) -> float:
        gathered = self._sent_at if self._hurried else self._sent_at + self._gather
        return max(self._paused_until, gathered)
