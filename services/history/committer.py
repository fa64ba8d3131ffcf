"""Group commit: what arrives while a commit is in flight becomes the next one.

Each session belongs to one lane, and a lane commits one group after the other, so events of a session are decided in
the order in which they came. A group is one database call (see `ledger`). It runs in the task of its lane: a caller
that is cancelled takes its reply with it and nothing else.

A group fails as a whole when Postgres is away: its callers get UNAVAILABLE and send again. When Postgres refuses the
data of a group, the group is halved until the record that it refuses stands alone; its neighbours never notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.chassis.clock import Ids
from services.chassis.errors import HearthError, ResourceExhausted
from services.chassis.interceptors import shutting_down
from services.chassis.postgres import Pool
from services.history.lane import Lane, Limits, Notices
from services.history.measures import Measures
from services.history.validate import CheckedSet
from services.history.work import Order, Submission, Work

_OVERLOAD_RETRY_SECONDS = 0.5


class Committer:
    """Takes checked requests and commits them in groups."""

    def __init__(self, pool: Pool, notices: Notices, ids: Ids, limits: Limits, measures: Measures) -> None:
        self._limits = limits
        self._closing = False
        self._lanes = [Lane(pool, notices, ids, limits, measures) for _ in range(limits.lanes)]

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
        for work in works:
            self._lanes[hash(work.key) % len(self._lanes)].add(work)
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
