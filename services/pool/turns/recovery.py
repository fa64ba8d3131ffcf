"""What follows when an execution was taken from a driver that is gone: its sandbox is given back in that driver's name.

Only a Stop has to wait for that: it may not be told as done before its agent is proven dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis.clock import Clock
from services.chassis.errors import HearthError
from services.pool.control.executions import Takeover
from services.pool.control.takeovers import Taken, Takeovers
from services.pool.rows import Claim, Execution, Key
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.sandboxes import Sandboxes

logger = logging.getLogger(__name__)

_WAIT = 5.0
_LOST = sandbox_pb2.RELEASE_REASON_LOST


class Recovery:
    """Takes executions over, and does what that asks for in the background."""

    def __init__(
        self,
        takeovers: Takeovers,
        sandboxes: Sandboxes,
        clock: Clock,
        *,
        spawn: Callable[[str, Coroutine[Any, Any, None]], object],
    ) -> None:
        self._takeovers = takeovers
        self._sandboxes = sandboxes
        self._clock = clock
        self._spawn = spawn
        # Stops that are being finished here, by execution.
        self.finishing: dict[str, Key] = {}

    async def take_over(self, execution: Execution, *, why: str, defect: bool = False, above: int = 0) -> Taken | None:
        """Take an execution from who drives it by this row, read before; None when the row has changed since.

        See `Takeovers.take` for `defect` and `above`. Repeated while Postgres is away.
        """
        taken = await until_it_lands(
            self._clock,
            execution.key,
            "take over",
            lambda: self._takeovers.take(execution, why=why, defect=defect, above=above),
        )
        if taken is None:
            return None
        claim = Claim(taken.epoch, 0)
        if taken.decision is Takeover.STOP:
            self.finishing[execution.execution_id] = execution.key
            self._spawn(f"stop {execution.key}", self._finish_stop(taken, claim, why))
        elif taken.decision in {Takeover.LOSE, Takeover.PAUSE, Takeover.FAIL_START}:
            self._sandboxes.release_later(execution.key, claim, _LOST, gone=True)
        return taken

    async def _finish_stop(self, taken: Taken, claim: Claim, why: str) -> None:
        key = taken.execution.key
        try:
            while True:
                try:
                    await self._sandboxes.release(key, claim, _LOST, gone=True)
                    break
                except HearthError as error:
                    logger.warning("agent is not proven dead yet", extra={"session": str(key), "reason": error.reason})
                await self._clock.sleep(_WAIT)
            await until_it_lands(self._clock, key, "stop", lambda: self._takeovers.stopped(taken, why))
        finally:
            self.finishing.pop(taken.execution.execution_id, None)
