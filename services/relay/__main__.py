"""The relay as a process: `python -m services.relay`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.chassis import valkey
from services.chassis.calls import open_channel
from services.chassis.errors import dependency_unavailable
from services.chassis.pubsub import PubSubError
from services.chassis.server import App, run
from services.chassis.settings import StartupError
from services.relay.buffer import Buffer
from services.relay.bus import Bus
from services.relay.hubs import Hubs
from services.relay.ingress import Ingress
from services.relay.log import Log
from services.relay.metrics import Metrics, watch
from services.relay.service import RelayService
from services.relay.settings import RelaySettings
from services.relay.surroundings import Surroundings


@asynccontextmanager
async def build(app: App[RelaySettings]) -> AsyncIterator[None]:
    """Make the parts, serve, and take them down again."""
    settings = app.settings
    client = await valkey.create_client(settings)
    history = open_channel(settings.history_address, settings)
    surroundings = Surroundings()
    bus = Bus(settings.valkey_url)
    log = Log(history, timeout=settings.relay_history_timeout)
    metrics = Metrics()
    hubs = Hubs(
        log=log,
        bus=bus,
        buffer=Buffer(client),
        surroundings=surroundings,
        metrics=metrics,
        tasks=app.tasks,
        clock=app.clock,
        settings=settings,
    )
    ingress = Ingress(client, log, settings)
    try:
        try:
            await ingress.start()
            await bus.start()
        except (OSError, PubSubError) as error:
            raise StartupError(f"Valkey at HEARTH_VALKEY_URL: {error}") from error
        watch(app.readings, readers=lambda: hubs.readers, sessions=lambda: hubs.sessions, surroundings=surroundings)
        service = RelayService(
            hubs=hubs,
            ingress=ingress,
            log=log,
            surroundings=surroundings,
            metrics=metrics,
            clock=app.clock,
            settings=settings,
        )
        service.add_to(app.server)
        probe = health_pb2_grpc.HealthStub(history)

        async def history_serves() -> None:
            answer = await probe.Check(health_pb2.HealthCheckRequest())
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise dependency_unavailable("history")

        # Without Valkey events still reach readers, without history frames do, and readers that are here keep their
        # streams: clients that go around the relays which serve must find one.
        app.health.add("valkey", lambda: valkey.ping(client), needed=False)
        app.health.add("history", history_serves, needed=False)
        app.on_drain("end readers", hubs.drain)
        hubs.start()
        yield
    finally:
        hubs.close()
        await bus.close()
        await history.close()
        await client.aclose()


if __name__ == "__main__":
    run(RelaySettings, "relay", build)
