"""Known failures of systems like this, each by its code in docs/failures.md: what a relay does instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import redis.asyncio

from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import frame_pb2, session_pb2
from services.chassis.errors import from_rpc_error
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_turns import append


async def test_r03_a_resume_after_the_end_gets_the_rest_and_the_ending(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    await turn.say("m", "some", " text")
    await turn.complete("m")
    await turn.say("n", "never completed")
    await turn.end()
    async with reading(services.relay, turn.session) as whole:
        await whole.until_ready()
    assert whole.types == ["execution.started", "message.completed", "execution.completed"]
    for place in range(4):
        after = whole.events[place - 1].cursor if place else None
        async with reading(services.relay, turn.session, after=after) as resumed:
            await resumed.until_ready()
            assert resumed.events == whole.events[place:]
            ready = resumed.of_kind("ready")[0].ready
            assert (ready.through, ready.head) == (3, 3)
            # Nothing of what is over comes as if it were being said.
            assert resumed.frames == []
    stub = history_service_pb2_grpc.HistoryServiceStub(services.history)
    (head,) = (await stub.GetHeads(history_service_pb2.GetHeadsRequest(sessions=[turn.session]))).heads
    assert (head.execution_id, head.ended) == (turn.run.execution_id, True)


@pytest.mark.parametrize("events_only", [False, True])
async def test_r17_replay_and_live_show_the_same(services: Services, events_only: bool) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session, events_only=events_only) as live:
        await live.until_ready()
        await turn.start()
        await append(services.history, turn.session, events.input_queued(), events.custom(70_000))
        await append(services.history, turn.session, events.interaction_requested(), events.gap())
        await turn.say("m", "some", " text")
        await turn.append(turn.covering(turn.run.tool()))
        await turn.complete("m")
        await turn.say("n", "more")
        await live.until_sequence(7)
        if not events_only:
            await live.until_text("n", "more")
        async with reading(services.relay, turn.session, events_only=events_only) as later:
            await later.until_ready()
            assert later.events == live.events
            assert bool(later.frames) == bool(live.frames) == (not events_only)
            assert later.text("n") == live.text("n")


async def test_r31_events_are_not_kept_on_the_bus(services: Services, bus_url: str) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader, redis.asyncio.Redis.from_url(bus_url) as client:
        await reader.until_ready()
        await turn.append(turn.run.started(), *(turn.run.message("x" * 10_000) for _ in range(100)))
        await reader.until_sequence(101)
        assert [key async for key in client.scan_iter(f"*{turn.session.session}*")] == []
        await turn.say("m", "hi")
        assert 0 < await memory_of(client, turn.session) < 10_000


async def test_r32_r49_an_expired_cursor_is_refused_and_a_snapshot_goes_on(services: Services) -> None:
    session = events.key()
    history = history_service_pb2_grpc.HistoryServiceStub(services.history)
    await append(services.history, session, *(events.custom() for _ in range(5)))
    async with reading(services.relay, session) as whole:
        await whole.until_ready()
    await history.TrimLog(history_service_pb2.TrimLogRequest(session=session, through=3))
    for place in range(3):
        after = whole.events[place - 1].cursor if place else None
        async with reading(services.relay, session, after=after) as late:
            await late.until_ended()
            assert late.items == []
            assert late.error is not None
            error = from_rpc_error(late.error)
            assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_EXPIRED")
            assert (error.metadata["oldest"], error.metadata["head"]) == ("4", "5")
    # The edge: what follows it is all there.
    async with reading(services.relay, session, after=whole.events[2].cursor) as edge:
        await edge.until_ready()
        assert edge.events == whole.events[3:]
    snapshot = await history.GetSnapshot(history_service_pb2.GetSnapshotRequest(session=session, page_size=100))
    assert list(snapshot.events) == whole.events[3:]
    async with reading(services.relay, session, after=snapshot.head.head) as reader:
        await reader.until_ready()
        await append(services.history, session, events.custom())
        await reader.until_sequence(6)
        assert reader.sequences == [6]


async def test_r41_a_question_and_an_ending_that_were_missed_come_with_the_reconnect(services: Services) -> None:
    turn = services.turn()
    question = events.interaction_requested()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await reader.until_sequence(1)
        await reader.disconnect()
        await append(services.history, turn.session, question)
        reader.connect()
        await reader.until_ready()
        assert reader.types == ["execution.started", "interaction.requested"]
        assert reader.events[1].event == question
        await reader.disconnect()
        await turn.end()
        reader.use(services.other_relay)
        reader.connect()
        await reader.until_ready()
        assert reader.types == ["execution.started", "interaction.requested", "execution.completed"]


async def test_x07_the_memory_of_a_session_stays_bounded(services: Services, bus_url: str) -> None:
    turn = services.turn()
    await turn.start()
    async with redis.asyncio.Redis.from_url(bus_url) as client:
        for custom in pieces():
            frames = [
                frame_pb2.Frame(frame_index=turn.next + place, entity_id="m", custom=custom) for place in range(50)
            ]
            turn.next += 50
            await turn.publish(*frames)
        # Four times as much was said as is kept.
        assert await memory_of(client, turn.session) < 6 * 1024 * 1024
        small = services.turn()
        await small.start()
        for _ in range(10):
            await small.publish(*small.frames("m", *["x"] * 2_500))
        # 25,000 frames where 20,000 are kept, whatever their size.
        (stream,) = [key async for key in streams(client) if small.session.session in key]
        assert await client.xlen(stream) <= 20_000


async def test_x16_no_consumer_group_is_made(services: Services, bus_url: str) -> None:
    turn = services.turn()
    await turn.start()
    await turn.say("m", "some", " text")
    async with reading(services.relay, turn.session) as one, reading(services.other_relay, turn.session) as other:
        for reader in (one, other):
            await reader.until_ready()
            await reader.until_text("m", "some text")
        async with redis.asyncio.Redis.from_url(bus_url) as client:
            found = [key async for key in streams(client)]
            assert any(turn.session.session in key for key in found)
            for key in found:
                assert await client.xinfo_groups(key) == []


def pieces() -> Iterator[frame_pb2.CustomFrame]:
    """16 MiB in pieces that cannot be joined, 50 of each."""
    for number in range(32):
        yield frame_pb2.CustomFrame(type="test.example/piece", data=bytes([number]) * 10_000)


async def streams(client: redis.asyncio.Redis) -> AsyncIterator[str]:
    """The keys that are streams."""
    async for key in client.scan_iter(_type="stream"):
        yield key.decode()


async def memory_of(client: redis.asyncio.Redis, session: session_pb2.SessionKey) -> int:
    """What the keys of a session take, in bytes."""
    keys = [key async for key in client.scan_iter(f"*{session.session}*")]
    return sum([await client.memory_usage(key, samples=0) or 0 for key in keys])
