"""The history process: settings, database, bus, servicer, serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.server import App, run
from services.history import metrics
from services.history.committer import Committer
from services.history.notices import Publisher
from services.history.reader import Reader
from services.history.retention import Retention
from services.history.service import HistoryServicer, register
from services.history.settings import HistorySettings
from services.history.store import PLANNER, SCHEMA, Store


@asynccontextmanager
async def build(app: App[HistorySettings]) -> AsyncIterator[None]:
    """Put the service together. Valkey is no part of its health: without it readers are only a little slower."""
    settings = app.settings
    await migrate(settings.postgres_dsn, SCHEMA, "services.history", start_timeout=settings.postgres_start_timeout)
    readers = await create_pool(settings, "history", server_settings=PLANNER)
    writers = await create_pool(settings, "history-writer", size=settings.history_lanes, server_settings=PLANNER)
    async with readers, writers:
        app.health.add("postgres", readers.ping)
        publisher = Publisher(settings)
        app.tasks.start("notices", publisher.run())
        committer = Committer(writers, publisher, app.ids, settings.limits, metrics.Metrics())
        metrics.watch(app.readings, queue=lambda: committer.waiting, publisher=publisher)
        for number, lane in enumerate(committer.lanes):
            app.tasks.start(f"lane-{number}", lane.run())
        store = Store(readers)
        retention = Retention(store, app.clock)
        app.tasks.start("retention", retention.sweep())
        if settings.retention is not None:
            app.tasks.start("expiry", retention.expire(settings.retention))
        app.on_drain("commit what waits", committer.close)
        register(HistoryServicer(committer, store, Reader(store), retention), app.server)
        yield


def main() -> None:
    """Run until told to end."""
    run(HistorySettings, "history", build)


if __name__ == "__main__":
    main()
