"""A reader that cannot keep up loses frames and is told; it never loses an event, and never slows anybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from hearth.types.v1 import frame_pb2
from services.chassis.errors import from_rpc_error
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_processes, relay_stack
from tests.support.relay_turns import append
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(
        servers,
        module_postgres_dsn,
        HEARTH_RELAY_READER_BYTES="400000",
        HEARTH_RELAY_READER_ITEMS="64",
    ) as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        yield processes


def progress(index: int) -> frame_pb2.Frame:
    """A frame that cannot be joined with others."""
    custom = frame_pb2.CustomFrame(type="test.example/progress", data=b"x" * 2_000)
    return frame_pb2.Frame(frame_index=index, entity_id="tool", custom=custom)


async def test_a_slow_reader_gets_gaps_and_every_event(stack: RelayStack) -> None:
    turn = stack.turn()
    async with reading(stack.channel(), turn.session) as slow, reading(stack.channel(), turn.session) as quick:
        await slow.until_ready()
        await quick.until_ready()
        await turn.start()
        slow.pause()
        for number in range(20):
            for _ in range(5):
                frames = [progress(turn.next + position) for position in range(10)]
                turn.next += 10
                await turn.publish(*frames)
            await turn.say(f"m{number}", "a", "b")
            sequence = await turn.complete(f"m{number}")
            await quick.until_sequence(sequence)
        slow.go_on()
        await slow.until_sequence(sequence)
        await turn.say("end", "still", " there")
        for reader in (slow, quick):
            await reader.until_text("end", "still there")
        assert quick.gaps == []
        assert slow.gaps
        assert slow.sequences == quick.sequences == list(range(1, 22))


async def test_text_of_a_slow_reader_is_joined_before_anything_is_dropped(stack: RelayStack) -> None:
    turn = stack.turn()
    async with reading(stack.channel(), turn.session) as slow, reading(stack.channel(), turn.session) as quick:
        await slow.until_ready()
        await quick.until_ready()
        await turn.start()
        # Fills what the transport takes, so that the next frames wait in the relay. The read that is under way takes
        # one response whatever its size, so each of them is to be a response of its own.
        slow.pause()
        for sequence in range(2, 8):
            await append(stack.channel(stack.history), turn.session, events.custom(60_000))
            await quick.until_sequence(sequence)
        for _ in range(20):
            await turn.say("m", *(f"{number} " for number in range(10)))
        slow.go_on()
        await turn.complete("m")
        await slow.until_type("message.completed")
        assert slow.text("m") == turn.texts["m"]
        assert slow.gaps == []
        assert len(slow.frames) < turn.next


async def test_events_beyond_what_the_relay_keeps_come_from_history(stack: RelayStack) -> None:
    session = events.key()
    history = stack.channel(stack.history)
    async with reading(stack.channel(), session) as slow:
        await slow.until_ready()
        await append(history, session, events.custom())
        await slow.until_sequence(1)
        slow.pause()
        for _ in range(30):
            await append(history, session, *(events.custom(20_000) for _ in range(20)))
        slow.go_on()
        await slow.until_sequence(601)
        assert slow.sequences == list(range(1, 602))


async def test_a_reader_that_takes_nothing_is_cut_off_with_its_cursor(servers: Servers, migrated_dsn: str) -> None:
    async with relay_stack(servers, migrated_dsn, HEARTH_RELAY_SLOW_READER="1") as stack:
        session = events.key()
        history = stack.channel(stack.history)
        async with reading(stack.channel(), session) as stalled, reading(stack.channel(), session) as quick:
            await stalled.until_ready()
            await quick.until_ready()
            stalled.pause()
            slowest = 0.0
            for sequence in range(1, 120):
                begun = time.monotonic()
                await append(history, session, events.custom(100_000))
                await quick.until_sequence(sequence)
                slowest = max(slowest, time.monotonic() - begun)
            await asyncio.sleep(2.5)
            stalled.go_on()
            await stalled.until_ended()
            assert stalled.error is not None
            error = from_rpc_error(stalled.error)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SLOW_READER")
            assert error.metadata["sequence"] == str(stalled.sequences[-1])
            assert stalled.cursor is not None
            assert error.metadata["tag"] == stalled.cursor.tag
            assert stalled.sequences[-1] < 119
            stalled.connect()
            await stalled.until_sequence(119)
            # The stalled neighbour was no reason for the other one to wait.
            assert slowest < 1.0


async def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(servers: Servers, migrated_dsn: str) -> None:
    """Its stream cannot be told that it ends. The grace of a shutdown is for work, and here none is left."""
    async with relay_stack(servers, migrated_dsn, HEARTH_SHUTDOWN_GRACE="300") as stack:
        session = events.key()
        async with reading(stack.channel(), session) as stalled, reading(stack.channel(), session) as quick:
            await stalled.until_ready()
            await quick.until_ready()
            stalled.pause()
            for sequence in range(1, 9):
                await append(stack.channel(stack.history), session, events.custom(60_000))
                await quick.until_sequence(sequence)
            assert await stack.relay.terminate() == 0
