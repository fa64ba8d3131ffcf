"""Valkey away, restarted or flushed: events flow, frames stop and come back alone, and no stale producer gets in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from hearth.relay.v1 import relay_pb2
from tests.support import events
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_stack import RelayStack, relay_processes, relay_stack
from tests.support.relay_turns import append, publish
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(servers, module_postgres_dsn) as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        yield processes


async def until_degraded(reader: StrictReader, expected: list[tuple[str, bool]]) -> None:
    """Return when `reader` was told exactly this of what is away and back."""
    await reader.until(
        lambda: [(item.degraded.what, item.degraded.on) for item in reader.of_kind("degraded")] == expected
    )


async def test_valkey_restarts_while_a_turn_streams(stack: RelayStack) -> None:
    turn = stack.turn()
    async with reading(stack.channel(), turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m1", "before")
        await reader.until_text("m1", "before")
        await stack.stop_valkey()
        await until_degraded(reader, [("bus", True)])
        (result,) = await publish(stack.channel(), turn.batch(turn.frames("m1", " away")))
        assert result.outcome == relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE
        sequence = await turn.complete("m1")
        await reader.until_sequence(sequence, timeout=5)
        assert reader.gaps == [(1, 1)]
        async with reading(stack.channel(), turn.session) as newcomer:
            await newcomer.until_ready()
            await until_degraded(newcomer, [("bus", True)])
            await stack.start_valkey()
            for each in (reader, newcomer):
                await until_degraded(each, [("bus", True), ("bus", False)])
            await turn.say("m2", "after")
            for each in (reader, newcomer):
                await each.until_text("m2", "after")
            await turn.complete("m2")
            await turn.end()
            for each in (reader, newcomer):
                await each.until_type("execution.completed")


async def test_flushall_with_a_stale_producer_alive(stack: RelayStack) -> None:
    stale = stack.turn()
    await stale.start()
    await stale.say("m", "old")
    # A takeover ended the first one and the session went on; its producer does not know.
    await stale.append(stale.run.at(2).lost())
    turn = stack.turn(stale.session, epoch=3)
    await turn.start()
    await turn.say("n", "a", "b")
    async with reading(stack.channel(), turn.session) as reader, stack.valkey() as valkey:
        await reader.until_ready()
        await valkey.flushall()
        (refused,) = await publish(stack.channel(), stale.batch(stale.frames("m", "stale")))
        assert refused.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED
        assert (refused.current.execution_id, refused.current.epoch) == (turn.run.execution_id, 3)
        assert (await turn.publish(*turn.frames("n", "c"))).through == 2
        await reader.until_text("n", "abc")
        async with reading(stack.channel(), turn.session) as late:
            await late.until_ready()
            assert late.gaps == [(0, 1)]
            assert late.text("n") == "c"
        (refused,) = await publish(stack.channel(), stale.batch(stale.frames("m", "stale")))
        assert refused.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED
        await turn.complete("n")
        await reader.until_type("message.completed")
        assert reader.gaps == []


async def test_lost_notices_are_found_by_comparing_heads(servers: Servers, migrated_dsn: str) -> None:
    """The bus is there and says nothing: history publishes to another one."""
    async with relay_stack(servers, migrated_dsn) as stack:
        quiet = await asyncio.to_thread(servers.empty_valkey)
        mute = ServiceProcess("services.history", servers.scratch(), {**stack.history.env, "HEARTH_VALKEY_URL": quiet})
        await mute.start()
        try:
            session = events.key()
            async with reading(stack.channel(), session) as reader:
                await reader.until_ready()
                for sequence in range(1, 4):
                    await append(stack.channel(mute), session, events.custom())
                    await reader.until_sequence(sequence, timeout=5)
        finally:
            await mute.terminate()


async def test_a_valkey_that_hangs_keeps_nobody_from_events(stack: RelayStack) -> None:
    turn = stack.turn()
    async with reading(stack.channel(), turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m", "a")
        await reader.until_text("m", "a")
        stack.freeze_valkey()
        try:
            await turn.complete("m")
            await reader.until_sequence(2, timeout=5)
            async with reading(stack.channel(), turn.session) as newcomer:
                await newcomer.until_sequence(2, timeout=10)
        finally:
            stack.thaw_valkey()
        await turn.say("n", "b")
        await reader.until_text("n", "b")
        assert reader.gaps == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_valkey_that_may_drop_keys_is_refused_at_the_start(
    servers: Servers, migrated_dsn: str, policy: str
) -> None:
    stack = await asyncio.to_thread(RelayStack, servers, migrated_dsn, 0, {})
    try:
        async with stack.valkey() as valkey:
            await valkey.config_set("maxmemory-policy", policy)
        relay = ServiceProcess("services.relay", servers.scratch(), {"HEARTH_VALKEY_URL": stack.valkey_url})
        relay.launch()
        assert await relay.wait(20) == 2
        assert f"maxmemory-policy {policy}" in relay.log()
    finally:
        await asyncio.to_thread(stack.stop)


async def test_a_full_valkey_takes_no_frames_and_readers_get_their_events(stack: RelayStack) -> None:
    async with stack.valkey() as valkey:
        turn = stack.turn()
        async with reading(stack.channel(), turn.session) as reader:
            await reader.until_ready()
            await turn.start()
            await turn.say("m", "a")
            used = (await valkey.info("memory"))["used_memory"]
            await valkey.config_set("maxmemory", used + 100_000)
            outcomes = set()
            for _ in range(20):
                (result,) = await publish(stack.channel(), turn.batch(turn.frames("m", "x" * 20_000)))
                outcomes.add(result.outcome)
            assert relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE in outcomes
            await turn.complete("m")
            await reader.until_type("message.completed")
            await valkey.config_set("maxmemory", 0)
            await turn.say("n", "back")
            await reader.until_text("n", "back")
