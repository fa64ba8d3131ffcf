"""Which session does what next: one task for each session that has something to do, and its turns one after the other.

Rows decide; the driver only looks at them when it is woken, which every commit of this process does at once, and a
sweep does for what others committed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints
from services.pool.rows import Key, OutboxRow
from services.pool.store import PickedUp
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.room import TurnRoom
from services.pool.turns.turn import Turn

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "drive.picked_up")


@dataclasses.dataclass(slots=True)
class _Lane:
    """A session that is being driven. `woken` counts the wakes, so that none is lost between a look and the end."""

    task: asyncio.Task[Any] | None = None
    turn: Turn | None = None
    woken: int = 0
    told: asyncio.Future[None] | None = None
    admitted_at: float | None = None
    # What the commit that admitted it has picked up, and at which wake.
    picked: PickedUp | None = None
    picked_at: int = 0


class Driver:
    """Drives the sessions of this replica."""

    def __init__(
        self,
        room: TurnRoom,
        *,
        spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]],
    ) -> None:
        self._room = room
        self._store = room.store
        self._outbox = room.outbox
        self._clock = room.clock
        self._holder = room.holder
        self._spawn = spawn
        self._lanes: dict[Key, _Lane] = {}
        # Nothing new is picked up any more.
        self.closed = False

    @property
    def driving(self) -> list[Key]:
        """Sessions with a turn under way."""
        return [key for key, lane in self._lanes.items() if lane.turn is not None]

    def drives(self, key: Key, execution_id: str) -> bool:
        """Whether a turn of this very execution is under way."""
        lane = self._lanes.get(key)
        return lane is not None and lane.turn is not None and lane.turn.execution_id == execution_id

    def wake(
        self,
        key: Key,
        *,
        admitted_at: float | None = None,
        picked: PickedUp | None = None,
        facts: Sequence[OutboxRow] = (),
    ) -> None:
        """Look at the rows of a session now: tell its facts, start what waits, hand its commands to what runs.

        `admitted_at` is when the request came that made the change, on the monotonic clock; `picked` is what that
        change has picked up for this replica, `facts` what it told.
        """
        lane = self._lanes.setdefault(key, _Lane())
        lane.woken += 1
        if picked is not None:
            lane.picked, lane.picked_at = picked, lane.woken
        if admitted_at is not None and lane.turn is None:
            lane.admitted_at = admitted_at
        if lane.task is None:
            # Before the facts: the way to the agent is the longer one.
            lane.task = self._spawn(f"drive {key}", self._drive(key, lane))
        lane.told = self._outbox.told(key, facts)
        if lane.turn is not None:
            lane.turn.look()

    def fence(self, key: Key, epoch: int) -> None:
        """A session went on to `epoch`: what runs below it is dropped at once."""
        lane = self._lanes.get(key)
        if lane is not None and lane.turn is not None:
            lane.turn.fence(epoch)

    async def settled(self, key: Key) -> None:
        """Return when the turn of a session whose ending readers may have seen has also parked its agent."""
        lane = self._lanes.get(key)
        while lane is not None and lane.turn is not None and lane.turn.ending:
            await lane.turn.over.wait()
            lane = self._lanes.get(key)

    def close(self) -> None:
        """Pick nothing up any more; what runs goes on, but waits for no people."""
        self.closed = True
        for lane in self._lanes.values():
            if lane.turn is not None:
                lane.turn.let_go()

    async def idle(self, seconds: float) -> bool:
        """Wait until nothing is driven any more, at most that long; whether that is so."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if not tasks:
            return True
        _, running = await asyncio.wait(tasks, timeout=seconds)
        return not running

    def cancel_turns(self) -> None:
        """End what runs, as a shutdown does."""
        for lane in self._lanes.values():
            if lane.turn is not None:
                lane.turn.shut_down()

    async def _drive(self, key: Key, lane: _Lane) -> None:
        seen = -1
        try:
            # Whatever there is to do was committed before a wake, so without a new one there is nothing to look for.
            while not self.closed and seen != lane.woken:
                seen = lane.woken
                picked = await self._pick_up(key, lane)
                if picked is not None:
                    crashpoint("drive.picked_up")
                    await self._turn(key, lane, picked)
                if seen == lane.woken:
                    await self._room.parking.park_unused(key)
        except Exception:
            logger.exception("driving failed", extra={"session": str(key)})
        finally:
            lane.turn = None
            if self._lanes.get(key) is lane:
                del self._lanes[key]
            if (picked := lane.picked) is not None:
                # Nothing is begun here any more; whoever comes after finds it waiting.
                self._spawn(f"give back {key}", self._give_back(key, picked))

    async def _give_back(self, key: Key, picked: PickedUp) -> None:
        await until_it_lands(
            self._clock, key, "give back", lambda: self._store.give_back(picked.execution, self._holder)
        )

    async def _pick_up(self, key: Key, lane: _Lane) -> PickedUp | None:
        if lane.admitted_at is None:
            lane.admitted_at = self._clock.monotonic()
        picked, lane.picked = lane.picked, None
        if picked is not None and lane.picked_at == lane.woken:
            return picked
        # Nothing was picked up, or more has happened since, and the rows know what.
        return await until_it_lands(self._clock, key, "pick up", lambda: self._store.pick_up(key, self._holder))

    async def _turn(self, key: Key, lane: _Lane, picked: PickedUp) -> None:
        told = lane.told if lane.told is not None else self._outbox.told(key)
        admitted_at = lane.admitted_at if lane.admitted_at is not None else self._clock.monotonic()
        turn = Turn(self._room, picked, told, admitted_at=admitted_at)
        lane.admitted_at = None
        lane.turn = turn
        try:
            await turn.run()
        except Exception:
            logger.exception(
                "turn failed by a defect", extra={"session": str(key), "execution": picked.execution.execution_id}
            )
            await self._after_defect(key, picked)
        finally:
            lane.turn = None
            turn.over.set()

    async def _after_defect(self, key: Key, picked: PickedUp) -> None:
        """Nobody knows what the turn did last: its agent is done away with, and it ends as one whose driver is gone."""
        entry = self._room.entries.get(key)
        if entry is not None:
            await self._room.entries.close(entry, sandbox_pb2.RELEASE_REASON_FAILED_TURN)
        await self._room.recovery.take_over(picked.execution, why="the turn ended by a defect", defect=True)
