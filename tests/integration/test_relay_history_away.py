"""History away: frames flow, readers keep their streams and are told; new ones are refused in bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from hearth.types.v1 import session_pb2
from services.chassis.errors import from_rpc_error
from tests.support import events
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import append
from tests.support.servers import Servers

CURSOR = session_pb2.Cursor(log_id="11111111-1111-4111-8111-111111111111", sequence=7, tag="00" * 8)


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(servers, module_postgres_dsn, HEARTH_RELAY_HISTORY_TIMEOUT="1") as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        yield processes


def away(reader: StrictReader) -> bool:
    told = reader.of_kind("degraded")
    return bool(told) and told[-1].degraded.on


async def refused_in_time(stack: RelayStack, reader: StrictReader) -> None:
    begun = time.monotonic()
    await reader.until_ended(timeout=10)
    assert time.monotonic() - begun < 8
    assert reader.error is not None
    error = from_rpc_error(reader.error)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE")
    assert error.metadata["sequence"] == "0"


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_history_goes_and_comes_back(stack: RelayStack, how: str) -> None:
    turn = stack.turn()
    await turn.start()
    await turn.say("m", "a")
    async with reading(stack.channel(), turn.session) as reader:
        await reader.until_ready()
        if how == "killed":
            stack.history.kill9()
        else:
            stack.history.freeze()
        await reader.until(lambda: reader.of_kind("degraded"), timeout=10)
        assert [(item.degraded.what, item.degraded.on) for item in reader.items if item.HasField("degraded")] == [
            ("history", True)
        ]
        await turn.say("m", "b")
        await reader.until_text("m", "ab")
        for session in (turn.session, events.key()):
            async with reading(stack.channel(), session) as newcomer:
                await refused_in_time(stack, newcomer)
        if how == "killed":
            await stack.history.restart()
        else:
            stack.history.thaw()
        await turn.complete("m")
        await turn.end()
        await reader.until_type("execution.completed")
        await reader.until(lambda: not reader.of_kind("degraded")[-1].degraded.on)
        assert reader.gaps == []
        async with reading(stack.channel(), turn.session) as newcomer:
            await newcomer.until_ready()
            assert newcomer.sequences == [1, 2, 3]


async def test_readers_refused_together_are_told_no_place_of_another(stack: RelayStack) -> None:
    """They wait for one question to history; its failure is one for all, the place of each is its own."""
    with_cursor = [StrictReader(stack.channel(), events.key(), after=CURSOR) for _ in range(5)]
    at_tail = [StrictReader(stack.channel(), events.key(), tail=True) for _ in range(5)]
    stack.history.freeze()
    try:
        for pair in zip(with_cursor, at_tail, strict=True):
            for reader in pair:
                reader.connect()
        await asyncio.gather(*(reader.until_ended() for reader in (*with_cursor, *at_tail)))
    finally:
        stack.history.thaw()
    told = [from_rpc_error(reader.error).metadata for reader in (*with_cursor, *at_tail) if reader.error is not None]
    dependency = {"dependency": "history"}
    place = {"log_id": CURSOR.log_id, "sequence": "7", "tag": CURSOR.tag}
    assert told == [{**dependency, **place}] * 5 + [dependency] * 5


async def test_events_committed_while_the_relay_could_not_read_are_found(stack: RelayStack) -> None:
    """A notice too large to carry its event, and history frozen before the relay reads it."""
    session = events.key()
    await append(stack.channel(stack.history), session, events.custom())
    async with reading(stack.channel(), session) as reader:
        await reader.until_ready()
        for sequence in range(2, 5):
            await append(stack.channel(stack.history), session, events.custom(200_000))
            stack.history.freeze()
            await reader.until(lambda: reader.of_kind("degraded")[-1:] and reader.of_kind("degraded")[-1].degraded.on)
            stack.history.thaw()
            await reader.until_sequence(sequence)
