"""Settlement: the one transaction that closes an execution by the ending that history took, whoever wrote it."""

from __future__ import annotations

import dataclasses
import logging

from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.pool.changing import Changing
from services.pool.control.closing import close_gates, follow
from services.pool.control.executions import Queue, Winner, cancel_outcome, finished_by, queue_after
from services.pool.control.starts import Starts
from services.pool.log import Log
from services.pool.metrics import Metrics
from services.pool.rows import Execution, Finished, Input, Key, Outcome, Resolution
from services.pool.store import Changed, Store

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "promote.committed")

# What a Send that finds the session busy waits for history, in seconds; history away counts as busy.
_ASK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """An execution after its settlement. `first`: this call closed it. `promoted`: what follows on it at once."""

    outcome: Outcome
    first: bool
    promoted: Execution | None = None


class Settlement:
    """Closes executions. `changed` hears of what was started by it."""

    def __init__(
        self, store: Store, starts: Starts, log: Log, clock: Clock, *, changed: Changed, metrics: Metrics | None = None
    ) -> None:
        self._store = store
        self._starts = starts
        self._log = log
        self._clock = clock
        self._changed = changed
        self._metrics = metrics or Metrics()

    async def settle(self, key: Key, execution_id: str, winner: Winner) -> Settled | None:
        """Close an execution by its ending; repeating it changes nothing. None when the session is gone.

        In one transaction: the execution, its open commands, what it has asked people, what stands for the next turn,
        and the promotion of exactly one input, or a paused queue. What a paused one has asked stays open; where all of
        that is answered already, it is gone on with here.
        """
        code = winner.code
        if winner.outcome is Outcome.FAILED and not code and winner.sequence:
            code = await self._log.failure_code(key, winner)
        async with self._store.changing(key) as changing:
            if changing is None:
                return None
            closed = await changing.settle(
                execution_id,
                winner.outcome,
                code if winner.outcome is Outcome.FAILED else "",
                winner.sequence,
                cancel_outcome(winner.outcome),
            )
            if closed is None:
                before = await changing.execution(execution_id)
                return Settled(before.outcome or winner.outcome, first=False) if before is not None else None
            ended, prompted = closed.execution, None
            if ended.started_at is not None and ended.agent and ended.harness_session_id:
                prompted = Finished(ended.agent, ended.harness_session_id, execution_id)
            finished = finished_by(
                winner.outcome,
                prompted=prompted,
                before=changing.session.finished,
                # What the pool itself ends runs no more, or is killed for it.
                cut_off=ended.ending_event_id is not None,
            )
            changing.ended(execution_id, finished)
            promoted = None
            cancelled = closed.cancelled_for is not None
            if winner.outcome is Outcome.PAUSED and not cancelled:
                promoted = await follow(changing, self._starts, execution_id)
            elif closed.asked:
                # Also of one that was paused although somebody wanted it to end: it will not go on.
                now = self._clock.now()
                await close_gates(changing, execution_id, Resolution.EXECUTION_ENDED, by="", at=now)
            queue = queue_after(
                winner.outcome,
                paused=changing.session.queue_paused,
                cancelled=cancelled,
                steered=closed.steered is not None,
            )
            if queue is Queue.PAUSE:
                changing.change(queue_paused=True)
            elif queue is Queue.STEER:
                assert closed.steered is not None
                promoted = await self._promote(changing, await changing.input(closed.steered))
            elif queue is Queue.PROMOTE and closed.waiting:
                promoted = await self._promote(changing, *await changing.queue())
        logger.info(
            "execution settled",
            extra={
                "session": str(key),
                "execution": execution_id,
                "outcome": str(winner.outcome),
                "code": code,
                "sequence": winner.sequence,
                "promoted": promoted.execution_id if promoted is not None else None,
                "cancel_seconds": closed.cancelled_for,
            },
        )
        if closed.cancelled_for is not None:
            kind = "steer" if closed.steered is not None else "stop"
            self._metrics.command(kind, cancel_outcome(winner.outcome), closed.cancelled_for)
        self._metrics.settled(winner.outcome, code)
        if promoted is not None or changing.told:
            if promoted is not None:
                crashpoint("promote.committed")
            self._changed(key)
        return Settled(winner.outcome, first=True, promoted=promoted)

    async def _promote(self, changing: Changing, waiting: Input | None) -> Execution:
        assert waiting is not None, "the session row is locked and the input was just seen waiting"
        return await self._starts.promote(changing, waiting)

    async def settle_ended(self, key: Key, execution_id: str) -> bool:
        """Settle an execution if history says that it has ended; whether it has."""
        winner = await self._log.ending(key, execution_id, timeout=_ASK_SECONDS)
        if winner is None:
            return False
        await self.settle(key, execution_id, winner)
        return True
