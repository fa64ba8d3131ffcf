"""Run the sample: `python -m tests.support.sample`.

It serves a few RPCs of the history contract, so that no proto of its own is needed:
GetHeads visits the database, the bus, a web page and the next sample, the last two if there are any; StreamEvents
sends one message and stays open;
GetSnapshot sleeps in the database for `page_size` seconds; TrimLog makes a critical task die.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from pydantic import Field
from redis.asyncio import Redis

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis import postgres, telemetry, valkey
from services.chassis.auth import current_caller, require_project
from services.chassis.calls import open_channel
from services.chassis.interceptors import Context
from services.chassis.migrations import migrate
from services.chassis.server import App, run
from services.chassis.settings import PostgresSettings, ValkeySettings

logger = logging.getLogger(__name__)

PACKAGE = "tests.support.sample"
QUERIES = postgres.Queries.load(PACKAGE)


class Settings(PostgresSettings, ValkeySettings):
    """`next` is the address of another sample; `drain` is what its drain hook takes, in seconds; `page` is a URL."""

    next: str = ""
    page: str = ""
    drain: float = Field(default=0.0, ge=0)


class Sample(history_service_pb2_grpc.HistoryServiceServicer):
    def __init__(
        self,
        app: App[Settings],
        pool: postgres.Pool,
        bus: Redis,
        following: history_service_pb2_grpc.HistoryServiceAsyncStub | None,
    ) -> None:
        self._app = app
        self._pool = pool
        self._bus = bus
        self._next = following

    async def GetHeads(
        self, request: history_service_pb2.GetHeadsRequest, context: Context
    ) -> history_service_pb2.GetHeadsResponse:
        for key in request.sessions:
            require_project(key.project)
        async with self._pool.acquire() as connection:
            total = await connection.fetchval(QUERIES.visited, current_caller().name)
        await self._bus.set("visits", f"secret {total}")
        if self._app.settings.page:
            async with aiohttp.ClientSession() as session, session.get(self._app.settings.page) as answer:
                await answer.read()
        logger.info("visited", extra={"total": total})
        if self._next is not None:
            return await self._next.GetHeads(request)
        return history_service_pb2.GetHeadsResponse(heads=[history_pb2.Head(head=session_pb2.Cursor(sequence=total))])

    async def StreamEvents(
        self, request: history_service_pb2.StreamEventsRequest, context: Context
    ) -> AsyncIterator[history_service_pb2.StreamEventsResponse]:
        if request.session.session == "defect":
            raise RuntimeError("the stream broke")
        try:
            yield history_service_pb2.StreamEventsResponse()
            await asyncio.Event().wait()
        finally:
            logger.info("stream closed")

    async def GetSnapshot(
        self, request: history_service_pb2.GetSnapshotRequest, context: Context
    ) -> history_service_pb2.GetSnapshotResponse:
        if self._next is not None:
            return await self._next.GetSnapshot(request, timeout=30)
        async with self._pool.acquire() as connection:
            logger.info("sleeping")
            await connection.execute(QUERIES.sleep, request.page_size)
        return history_service_pb2.GetSnapshotResponse()

    async def MarkIncomplete(
        self, request: history_service_pb2.MarkIncompleteRequest, context: Context
    ) -> history_service_pb2.MarkIncompleteResponse:
        raise RuntimeError("the call broke")

    async def TrimLog(
        self, request: history_service_pb2.TrimLogRequest, context: Context
    ) -> history_service_pb2.TrimLogResponse:
        self._app.tasks.start("doomed", _die())
        return history_service_pb2.TrimLogResponse()


async def _die() -> None:
    raise RuntimeError("the loop broke")


@asynccontextmanager
async def build(app: App[Settings]) -> AsyncIterator[None]:
    settings = app.settings
    await migrate(settings.postgres_dsn, "sample", PACKAGE, start_timeout=settings.postgres_start_timeout)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(await postgres.create_pool(settings, app.name))
        bus = await stack.enter_async_context(await valkey.create_client(settings))
        following: Any = None
        if settings.next:
            channel = await stack.enter_async_context(open_channel(settings.next, settings))
            following = history_service_pb2_grpc.HistoryServiceStub(channel)
        app.health.add("postgres", pool.ping)
        app.health.add("valkey", lambda: valkey.ping(bus))
        history_service_pb2_grpc.add_HistoryServiceServicer_to_server(
            Sample(app, pool, bus, following),  # type: ignore[abstract]
            app.server,
        )

        async def poll() -> None:
            async with pool.acquire() as connection:
                await connection.fetchval("SELECT 1")
            with telemetry.span("sweep"):
                await pool.ping()

        async def drain() -> None:
            logger.info("draining")
            await app.clock.sleep(settings.drain)

        app.tasks.repeat("poll", poll, every=0.2)
        app.on_drain("sleep", drain)
        yield


if __name__ == "__main__":
    run(Settings, "sample", build)
