"""Clients that go around the relays which serve, while Valkey or history is away: they find one and get what it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hearth.channel import open_channel
from hearth.relay.v1 import relay_pb2
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import Turn, publish
from tests.support.servers import Servers

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(servers, module_postgres_dsn, relays=2) as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        for relay in processes.relays:
            for name in ("valkey", "history", ""):
                await until_health(processes.channel(relay), name, SERVING)
        yield processes


async def until_health(channel: grpc.aio.Channel, name: str, wanted: int) -> None:
    """Return when the health of `name` is `wanted`."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    async with asyncio.timeout(20):
        async for answer in watch:
            if answer.status == wanted:
                break
    watch.cancel()


def balanced(stack: RelayStack) -> grpc.aio.Channel:
    """A channel that goes around the relays."""
    return open_channel(",".join(relay.address for relay in stack.relays))


async def test_events_reach_balanced_readers_without_valkey(stack: RelayStack) -> None:
    async with balanced(stack) as before:
        turn = Turn(stack.channel(stack.history), before, events.key())
        await turn.start()
        await turn.say("m", "a")
        await stack.stop_valkey()
        for relay in stack.relays:
            await until_health(stack.channel(relay), "valkey", NOT_SERVING)
        # One that knows of the health since before, and one that begins with it.
        async with balanced(stack) as after:
            for channel in (before, after):
                async with reading(channel, turn.session) as reader:
                    await reader.until_sequence(1, timeout=10)
                    await reader.until_sequence(await turn.complete("m"), timeout=10)
            (result,) = await publish(after, turn.batch(turn.frames("n", "b")))
            assert result.outcome == relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE
            await stack.start_valkey()
            for relay in stack.relays:
                await until_health(stack.channel(relay), "valkey", SERVING)


async def test_frames_reach_balanced_readers_without_history(stack: RelayStack) -> None:
    async with balanced(stack) as before:
        turn = Turn(stack.channel(stack.history), before, events.key())
        await turn.start()
        await turn.say("m", "a")
        async with reading(before, turn.session) as reader:
            await reader.until_text("m", "a")
            stack.history.kill9()
            for relay in stack.relays:
                await until_health(stack.channel(relay), "history", NOT_SERVING)
            async with balanced(stack) as after:
                for channel in (before, after):
                    (result,) = await publish(channel, turn.batch(turn.frames("m", "b")))
                    assert result.outcome == relay_pb2.PUBLISH_OUTCOME_ACCEPTED
            await reader.until_text("m", "abb")
            await stack.history.restart()
            await turn.complete("m")
            await turn.end()
            await reader.until_type("execution.completed")


async def test_a_relay_that_never_reached_history_is_not_ready(stack: RelayStack, servers: Servers) -> None:
    env = {"HEARTH_VALKEY_URL": stack.valkey_url, "HEARTH_HISTORY_ADDRESS": stack.history.address}
    relay = ServiceProcess("services.relay", servers.scratch(), env)
    stack.history.kill9()
    relay.launch()
    try:
        await relay.logs('"message": "serving"')
        assert not await asyncio.to_thread(relay.serving)
        await stack.history.restart()
        await asyncio.to_thread(relay.wait_serving)
    finally:
        await relay.terminate()
