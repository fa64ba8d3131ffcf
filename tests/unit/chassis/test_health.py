"""Health as it is asked and watched: true for everybody, whatever one watcher does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2

from services.chassis import health as module
from services.chassis.errors import InvalidArgument
from services.chassis.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Aborted(Exception):
    """What the context of gRPC raises."""


class Caller:
    """The context of a call; `told` is what it was told. A stalled one takes nothing, for ever."""

    def __init__(self, *, stalled: bool = False) -> None:
        self.told: list[int] = []
        self._stalled = stalled
        self._news = asyncio.Event()

    async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
        if self._stalled:
            self._news.set()
            await asyncio.Event().wait()
        self.told.append(answer.status)
        self._news.set()

    async def until(self, *statuses: int) -> None:
        """Return when it was told exactly these."""
        while self.told != [*statuses]:
            await self.news()

    async def news(self) -> None:
        """Return when something is written."""
        self._news.clear()
        async with asyncio.timeout(5):
            await self._news.wait()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code)

    def set_trailing_metadata(self, _: object) -> None:
        pass


class Part:
    """Something that is depended on."""

    def __init__(self) -> None:
        self.up = True

    async def check(self) -> None:
        if not self.up:
            raise ConnectionError("down")


@contextmanager
def watching(health: Health, name: str, caller: Caller) -> Iterator[None]:
    context: Any = caller
    task = asyncio.create_task(health.servicer.Watch(health_pb2.HealthCheckRequest(service=name), context))
    try:
        yield
    finally:
        task.cancel()


async def asked(health: Health, name: str) -> int:
    context: Any = Caller()
    return int((await health.servicer.Check(health_pb2.HealthCheckRequest(service=name), context)).status)


async def begun() -> tuple[Health, Part]:
    """A health with one dependency, of a process with one service."""
    health, part = Health(), Part()
    health.add("postgres", part.check)
    await health.begin(["x.Y"])
    return health, part


async def test_a_watcher_that_takes_nothing_holds_up_nobody() -> None:
    health, part = await begun()
    stalled, other = Caller(stalled=True), Caller()
    with watching(health, "", stalled):
        await stalled.news()
        with watching(health, "", other):
            await other.until(SERVING)
            part.up = False
            await health.check_once()
            assert await asked(health, "") == await asked(health, "postgres") == NOT_SERVING
            await other.until(SERVING, NOT_SERVING)
            part.up = True
            await health.check_once()
            await other.until(SERVING, NOT_SERVING, SERVING)
            health.drain()
            assert {await asked(health, name) for name in ("", "x.Y", "postgres")} == {NOT_SERVING}
            await other.until(SERVING, NOT_SERVING, SERVING, NOT_SERVING)


async def test_nothing_serves_after_the_shutdown_began() -> None:
    health, _ = await begun()
    health.drain()
    await health.check_once()
    assert {await asked(health, name) for name in ("", "x.Y", "postgres")} == {NOT_SERVING}


async def test_watchers_are_told_changes_and_nothing_else() -> None:
    health, part = await begun()
    caller = Caller()
    with watching(health, "x.Y", caller):
        await caller.until(SERVING)
        for up in (True, True, False, False, True):
            part.up = up
            await health.check_once()
            await asyncio.sleep(0)
        await caller.until(SERVING, NOT_SERVING, SERVING)


async def test_a_part_that_only_limits_counts_until_it_has_answered_once() -> None:
    health, part = Health(), Part()
    part.up = False
    health.add("valkey", part.check, needed=False)
    await health.begin([])
    assert await asked(health, "") == NOT_SERVING
    told = []
    for part.up in (True, False, True):
        await health.check_once()
        assert await asked(health, "") == SERVING
        told.append(await asked(health, "valkey"))
        assert health.answering == {"valkey": part.up}
    assert told == [SERVING, NOT_SERVING, SERVING]


async def test_an_unknown_name_is_watched_and_not_kept() -> None:
    health, _ = await begun()
    caller = Caller()
    with watching(health, "nothing", caller):
        await caller.until(UNKNOWN)
        health.drain()
    with pytest.raises(Aborted, match="NOT_FOUND"):
        await asked(health, "nothing")


async def test_a_long_name_is_refused() -> None:
    health, _ = await begun()
    context: Any = Caller()
    with pytest.raises(InvalidArgument):
        await health.servicer.Watch(health_pb2.HealthCheckRequest(service="ä" * 65), context)


async def test_watchers_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WATCHERS", 2)
    health, _ = await begun()
    first, second, third = Caller(), Caller(), Caller()
    context: Any = third
    with watching(health, "", first):
        with watching(health, "", second):
            await first.until(SERVING)
            await second.until(SERVING)
            with pytest.raises(Aborted, match="UNIMPLEMENTED"):
                await health.servicer.Watch(health_pb2.HealthCheckRequest(), context)
        # One that ends leaves its place to another.
        await asyncio.sleep(0)
        with watching(health, "", third):
            await third.until(SERVING)
