"""Starts the sandbox service: settings → database, providers → servicer → serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from hearth.sandbox.v1 import sandbox_service_pb2_grpc
from services.chassis import crashpoints, http_client
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.server import App, run
from services.sandbox import metrics, usage
from services.sandbox.assembly import assemble
from services.sandbox.providers import switched_on
from services.sandbox.settings import SandboxSettings

# Idle connections to daemons are kept for as long as a sandbox is likely to stay parked.
_KEEPALIVE_SECONDS = 300.0


@asynccontextmanager
async def build(app: App[SandboxSettings]) -> AsyncIterator[None]:
    """Everything of one process of this service."""
    settings = app.settings
    crashpoints.announce(app.name)
    await migrate(settings.postgres_dsn, "sandbox", "services.sandbox", start_timeout=settings.postgres_start_timeout)
    pool = await create_pool(settings, "sandbox")
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    async with pool, http_client.new_session(connector=connector) as session:
        providers = await switched_on.connect(settings, app.clock, app.ids)
        parts = await assemble(
            settings,
            pool=pool,
            providers=providers,
            session=session,
            tasks=app.tasks,
            clock=app.clock,
            ids=app.ids,
        )
        sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(parts.servicer, app.server)
        usage.log_tiers(settings.tiers())
        metrics.watch(app.readings, parts.store, settings.tiers())
        app.health.add("postgres", pool.ping)
        app.on_drain("work on sandboxes", parts.works.drain)
        reconciler = parts.reconciler
        app.tasks.repeat("leases", reconciler.read_leases, every=settings.lease_read_interval, clock=app.clock)
        app.tasks.repeat("workers", parts.workers.look, every=settings.worker_gone / 2, clock=app.clock)
        app.tasks.repeat("reconcile", reconciler.turn, every=settings.reconcile_interval, clock=app.clock)
        try:
            yield
        finally:
            await app.tasks.stop()
            for provider in providers.values():
                await provider.close()


if __name__ == "__main__":
    run(SandboxSettings, "sandbox", build)
