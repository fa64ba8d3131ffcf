"""Starts the pool service: settings → database, channels, the parts of the pool → servicers → serve.

Its health is that of Postgres alone. Without history, relay or sandbox service it still accepts inputs and Stops and
answers every question; what needs them waits in rows, so a backend must not be turned away for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from hearth.pool.v1 import pool_service_pb2_grpc, replica_service_pb2_grpc
from hearth.producer import Producer, ProducerLimits
from hearth.session.v1 import session_service_pb2_grpc
from services.chassis import crashpoints
from services.chassis.calls import open_channel
from services.chassis.errors import HearthError
from services.chassis.interceptors import shutting_down
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.server import App, run
from services.chassis.tls import client_tls
from services.pool import metrics
from services.pool.assembly import Parts, assemble
from services.pool.control import sweeps, upkeep
from services.pool.control.upkeep import Upkeep
from services.pool.credentials_store import Credentials
from services.pool.harness.acp import AcpClient
from services.pool.log import Log
from services.pool.operators import PoolService
from services.pool.replica_rows import ReplicaRows
from services.pool.replicas import ReplicaService
from services.pool.requests import Known
from services.pool.sealing import Sealer
from services.pool.service import SessionService
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, Store
from services.pool.turns import sandboxes
from services.pool.turns.sandboxes import Sandboxes
from services.pool.upkeep_rows import UpkeepRows
from services.pool.warnings import warnings

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "shutdown.turns_ended")

# Of the time that a process has to end: turns may finish, then they are ended; then what waits is told. The rest is
# for letting idle agents go.
_FINISH_PART = 0.27
_CANCEL_PART = 0.2
_FLUSH_PART = 0.27


@asynccontextmanager
async def build(app: App[PoolSettings]) -> AsyncIterator[None]:
    """Everything of one process of this service."""
    settings = app.settings
    crashpoints.announce(app.name)
    await migrate(settings.postgres_dsn, SCHEMA, "services.pool", start_timeout=settings.postgres_start_timeout)
    holder = app.ids.new()
    tls, name = client_tls(settings), settings.replica_name

    def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        return app.tasks.start(name, work, critical=False)

    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(await create_pool(settings, "pool", server_settings=PLANNER))
        history = await stack.enter_async_context(open_channel(settings.history_address, settings))
        relay = await stack.enter_async_context(open_channel(settings.relay_address, settings))
        sandbox = await stack.enter_async_context(open_channel(settings.sandbox_address, settings))
        limits = ProducerLimits(spill_dir=settings.spill_dir)
        producer = Producer(history=history, relay=relay, clock=app.clock, limits=limits, ids=app.ids.new)
        harness = AcpClient(clock=app.clock)
        stack.push_async_callback(harness.close)
        keys = settings.secret_keys
        parts = assemble(
            settings,
            store=Store(pool),
            rows=ReplicaRows(pool),
            credentials=Credentials(pool, Sealer(keys) if keys else None, app.clock),
            producer=producer,
            log=Log(history),
            sandboxes=Sandboxes(sandbox, holder, app.clock, spawn=spawn),
            harness=harness,
            clock=app.clock,
            ids=app.ids,
            holder=holder,
            address=app.address,
            connect=lambda address: open_channel(address, settings, retries=False, tls=tls, server_name=name),
            spawn=spawn,
        )
        await producer.start()
        stack.push_async_callback(producer.close, 0.0)
        stack.push_async_callback(parts.runners.close)
        stack.push_async_callback(app.tasks.stop)
        stack.push_async_callback(parts.replicas.leave)
        app.health.add("postgres", pool.ping)
        _serve(app, parts)
        _end_in_order(app, parts, producer)
        await parts.replicas.register()
        await parts.observer.replaced(parts.replicas.place, parts.replicas.address)
        spawn("seal anew", parts.credentials.seal_anew())
        app.tasks.repeat("sweeps", parts.sweeps.look, every=sweeps.EVERY, clock=app.clock)
        app.tasks.repeat("deletions", parts.sweeps.finish_deletions, every=sweeps.EVERY, clock=app.clock)
        rows = UpkeepRows(pool)
        metrics.watch(
            app.readings,
            entries=parts.entries,
            driving=lambda: len(parts.driver.driving),
            producer=lambda: producer.stats,
            rows=rows,
        )
        kept = Upkeep(rows, parts.commands, app.clock, retention=settings.settled_retention)
        app.tasks.repeat("upkeep", kept.look, every=upkeep.EVERY, clock=app.clock)
        app.tasks.repeat("retention", kept.retire, every=upkeep.RETIRE_EVERY, clock=app.clock)
        app.tasks.repeat("claims", parts.sandboxes.renew, every=sandboxes.RENEW_EVERY, clock=app.clock)
        app.tasks.start("beats", parts.replicas.keep_beating())
        app.tasks.repeat("observer", parts.observer.look, every=settings.replica_look_every, clock=app.clock)
        yield


def _serve(app: App[PoolSettings], parts: Parts) -> None:
    def closed() -> HearthError | None:
        return shutting_down() if app.draining.is_set() or parts.replicas.draining else None

    session_service_pb2_grpc.add_SessionServiceServicer_to_server(
        SessionService(
            store=parts.store,
            inputs=parts.inputs,
            commands=parts.commands,
            interactions=parts.interactions,
            credentials=parts.credentials,
            removal=parts.removal,
            clock=app.clock,
            known=Known(app.settings.agent_names, frozenset(app.settings.providers)),
            closed=closed,
        ),
        app.server,
    )
    pool_service_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(
            store=parts.store,
            entries=parts.entries,
            driver=parts.driver,
            replicas=parts.replicas,
            metrics=parts.metrics,
            warnings=warnings(app.settings),
        ),
        app.server,
    )
    replica_service_pb2_grpc.add_ReplicaServiceServicer_to_server(
        ReplicaService(parts.replicas.holder, nudged=parts.driver.nudged), app.server
    )


def _end_in_order(app: App[PoolSettings], parts: Parts, producer: Producer) -> None:
    grace = app.settings.shutdown_grace

    async def finish() -> None:
        parts.replicas.draining = True
        parts.driver.close()
        if not await parts.driver.idle(grace * _FINISH_PART):
            parts.driver.cancel_turns()
            await parts.driver.idle(grace * _CANCEL_PART)
        crashpoint("shutdown.turns_ended")

    async def flush() -> None:
        await producer.close(grace * _FLUSH_PART)

    async def release() -> None:
        await parts.entries.close_all()

    app.on_drain("finish turns", finish, order=0)
    app.on_drain("tell what waits", flush, order=1)
    app.on_drain("let agents go", release, order=2)


def main() -> None:
    """Run until told to end."""
    run(PoolSettings, "pool", build)


if __name__ == "__main__":
    main()
