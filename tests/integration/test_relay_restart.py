"""The relay dies or ends: readers resume by their cursor, and an orderly end says where to resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio

from services.chassis.errors import from_rpc_error
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import Turn, publish
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


async def test_killed_while_a_turn_streams(stack: RelayStack) -> None:
    turn = stack.turn()
    stop = asyncio.Event()

    async def produce(turn: Turn) -> None:
        await turn.start()
        number = 0
        while not stop.is_set():
            number += 1
            # As a producer does it: frames that cannot be published are given up, the event goes on.
            with suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(0.2):
                    await publish(stack.channel(), turn.batch(turn.frames(f"m{number}", "a", "b")))
            await turn.complete(f"m{number}")
        await turn.end()

    async def follow(reader: StrictReader) -> None:
        while "execution.completed" not in reader.types:
            if reader.ended:
                reader.connect()
            await reader.until_ended_or("execution.completed")

    producing = asyncio.create_task(produce(turn))
    async with reading(stack.channel(), turn.session) as one, reading(stack.channel(), turn.session) as other:
        following = asyncio.gather(follow(one), follow(other))
        for _ in range(2):
            await asyncio.sleep(0.5)
            stack.relay.kill9()
            await stack.relay.restart()
        await asyncio.sleep(0.3)
        stop.set()
        await producing
        await asyncio.wait_for(following, 20)
    assert len(one.recording) >= 3
    assert one.sequences == other.sequences == list(range(1, one.sequences[-1] + 1))
    assert one.sequences[-1] > 10


async def test_an_orderly_end_says_where_to_resume(stack: RelayStack) -> None:
    turn = stack.turn()
    await turn.start()
    async with reading(stack.channel(), turn.session) as reader, reading(stack.channel(), turn.session) as stalled:
        await reader.until_ready()
        await stalled.until_ready()
        stalled.pause()
        ending = asyncio.create_task(stack.relay.terminate())
        await reader.until_ended()
        assert await ending == 0
        closing = reader.items[-1].closing
        assert (closing.reason, closing.cursor) == ("SHUTTING_DOWN", reader.events[-1].cursor)
        assert reader.error is not None
        error = from_rpc_error(reader.error)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert error.metadata["sequence"] == "1"
        assert error.metadata["tag"] == closing.cursor.tag
        await stack.relay.restart()
        await turn.append(turn.run.completed())
        reader.connect()
        await reader.until_type("execution.completed")
        assert reader.sequences == [1, 2]


@pytest.mark.parametrize("thawed", [True, False])
async def test_an_end_before_the_tail_was_found_names_no_place(stack: RelayStack, thawed: bool) -> None:
    """Zero would mean the whole log to a reader that asked for nothing old; it is to ask for the tail again."""
    turn = stack.turn()
    await turn.start()
    async with reading(stack.channel(), turn.session) as settled:
        await settled.until_ready()
        stack.history.freeze()
        try:
            async with reading(stack.channel(), stack.turn().session, tail=True) as joining:
                # Taken by the relay for certain: an answered call behind it on the same connection.
                await stack.answers()
                ending = asyncio.create_task(stack.relay.terminate())
                await settled.until_ended()
                if thawed:
                    stack.history.thaw()
                await joining.until_ended()
        finally:
            stack.history.thaw()
    assert await ending == 0
    assert joining.error is not None
    error = from_rpc_error(joining.error)
    assert error.reason == "SHUTTING_DOWN"
    assert "sequence" not in error.metadata
    assert [item.closing.HasField("cursor") for item in joining.of_kind("closing")] in ([], [False])
    await stack.relay.restart()
