"""Whether this replica may trust that what it holds is still its own: only while its beats land.

A process whose beats do not land may have been declared dead: it may be cut off from the database, or was frozen. It
goes on with the turns it drives, because each of their effects is fenced where it arrives, but it starts nothing new.
"""

from __future__ import annotations

import asyncio

from services.chassis.clock import Clock
from services.pool.rows import Execution
from services.pool.store import Store
from services.pool.turns.persistence import until_it_lands


class Trust:
    """`limit` is how long after a beat it is believed, in seconds; less than what others wait for."""

    def __init__(self, store: Store, clock: Clock, holder: str, *, limit: float) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._limit = limit
        self._landed_at: float | None = None
        self._landed = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether a beat landed lately. Asked of the clock each time: a frozen process notices nothing else."""
        return self._landed_at is not None and self._clock.monotonic() - self._landed_at <= self._limit

    def landed(self, at: float) -> None:
        """A beat that was begun then has landed, and what it found changed has been acted on."""
        self._landed_at = at
        self._landed.set()

    async def confirm(self, execution: Execution) -> bool:
        """Whether an execution is still driven here; waits for a beat to land and reads its row where that is doubtful.

        To be asked before what cannot be taken back and is fenced nowhere.
        """
        while not self.held:
            self._landed.clear()
            await self._landed.wait()
            row = await until_it_lands(
                self._clock,
                execution.key,
                "confirm",
                lambda: self._store.execution(execution.key, execution.execution_id),
            )
            if row is None or (row.driver, row.epoch) != (self._holder, execution.epoch):
                return False
        return True
