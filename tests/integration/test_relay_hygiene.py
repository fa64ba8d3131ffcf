"""Subscribers come and go, in every phase, and leave nothing: no task, no channel, no connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import psutil
import pytest
import redis.asyncio

from hearth.relay.v1 import relay_service_pb2, relay_service_pb2_grpc
from hearth.secret import Secret
from services.chassis.server import App, started
from services.relay.__main__ import build
from services.relay.bus import Bus
from services.relay.settings import RelaySettings
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_turns import Turn, append
from tests.support.servers import Servers
from tests.support.waiting import eventually

SUBSCRIBERS = 200
SESSIONS = 20


@asynccontextmanager
async def relay_in_this_process(
    servers: Servers, migrated_dsn: str, valkey_url: str
) -> AsyncIterator[tuple[App[RelaySettings], grpc.aio.Channel]]:
    """A relay whose tasks can be counted, and a channel to its history."""
    history = ServiceProcess(
        "services.history",
        servers.scratch(),
        {"HEARTH_POSTGRES_DSN": migrated_dsn, "HEARTH_VALKEY_URL": valkey_url},
    )
    await history.start()
    try:
        settings = RelaySettings(valkey_url=Secret(valkey_url), history_address=history.address, valkey_pool_size=4)
        async with grpc.aio.insecure_channel(history.address) as channel, started(settings, "relay", build) as app:
            yield app, channel
    finally:
        await history.terminate()


async def subscribe(channel: grpc.aio.Channel, request: relay_service_pb2.SubscribeRequest, seconds: float) -> None:
    """Read for a while, then go away in the middle of whatever happens."""
    call = relay_service_pb2_grpc.RelayServiceStub(channel).Subscribe(request)

    async def read() -> None:
        async for _ in call:
            pass

    task = asyncio.create_task(read())
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.wait([task])
    call.cancel()


def relay_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("relay", "bus")))


async def test_two_hundred_subscribers_come_and_go(servers: Servers, migrated_dsn: str, valkey_url: str) -> None:
    async with (
        relay_in_this_process(servers, migrated_dsn, valkey_url) as (app, history),
        redis.asyncio.Redis.from_url(valkey_url) as valkey,
    ):
        relay = grpc.aio.insecure_channel(app.address)
        turns = [Turn(history, relay, events.key()) for _ in range(SESSIONS)]
        for turn in turns:
            await turn.start()
            await turn.say("m", "some", " text")
            # Long enough that a subscriber may go away inside of its replay.
            await append(history, turn.session, *(events.custom(10_000) for _ in range(300)))

        async def come_and_go(number: int) -> None:
            session = turns[number % SESSIONS].session if number % 10 else events.key()
            request = relay_service_pb2.SubscribeRequest(session=session, events_only=number % 3 == 0)
            if number % 7 == 0:
                request.tail = True
            await asyncio.sleep(random.random())
            await subscribe(relay, request, random.choice([0.0, 0.002, 0.02, 0.3, 0.8]))

        async def wave() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(SUBSCRIBERS):
                    group.create_task(come_and_go(number))
                for _ in range(5):
                    for turn in turns:
                        await turn.say("m", " more")
                        await turn.append(turn.covering(turn.run.tool()))
            # The streams are cancelled; the relay learns of the last of them a little later.
            async with asyncio.timeout(10):
                while await valkey.pubsub_channels("hearth:live:test/*"):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.05)

        # The first wave opens what is kept open, within the size of the pools.
        await wave()
        before = await held(valkey)
        await wave()
        await eventually(lambda: relay_tasks() == ["relay heads", "relay look"])
        assert await held(valkey) == before
        await relay.close()


async def held(valkey: redis.asyncio.Redis) -> tuple[int, int]:
    """Connections that Valkey has, and that this process has."""
    return len(await valkey.client_list()), len(psutil.Process().net_connections())


@pytest.mark.parametrize("steps", range(6))
async def test_who_goes_away_while_its_channel_is_asked_for_leaves_no_subscription(valkey_url: str, steps: int) -> None:
    async with redis.asyncio.Redis.from_url(valkey_url) as valkey:
        bus = Bus(Secret(valkey_url))
        await bus.start()
        name = f"hearth:live:test/{events.new_id()}".encode()

        def handler(_data: bytes) -> None:
            raise AssertionError("nothing is published")

        listening = asyncio.create_task(bus.listen(name, handler))
        for _ in range(steps):
            await asyncio.sleep(0)
        bus.ignore(name, handler)
        listening.cancel()
        await asyncio.wait([listening])
        # On the same connection, so that everything sent before has arrived.
        await bus.listen(b"hearth:live:test/last", handler)
        assert await valkey.pubsub_channels(name) == []
        assert bus.channels == 1
        await bus.close()
