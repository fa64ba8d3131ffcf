"""A request on its way through the committer, and the pieces that groups are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.chassis.errors import HearthError
from services.history.ledger import Decision, Record
from services.history.validate import CheckedSet, Key

# Beside its bytes an event costs about this much memory while it waits.
_RECORD_OVERHEAD = 512


class Order:
    """The requests of one stream: once one has failed, those behind it are not committed either.

    `traceparent` is that of a call which goes on after its requests; commits are linked to it.
    """

    def __init__(self, traceparent: str = "") -> None:
        self.failure: HearthError | None = None
        self.traceparent = traceparent


class Submission:
    """A request on its way. `done` gives the decisions, a list for each of its sets."""

    def __init__(self, sets: Sequence[CheckedSet]) -> None:
        self.done: asyncio.Future[list[list[Decision]]] = asyncio.get_running_loop().create_future()
        # Not every caller lives to see the failure of its request.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._sets = sets
        self._open = 0
        self._decided: dict[int, list[Decision]] = {}

    def works(self, order: Order, traceparent: str) -> list[Work]:
        """What must be committed, a work for each set that has records; `traceparent` for those that tell none."""
        made = [
            Work(found.key, found.records, found.atomic, self, index, order, found.traceparent or traceparent)
            for index, found in enumerate(self._sets)
            if found.records
        ]
        self._open = len(made)
        if not made:
            self._finish()
        return made

    def answer(self, index: int, decisions: list[Decision]) -> None:
        """The set `index` has been decided."""
        self._decided[index] = decisions
        self._open -= 1
        if not self._open:
            self._finish()

    def fail(self, error: HearthError) -> None:
        """A set could not be committed."""
        if not self.done.done():
            self.done.set_exception(error)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(
                [found.complete(self._decided.get(index, [])) for index, found in enumerate(self._sets)]
            )


@dataclass(slots=True, eq=False)
class Work:
    """The records of one set."""

    key: Key
    records: list[Record]
    atomic: bool
    submission: Submission
    index: int
    order: Order
    traceparent: str
    decisions: list[Decision] = field(default_factory=list)
    # Bytes that it occupies.
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum([len(record.raw) + _RECORD_OVERHEAD for record in self.records])

    def answer(self, decisions: Iterable[Decision]) -> None:
        """The next of its records have been decided."""
        self.decisions += decisions
        if len(self.decisions) == len(self.records):
            self.submission.answer(self.index, self.decisions)

    def fail(self, error: HearthError) -> None:
        """Nothing is known of the records that have no decision yet."""
        if len(self.decisions) < len(self.records):
            self.order.failure = error
            self.submission.fail(error)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some neighbouring records of a work; what a group is made of, and halved into."""

    work: Work
    start: int
    stop: int

    @property
    def records(self) -> list[Record]:
        return self.work.records[self.start : self.stop]

    @property
    def single(self) -> bool:
        """Whether it can only be stored whole or not at all."""
        return self.work.atomic or self.stop - self.start == 1


def halves(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Cut a group in two, in order; it must hold more than one single part."""
    if len(parts) > 1:
        middle = len(parts) // 2
        return list(parts[:middle]), list(parts[middle:])
    (part,) = parts
    middle = (part.start + part.stop) // 2
    return [Part(part.work, part.start, middle)], [Part(part.work, middle, part.stop)]
