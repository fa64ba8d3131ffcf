"""Starts the sandbox service: settings → store, providers → servicer → serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from hearth.sandbox.v1 import sandbox_service_pb2_grpc
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.server import App, run
from services.sandbox import usage
from services.sandbox.acquire import Acquirer
from services.sandbox.daemons import Daemons
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import Provider
from services.sandbox.reconciler import Reconciler
from services.sandbox.release import Releaser
from services.sandbox.service import SandboxServicer
from services.sandbox.settings import SandboxSettings
from services.sandbox.slots import Slots
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

# Idle connections to daemons are kept for as long as a parked sandbox may live.
_KEEPALIVE_SECONDS = 300.0


@asynccontextmanager
async def build(app: App[SandboxSettings]) -> AsyncIterator[None]:
    """Everything of one process of this service."""
    settings = app.settings
    await migrate(settings.postgres_dsn, "sandbox", "services.sandbox", start_timeout=settings.postgres_start_timeout)
    pool = await create_pool(settings, "sandbox")
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    async with pool, aiohttp.ClientSession(connector=connector) as session:
        store = Store(pool, worker=app.ids.new())
        deployment_id = await store.deployment_id()
        providers: dict[str, Provider] = {
            "local": LocalProvider(settings.local_root, app.clock, inherit=settings.local_inherit),
        }
        tiers = settings.tiers()
        works = Works(app.tasks)
        transitions = Transitions(store, providers, app.clock, settings.deadlines())
        slots = Slots(store, transitions, tiers)
        releaser = Releaser(
            store=store, providers=providers, transitions=transitions, slots=slots, works=works, tiers=tiers
        )
        acquirer = Acquirer(
            store=store,
            providers=providers,
            transitions=transitions,
            daemons=Daemons(session, app.clock, timeout=settings.probe_timeout),
            works=works,
            agents=settings.agent_commands(),
            deployment_id=deployment_id,
            clock=app.clock,
            ids=app.ids,
        )
        reconciler = Reconciler(
            store=store,
            providers=providers,
            transitions=transitions,
            releaser=releaser,
            works=works,
            deployment_id=deployment_id,
            clock=app.clock,
            lease=settings.lease_limits(),
            limits=settings.drift_limits(),
            keep_gone=settings.keep_gone_rows,
        )
        servicer = SandboxServicer(
            store=store,
            providers=providers,
            default_provider=settings.default_provider,
            agents=settings.agent_commands(),
            tiers=tiers,
            acquirer=acquirer,
            releaser=releaser,
            reconciler=reconciler,
            transitions=transitions,
            works=works,
            activity_refresh=settings.activity_refresh,
        )
        sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(servicer, app.server)
        await slots.prepare()
        usage.log_tiers(tiers)
        app.health.add("postgres", pool.ping)
        app.on_drain("work on sandboxes", works.drain)
        app.tasks.repeat("leases", reconciler.read_leases, every=settings.lease_read_interval, clock=app.clock)
        app.tasks.repeat("reconcile", reconciler.turn, every=settings.reconcile_interval, clock=app.clock)
        try:
            yield
        finally:
            await app.tasks.stop()
            for provider in providers.values():
                await provider.close()


if __name__ == "__main__":
    run(SandboxSettings, "sandbox", build)
