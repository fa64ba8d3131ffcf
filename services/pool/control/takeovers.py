"""Taking executions over from a driver that is gone: each in one transaction, under the next epoch of its session."""

from __future__ import annotations

import dataclasses
import logging

from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.pool.changing import Changing
from services.pool.control import facts
from services.pool.control.executions import Takeover, takeover
from services.pool.metrics import Metrics
from services.pool.rows import Execution, ExecutionState
from services.pool.store import Changed, Store

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "takeover.committed")


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """An execution that was taken. Claims on its sandbox below (`epoch`, 0) belong to nobody any more."""

    execution: Execution
    epoch: int
    decision: Takeover


class Takeovers:
    """The shell; `changed` hears of each commit. `holder` is this replica: it has what it takes over from then on."""

    def __init__(
        self, store: Store, clock: Clock, *, changed: Changed, holder: str | None = None, metrics: Metrics | None = None
    ) -> None:
        self._store = store
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._changed = changed
        self._holder = holder

    async def take(self, seen: Execution, *, why: str, defect: bool = False, above: int = 0) -> Taken | None:
        """Take an execution from who drives it by the row `seen`; None when it ended, or the row has changed since.

        One that was STOPPING is not ended by this: its agent must be proven dead first, then `stopped` is due. With
        `defect` a run is not lost but failed: its driver lives and knows that it went wrong. `above` is an epoch that
        another service has seen: after a restored database it may be higher than the pool's.
        """
        key, execution_id = seen.key, seen.execution_id
        async with self._store.changing(key) as changing:
            execution = await changing.execution(execution_id) if changing is not None else None
            if changing is None or execution is None:
                return None
            if (execution.driver, execution.epoch) != (seen.driver, seen.epoch):
                return None
            decision = takeover(execution.state, tries=execution.tries, ending=execution.ending_event_id is not None)
            if decision is Takeover.NOTHING:
                return None
            if decision is not Takeover.AWAIT_ENDING:
                goes_on = decision in {Takeover.DRIVE_AGAIN, Takeover.STOP}
                changing.session = dataclasses.replace(
                    changing.session,
                    epoch=max(changing.session.epoch, above) + 1,
                    holder=self._holder if goes_on else None,
                )
                await self._apply(changing, execution, decision, why, defect=defect)
            taken = Taken(execution, changing.session.epoch, decision)
        crashpoint("takeover.committed")
        self._metrics.taken_over(decision.value)
        logger.warning(
            "execution taken over",
            extra={
                "session": str(key),
                "execution": execution_id,
                "state": str(execution.state),
                "decision": decision.value,
                "epoch": taken.epoch,
                "why": why,
            },
        )
        self._changed(key)
        return taken

    async def _apply(
        self, changing: Changing, execution: Execution, decision: Takeover, why: str, *, defect: bool
    ) -> None:
        execution_id, epoch, now = execution.execution_id, changing.session.epoch, self._clock.now()
        match decision:
            case Takeover.FAIL_START:
                message = f"it could not be started in {execution.tries} tries; send the message again"
                fact = facts.failed(execution_id, epoch, code="START_FAILED", message=message, at=now)
            case Takeover.LOSE if defect:
                message = "an error in Hearth ended it; the log of the pool says which"
                fact = facts.failed(execution_id, epoch, code="RUN_DEFECT", message=message, at=now, incomplete=why)
            case Takeover.LOSE:
                fact = facts.lost(execution_id, epoch, reason=why, at=now)
            case Takeover.PAUSE:
                gates = await changing.open_gates(execution_id)
                fact = facts.paused(execution_id, epoch, interaction_ids=gates, at=now, incomplete=why)
            case Takeover.STOP:
                # Whoever proves its agent dead drives it until then, so that his own death is noticed.
                await changing.raise_epoch(execution_id, driver=self._holder)
                return
            case _:
                await changing.raise_epoch(execution_id)
                return
        changing.tell(fact)
        await changing.end_by_pool(execution_id, execution.state, fact.event_id, epoch=epoch)

    async def stopped(self, taken: Taken, why: str) -> None:
        """End an execution that was taken while STOPPING; its agent is proven dead."""
        key, execution_id = taken.execution.key, taken.execution.execution_id
        async with self._store.changing(key) as changing:
            execution = await changing.execution(execution_id) if changing is not None else None
            if changing is None or execution is None or execution.epoch != taken.epoch:
                return
            cancel = await changing.open_cancel(execution_id)
            fact = facts.stopped(
                execution_id,
                execution.epoch,
                reason="runner lost",
                command_id=cancel.command_id if cancel is not None else None,
                at=self._clock.now(),
                incomplete=why,
            )
            if await changing.end_by_pool(execution_id, ExecutionState.STOPPING, fact.event_id, epoch=execution.epoch):
                changing.session = dataclasses.replace(changing.session, holder=None)
                changing.tell(fact)
        self._changed(key)
