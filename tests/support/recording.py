"""What happened in a run, as plain values: what producers sent and were answered, what readers got, what is stored.

Whoever drives services fills a `Recording`; the checkers in `tests/checkers` say what is wrong with one. Nothing here
does IO. The order of things is told by ticks: whole numbers that only grow, taken from one `Ticks` in one process, so
"answered before the other was sent" is a comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2, frame_pb2, session_pb2
from services.chassis.errors import HearthError

Key = tuple[str, str]

ENDINGS = frozenset(
    {"execution.completed", "execution.paused", "execution.stopped", "execution.failed", "execution.lost"}
)
STORED = frozenset({history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE})
ASIDE = frozenset({history_pb2.APPEND_OUTCOME_QUARANTINED, history_pb2.APPEND_OUTCOME_ALREADY_ENDED})


class Ticks:
    """A clock that counts: every reading is above the one before."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self) -> int:
        return next(self._numbers)


@dataclass
class Append:
    """One event in one request.

    Events of the same `request` went together. Those of the same `line` were sent on one stream, or through one
    producer, in the order of the recording; a request that stands for itself has none. `sound` is False for an event
    that was made malformed on purpose. Without an answer `answered` is 0. Times are seconds of a monotonic clock.
    """

    session: Key
    event: event_pb2.Event
    began: int
    request: int
    line: str = ""
    sound: bool = True
    answered: int = 0
    result: history_pb2.AppendResult | None = None
    began_at: float = 0.0
    answered_at: float = 0.0


@dataclass
class Publish:
    """Frames of one execution that a producer gave to a relay; `result` is None where it was not told.

    `began` is the tick at which it was sent, 0 where that is not known.
    """

    session: Key
    execution_id: str
    epoch: int
    frames: Sequence[frame_pb2.Frame]
    result: relay_pb2.PublishResult | None = None
    began: int = 0


@dataclass
class Trim:
    """Old events that somebody had removed. `oldest` is what was answered, head + 1 where nothing is kept."""

    session: Key
    through: int
    answered: int = 0
    oldest: int = 0


@dataclass
class Mark:
    """An execution that somebody said lacks output. `entry` is what was answered; None where it was not told."""

    session: Key
    execution_id: str
    reason: str
    began: int
    answered: int = 0
    entry: history_pb2.LedgerEntry | None = None


@dataclass
class Connection:
    """One call of a reader: where it began, what it got, and how it ended.

    `after` is None for one that began at the tail. `refusal` is the error it ended with; None: not ended, or left by
    the reader. `promised` is the sequence up to which the answer said to be complete; None for one that is live.
    `began` is the tick at which it was made, 0 where that is not known.
    """

    after: session_pb2.Cursor | None
    items: list[relay_pb2.Item] = field(default_factory=list)
    refusal: HearthError | None = None
    events_only: bool = False
    promised: int | None = None
    began: int = 0

    @property
    def events(self) -> list[event_pb2.EventItem]:
        """The events it got."""
        return list(events_in(self.items))


@dataclass
class Reader:
    """All connections of one reader of one session. `caught_up`: it was given the time to get everything."""

    session: Key
    connections: list[Connection] = field(default_factory=list)
    caught_up: bool = False


@dataclass
class Log:
    """What is stored of a session once nothing moves any more, and before it what was read before it was removed.

    `kept_from` is the sequence of the first event that is kept, where that is not the first item.
    """

    items: list[event_pb2.EventItem] = field(default_factory=list)
    quarantined: list[history_pb2.QuarantinedEvent] = field(default_factory=list)
    head: history_pb2.Head | None = None
    kept_from: int = 1

    @property
    def oldest(self) -> int:
        """Sequence of the first event known; 1 for a log that was never written to."""
        return self.items[0].cursor.sequence if self.items else 1

    @property
    def last(self) -> int:
        """Sequence of the newest event; 0 when there is none."""
        return self.items[-1].cursor.sequence if self.items else 0

    def at(self, sequence: int) -> event_pb2.EventItem | None:
        """The event at a sequence, None where none is kept."""
        place = sequence - self.oldest
        return self.items[place] if 0 <= place < len(self.items) else None


@dataclass
class Recording:
    """A whole run.

    `logs` holds the sessions that were read at its end; without one only what readers and producers saw is checked.
    `settled`: every execution that began was to be ended before that. `outages`: spans of `began_at` time in which some
    service was away, so that answers may have taken long. `flushes`: ticks before and after the
    bus lost all that it held.
    """

    appends: list[Append] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    logs: dict[Key, Log] = field(default_factory=dict)
    settled: bool = False
    outages: list[tuple[float, float]] = field(default_factory=list)
    flushes: list[tuple[int, int]] = field(default_factory=list)
    trims: list[Trim] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @classmethod
    def of_reader(cls, connections: Iterable[Connection]) -> Recording:
        """One reader and nothing else."""
        return cls(readers=[Reader(("", ""), list(connections))])

    @classmethod
    def of_log(cls, items: Iterable[event_pb2.EventItem]) -> Recording:
        """One log and nothing else."""
        return cls(logs={("", ""): Log(list(items))})


def events_in(items: Iterable[relay_pb2.Item]) -> Iterator[event_pb2.EventItem]:
    """The events among `items`."""
    return (item.event for item in items if item.HasField("event"))


def gap_range(gap: relay_pb2.Gap) -> tuple[int, int]:
    """First and last lost index; `from` is a word of Python."""
    return getattr(gap, "from"), gap.to


def text_of(message: event_pb2.MessageCompleted) -> str:
    """The text of a message."""
    return "".join(part.text.text for part in message.content)


def tag_of(event_id: str) -> str:
    """What a cursor says of the event with this id."""
    return event_id.replace("-", "")[:16].lower()


def content_of(event: event_pb2.Event) -> bytes:
    """What makes two events with one id equal: scope, type, execution, entity and body."""
    content = event_pb2.Event()
    content.CopyFrom(event)
    for name in ("event_id", "epoch", "frames_through", "occurred_at"):
        content.ClearField(name)
    content.execution_id = content.execution_id.lower()
    return content.SerializeToString(deterministic=True)


def runner(event: event_pb2.Event) -> bool:
    """Whether an event is output of a run."""
    return event.scope == event_pb2.EVENT_SCOPE_RUNNER


def counted(event: event_pb2.Event) -> bool:
    """Whether a manifest counts it."""
    return runner(event) and event.type != "execution.started" and event.type not in ENDINGS


def manifest_of(ending: event_pb2.Event) -> event_pb2.Manifest:
    """The manifest of an ending."""
    body = ending.WhichOneof("body") or ""
    manifest: event_pb2.Manifest = getattr(ending, body).summary.manifest
    return manifest
