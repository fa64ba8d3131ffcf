"""The parts of the pool, put together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc.aio

from hearth.producer import Producer
from hearth.sandbox.v1 import sandbox_pb2
from services.chassis.clock import Clock, Ids
from services.pool.control.commands import Commands
from services.pool.control.inputs import Inputs
from services.pool.control.interactions import Interactions
from services.pool.control.outbox import Outbox
from services.pool.control.settlement import Settlement
from services.pool.control.starts import Starts
from services.pool.control.sweeps import Sweeps
from services.pool.control.takeovers import Takeovers
from services.pool.credentials_store import Credentials
from services.pool.harness.port import HarnessClient
from services.pool.log import Log
from services.pool.metrics import Metrics
from services.pool.removal import Removal
from services.pool.replica_rows import ReplicaRows
from services.pool.replicas import Observer, Replicas
from services.pool.rows import Execution, Key, OutboxRow
from services.pool.runners import Runners
from services.pool.settings import PoolSettings
from services.pool.store import PickedUp, Store
from services.pool.trust import Trust
from services.pool.turns.driver import Driver
from services.pool.turns.parking import Parking, close_agent
from services.pool.turns.recovery import Recovery
from services.pool.turns.room import TurnRoom
from services.pool.turns.sandboxes import Sandboxes
from services.pool.warm.entries import Entries, Entry


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What the servicers and the loops of the process work with."""

    store: Store
    inputs: Inputs
    commands: Commands
    interactions: Interactions
    credentials: Credentials
    removal: Removal
    entries: Entries
    driver: Driver
    replicas: Replicas
    observer: Observer
    runners: Runners
    sandboxes: Sandboxes
    sweeps: Sweeps
    metrics: Metrics


class _Driven:
    """What this replica drives: its turns, and the Stops that it finishes for a dead one."""

    def __init__(self, driver: Driver, recovery: Recovery) -> None:
        self._driver = driver
        self._recovery = recovery

    @property
    def driving(self) -> Sequence[Key]:
        """The sessions."""
        return [*self._driver.driving, *self._recovery.finishing.values()]

    def drives(self, key: Key, execution_id: str) -> bool:
        """Whether this very execution is."""
        return execution_id in self._recovery.finishing or self._driver.drives(key, execution_id)


class _Bell:
    """Wakes the driver, which is made last and of parts that want to wake it."""

    driver: Driver | None = None

    def __call__(
        self,
        key: Key,
        *,
        admitted_at: float | None = None,
        picked: PickedUp | None = None,
        facts: Sequence[OutboxRow] = (),
    ) -> None:
        assert self.driver is not None
        self.driver.wake(key, admitted_at=admitted_at, picked=picked, facts=facts)


def assemble(
    settings: PoolSettings,
    *,
    store: Store,
    rows: ReplicaRows,
    credentials: Credentials,
    producer: Producer,
    log: Log,
    sandboxes: Sandboxes,
    harness: HarnessClient,
    clock: Clock,
    ids: Ids,
    holder: str,
    address: str,
    connect: Callable[[str], grpc.aio.Channel],
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]],
) -> Parts:
    """Make the parts; nothing runs yet. `connect` opens the way to another replica at its address."""
    bell, metrics = _Bell(), Metrics()
    starts = Starts(clock, ids, settings.default_agent)
    settlement = Settlement(store, starts, log, clock, changed=bell, metrics=metrics)
    interactions = Interactions(store, starts, clock, expiry=settings.interaction_expiry, changed=bell)
    outbox = Outbox(store, producer, clock, settle=settlement.settle, spawn=spawn)

    async def close(entry: Entry, reason: sandbox_pb2.ReleaseReason.ValueType) -> None:
        await close_agent(sandboxes, entry, reason)

    async def forget(key: Key) -> None:
        await store.clear_holder(key, holder)

    entries = Entries(
        clock,
        ids,
        seats=settings.pool_entries,
        close=close,
        gone=lambda key: spawn(f"forget {key}", forget(key)),
        spawn=spawn,
    )
    recovery = Recovery(
        Takeovers(store, clock, changed=bell, holder=holder, metrics=metrics), sandboxes, clock, spawn=spawn
    )
    trust = Trust(store, clock, holder, limit=settings.trusted_for)
    room = TurnRoom(
        store=store,
        outbox=outbox,
        settlement=settlement,
        sandboxes=sandboxes,
        credentials=credentials,
        entries=entries,
        harness=harness,
        producer=producer,
        log=log,
        clock=clock,
        ids=ids,
        holder=holder,
        settings=settings,
        metrics=metrics,
        recovery=recovery,
        trust=trust,
        interactions=interactions,
        parking=Parking(entries, sandboxes, settings, metrics, clock),
    )
    driver = bell.driver = Driver(room, rows=rows, spawn=spawn)
    runners = driver.runners = Runners(holder, here=driver.nudged, address=rows.address, connect=connect)
    driven = _Driven(driver, recovery)
    observer = Observer(rows, store, recovery, clock, holder=holder, limits=settings.beats, spawn=spawn)
    commands = Commands(store, clock, ids, changed=bell, metrics=metrics)
    removal = Removal(
        store=store,
        commands=commands,
        outbox=outbox,
        sandboxes=sandboxes,
        log=log,
        driver=driver,
        clock=clock,
        changed=bell,
    )
    replicas = Replicas(
        rows,
        trust,
        clock,
        holder,
        settings.reached_at(address),
        every=settings.replica_beat_every,
        every_failing=settings.replica_beat_failing,
        trusted_for=settings.trusted_for,
        driving=lambda: driven.driving,
        entries=lambda: len(entries),
        reread=driver.reread,
    )

    async def take_over(execution: Execution) -> None:
        await recovery.take_over(execution, why="its turn ended without an ending", defect=True)

    inputs = Inputs(
        store,
        starts,
        clock,
        ids,
        queue_cap=settings.queue_cap,
        changed=bell,
        settle_ended=settlement.settle_ended,
        driver=lambda: holder if driver.may_start else None,
    )
    return Parts(
        store=store,
        inputs=inputs,
        commands=commands,
        interactions=interactions,
        credentials=credentials,
        removal=removal,
        entries=entries,
        driver=driver,
        replicas=replicas,
        observer=observer,
        runners=runners,
        sandboxes=sandboxes,
        sweeps=Sweeps(
            store,
            rows,
            outbox,
            driven,
            holder,
            wake=bell,
            take=driver.take,
            first=lambda: observer.first,
            take_over=take_over,
            purge=removal.purge,
            expire=interactions.expire,
        ),
        metrics=metrics,
    )
