"""Which session does what next: one task for each session that has something to do, and its turns one after the other.

Rows decide; the driver only looks at them when it is woken, which every commit of this process does at once, nudges of
other replicas do for theirs, and a sweep does for whatever nobody told. What another replica has is told to that one:
only when it does not pick up what waits in time, or cannot be reached, that is driven here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hearth.pool.v1 import pool_pb2
from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints
from services.pool.replica_rows import ReplicaRows
from services.pool.rows import Key, OutboxRow
from services.pool.runners import Place, Reason, Receipt, Runners, Standing, place, whom_to_tell
from services.pool.store import PickedUp
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.room import TurnRoom
from services.pool.turns.turn import Turn
from services.pool.warm.entries import EntryState

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "drive.picked_up")

# How long a holder that was told of an execution may take to pick it up.
PICK_UP_SECONDS = 2.0
# Stands for every execution of a session.
_ANYTHING = "*"


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
    # Set by each wake; what was offered to its holder, and until when that one may take it.
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    offered: str | None = None
    taken_at: float = 0.0


class Driver:
    """Drives the sessions of this replica."""

    def __init__(
        self,
        room: TurnRoom,
        *,
        rows: ReplicaRows,
        spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]],
    ) -> None:
        self._room = room
        self._rows = rows
        # The way to other replicas; it needs the driver too, as their way to this one.
        self.runners: Runners | None = None
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
        """Sessions with a turn under way, or about to be."""
        return [key for key, lane in self._lanes.items() if lane.turn is not None or lane.picked is not None]

    @property
    def may_start(self) -> bool:
        """Whether anything new is begun here."""
        return not self.closed and self._room.trust.held

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
        if picked is not None or lane.turn is not None:
            # Others of its facts are told once it is known that nobody else drives it.
            lane.told = self._outbox.told(key, facts)
        if lane.turn is not None:
            lane.turn.look()
        lane.news.set()

    def take(self, key: Key) -> None:
        """Start what waits in a session, whoever holds that: it was left waiting for too long."""
        lane = self._lanes.setdefault(key, _Lane())
        lane.offered, lane.taken_at = _ANYTHING, self._clock.monotonic()
        self.wake(key)

    def nudged(self, key: Key, epoch: int, reason: Reason) -> Receipt:
        """Another replica says that rows of a session wait."""
        lane, entry = self._lanes.get(key), self._room.entries.get(key)
        if reason == pool_pb2.NUDGE_REASON_EVICT:
            return Receipt.ACCEPTED if self.evict(key, epoch) else Receipt.NOT_HELD
        turn = lane.turn if lane is not None else None
        if reason == pool_pb2.NUDGE_REASON_EXECUTION:
            if turn is not None and turn.epoch >= epoch:
                return Receipt.DUPLICATE
            if not self.may_start:
                return Receipt.NOT_HELD
        if turn is None and entry is None:
            return Receipt.NOT_HELD
        self.wake(key)
        return Receipt.ACCEPTED

    async def reread(self) -> None:
        """Compare what is held here with the rows, and let go of what has another holder by now."""
        idle = [entry for entry in self._room.entries.all() if entry.state is EntryState.IDLE]
        held = await self._rows.held(self._holder)
        for entry in idle:
            if entry.key not in held and entry.state is EntryState.IDLE:
                logger.warning("agent is not held any more", extra={"session": str(entry.key)})
                self._room.entries.drop(entry)
                self._room.sandboxes.let_go(entry.key, entry.claim)
        for lane in self._lanes.values():
            if lane.turn is not None:
                lane.turn.look()

    def fence(self, key: Key, epoch: int) -> None:
        """A session went on to `epoch`: what runs below it is dropped at once."""
        lane = self._lanes.get(key)
        if lane is not None and lane.turn is not None:
            lane.turn.fence(epoch)

    def evict(self, key: Key, epoch: int) -> bool:
        """Let go of the agent that is kept here for a session which went on to `epoch`; whether there was one."""
        lane, entry = self._lanes.get(key), self._room.entries.get(key)
        self.fence(key, epoch)
        if entry is None or entry.claim.epoch >= epoch:
            return False
        if lane is not None and lane.turn is not None and lane.turn.epoch >= epoch:
            # It has taken the entry, and its claim is on the way.
            return False
        self._room.entries.drop(entry)
        self._room.sandboxes.let_go(key, entry.claim)
        return True

    def evict_elsewhere(self, key: Key, epoch: int) -> None:
        """Have another replica that keeps the agent of a session let go of what it has below `epoch`, soon."""
        self._spawn(f"evict {key}", self._evict_elsewhere(key, epoch))

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
            lane.news.set()
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
            while seen != lane.woken:
                seen = lane.woken
                picked = await self._pick_up(key, lane)
                if picked is not None:
                    crashpoint("drive.picked_up")
                    await self._turn(key, lane, picked)
                if seen == lane.woken:
                    await self._room.parking.park_unused(key)
            await self._let_go(key)
        except Exception:
            logger.exception("driving failed", extra={"session": str(key)})
        finally:
            lane.turn = None
            if self._lanes.get(key) is lane:
                del self._lanes[key]
            if (picked := lane.picked) is not None:
                # Nothing is begun here any more; whoever comes after finds it waiting.
                self._spawn(f"give back {key}", self._give_back(key, picked))

    async def _let_go(self, key: Key) -> None:
        """Keep no agent in a process that begins nothing any more: somebody else has the session from now on."""
        entry = self._room.entries.get(key)
        if self.closed and entry is not None and entry.state is EntryState.IDLE:
            await self._room.entries.close(entry, sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE)

    async def _give_back(self, key: Key, picked: PickedUp) -> None:
        async def give_back() -> None:
            await self._store.give_back(picked.execution, self._holder)
            await self._store.clear_holder(key, self._holder)

        await until_it_lands(self._clock, key, "give back", give_back)

    async def _pick_up(self, key: Key, lane: _Lane) -> PickedUp | None:
        if lane.admitted_at is None:
            lane.admitted_at = self._clock.monotonic()
        if self.closed and lane.picked is not None:
            return None
        picked, lane.picked = lane.picked, None
        if picked is not None and lane.picked_at == lane.woken:
            return picked
        # Nothing was picked up, or more has happened since, and the rows know what.
        while True:
            lane.news.clear()
            standing = await until_it_lands(self._clock, key, "look", lambda: self._rows.standing(key))
            found = place(standing, self._holder)
            if found is not Place.OFFERED:
                lane.offered = None
            elif standing is not None and not await self._is_ours_by_now(key, lane, standing):
                self._outbox.wake(key)
                if self.closed:
                    return None
                await self._news(lane)
                continue
            return await self._step(key, lane, standing, found)

    async def _step(self, key: Key, lane: _Lane, standing: Standing | None, found: Place) -> PickedUp | None:
        """What is known to be next: pick it up, or tell those who have to do with it."""
        other = whom_to_tell(standing, self._holder)
        if found in {Place.HERE, Place.OFFERED}:
            picked = None
            if self.may_start:
                picked = await until_it_lands(
                    self._clock, key, "pick up", lambda: self._store.pick_up(key, self._holder)
                )
                if picked is not None and lane.picked is not None:
                    same = lane.picked.execution.execution_id == picked.execution.execution_id
                    # Whoever admitted it meanwhile handed over what was found here too.
                    lane.picked = None if same else lane.picked
            lane.told = self._outbox.told(key)
            return picked
        if found is Place.NOWHERE:
            self._outbox.wake(key)
        if other is not None and standing is not None:
            await self._nudge(other, key, standing, pool_pb2.NUDGE_REASON_COMMAND)
        return None

    async def _is_ours_by_now(self, key: Key, lane: _Lane, standing: Standing) -> bool:
        """Whether an execution whose session another replica holds is to be driven here all the same."""
        now = self._clock.monotonic()
        if lane.offered not in {_ANYTHING, standing.execution_id}:
            assert standing.holder is not None
            lane.offered, lane.taken_at = standing.execution_id, now + PICK_UP_SECONDS
            receipt = await self._nudge(standing.holder, key, standing, pool_pb2.NUDGE_REASON_EXECUTION)
            if not receipt.reached:
                lane.taken_at = now
        return self._clock.monotonic() >= lane.taken_at

    async def _news(self, lane: _Lane) -> None:
        """Wait until there is something new, or a holder has had time enough."""
        try:
            async with asyncio.timeout(max(0.0, lane.taken_at - self._clock.monotonic())):
                await lane.news.wait()
        except TimeoutError:
            return

    async def _evict_elsewhere(self, key: Key, epoch: int) -> None:
        holder = await until_it_lands(self._clock, key, "look", lambda: self._rows.holder(key))
        if holder is not None and holder != self._holder:
            assert self.runners is not None
            await self.runners.nudge(holder, key, epoch, pool_pb2.NUDGE_REASON_EVICT)

    async def _nudge(self, holder: str, key: Key, standing: Standing, reason: Reason) -> Receipt:
        assert self.runners is not None
        return await self.runners.nudge(holder, key, standing.epoch, reason)

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
