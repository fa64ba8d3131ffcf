"""Group commit: what arrives while a commit is in flight becomes the next one.

A lane commits one group after the other. A session stays in a lane for as long as anything of it waits or is in flight
there, so its events are decided in the order in which they came; after that it goes wherever a group gathers. A group
is one database call (see `ledger`). It runs in the task of its lane: a caller that is cancelled takes its reply with it
and nothing else.

A group fails as a whole when Postgres is away: its callers get UNAVAILABLE and send again. When Postgres refuses the
data of a group, the group is halved until the record that it refuses stands alone; its neighbours never notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.chassis.clock import Ids
from services.chassis.errors import HearthError, ResourceExhausted
from services.chassis.interceptors import shutting_down
from services.chassis.postgres import Pool
from services.history.lane import Lane, Limits, Notices, Remembered
from services.history.metrics import Metrics
from services.history.validate import CheckedSet
from services.history.work import Order, Submission, Work

_OVERLOAD_RETRY_SECONDS = 0.5


class Load(Protocol):
    """What a lane has to do."""

    @property
    def committing(self) -> bool:
        """Whether a group is in flight."""
        ...

    @property
    def events(self) -> int:
        """How many events wait or are in flight."""
        ...


def best_lane(lanes: Sequence[Load], group_events: int) -> int:
    """Where the next works go: to the group that is about to begin, else to a lane that does nothing, else to the one
    that has the least to do. Pure.
    """

    def order(place: int) -> tuple[bool, int]:
        lane = lanes[place]
        begins = not lane.committing and lane.events < group_events
        return not begins, -lane.events if begins else lane.events

    return min(range(len(lanes)), key=order)


class Committer:
    """Takes checked requests and commits them in groups."""

    def __init__(self, pool: Pool, notices: Notices, ids: Ids, limits: Limits, metrics: Metrics) -> None:
        self._limits = limits
        self._closing = False
        remembered = Remembered()
        self._lanes = [
            Lane(pool, notices, ids, limits, metrics=metrics, remembered=remembered) for _ in range(limits.lanes)
        ]

    @property
    def waiting(self) -> int:
        """Events that wait or are in flight."""
        return sum(lane.events for lane in self._lanes)

    @property
    def lanes(self) -> Sequence[Lane]:
        """Each must be run by a background task of its own."""
        return self._lanes

    def submit(self, sets: Sequence[CheckedSet], order: Order, traceparent: str = "") -> Submission:
        """Queue a request; `traceparent` stands for the sets that tell none of their own.

        Raises `ResourceExhausted` when the queue is full, and what stopped its order before.
        """
        if order.failure is not None:
            raise order.failure
        if self._closing:
            raise shutting_down()
        submission = Submission(sets)
        works = submission.works(order, traceparent)
        try:
            self._refuse_overload(works)
        except HearthError as refusal:
            order.failure = refusal
            raise
        free: Lane | None = None
        for work in works:
            lane = next((lane for lane in self._lanes if work.key in lane.works), None)
            if lane is None:
                # The same for all of the request: what comes together is committed together.
                lane = free = free or self._lanes[best_lane(self._lanes, self._limits.group_events)]
            lane.add(work)
        return submission

    def _refuse_overload(self, works: Sequence[Work]) -> None:
        events = self.waiting
        size = sum(lane.size for lane in self._lanes)
        # Whatever its size, a request is taken when nothing else waits.
        if events == 0:
            return
        if (
            events + sum(len(work.records) for work in works) > self._limits.queue_events
            or size + sum(work.size for work in works) > self._limits.queue_bytes
        ):
            raise ResourceExhausted(
                "history has too much to write; send again later",
                reason="OVERLOADED",
                retry_after=_OVERLOAD_RETRY_SECONDS,
            )

    async def close(self) -> None:
        """Take nothing more; return when nothing waits or is in flight.

        A stream so answers all that it has taken, and then ends with the number to go on from.
        """
        self._closing = True
        for lane in self._lanes:
            await lane.idle.wait()
