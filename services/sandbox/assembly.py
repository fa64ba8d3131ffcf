"""The parts of the service put together, over whatever clock, database and providers they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from services.chassis.clock import Clock, Ids
from services.chassis.postgres import Pool
from services.chassis.tasks import Tasks
from services.sandbox.acquire import Acquirer
from services.sandbox.daemons import Daemons
from services.sandbox.metrics import Metrics
from services.sandbox.providers.port import Provider
from services.sandbox.reconciler import Reconciler
from services.sandbox.release import Releaser
from services.sandbox.service import SandboxServicer
from services.sandbox.settings import SandboxSettings
from services.sandbox.slots import Slots
from services.sandbox.starting import Starter
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions
from services.sandbox.warnings import warnings
from services.sandbox.workers import Workers
from services.sandbox.works import Works

# Of a lease: how often a claim is renewed for a caller that waits. A holder's own renewals come as often.
_SHARE_OF_LEASE = 1 / 6


@dataclass(frozen=True, slots=True)
class Parts:
    """One process's parts; `works` is what goes on behind the calls."""

    store: Store
    slots: Slots
    works: Works
    acquirer: Acquirer
    releaser: Releaser
    reconciler: Reconciler
    workers: Workers
    servicer: SandboxServicer


async def assemble(
    settings: SandboxSettings,
    *,
    pool: Pool,
    providers: Mapping[str, Provider],
    session: aiohttp.ClientSession,
    tasks: Tasks,
    clock: Clock,
    ids: Ids,
) -> Parts:
    """Everything between the gRPC server and the adapters; makes the warm slots that the settings ask for."""
    store = Store(pool, worker=ids.new())
    deployment_id = await store.deployment_id()
    tiers = settings.tiers()
    agents = settings.agent_commands()
    works = Works(tasks)
    metrics = Metrics()
    transitions = Transitions(store, providers, clock, settings.deadlines(), metrics=metrics)
    slots = Slots(store, transitions, tiers)
    await slots.prepare()
    workers = Workers(store, settings.postgres_dsn, clock, gone_after=settings.worker_gone)
    await workers.start(tasks)
    daemons = Daemons(session, clock, timeout=settings.probe_timeout)
    starter = Starter(
        store=store,
        transitions=transitions,
        daemons=daemons,
        agents=agents,
        deployment_id=deployment_id,
        ids=ids,
    )
    releaser = Releaser(
        store=store,
        providers=providers,
        transitions=transitions,
        slots=slots,
        works=works,
        tiers=tiers,
        metrics=metrics,
    )
    acquirer = Acquirer(
        store=store,
        providers=providers,
        transitions=transitions,
        starter=starter,
        daemons=daemons,
        works=works,
        agents=agents,
        clock=clock,
        metrics=metrics,
        renew_every=settings.lease * _SHARE_OF_LEASE,
    )
    reconciler = Reconciler(
        store=store,
        providers=providers,
        transitions=transitions,
        releaser=releaser,
        slots=slots,
        works=works,
        deployment_id=deployment_id,
        clock=clock,
        ids=ids,
        lease=settings.lease_limits(),
        limits=settings.drift_limits(),
        keep_gone=settings.keep_gone_rows,
        metrics=metrics,
    )
    servicer = SandboxServicer(
        store=store,
        providers=providers,
        default_provider=settings.default_provider,
        agents=agents,
        tiers=tiers,
        acquirer=acquirer,
        releaser=releaser,
        reconciler=reconciler,
        transitions=transitions,
        works=works,
        activity_refresh=settings.activity_refresh,
        warnings=warnings(settings),
    )
    return Parts(store, slots, works, acquirer, releaser, reconciler, workers, servicer)
