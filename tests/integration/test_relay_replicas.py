"""Several relays serve one session: a producer may use any of them, and readers of all see the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import Turn, publish
from tests.support.servers import Servers


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[RelayStack]:
    """The services of this module."""
    with relay_processes(servers, module_postgres_dsn, relays=2) as running:
        yield running


@pytest_asyncio.fixture
async def stack(processes: RelayStack) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes.connected():
        yield processes


async def test_readers_of_two_relays_see_what_a_producer_gives_to_either(stack: RelayStack) -> None:
    first, second = stack.channel(stack.relays[0]), stack.channel(stack.relays[1])
    turn = stack.turn()
    async with reading(first, turn.session) as one, reading(second, turn.session) as other:
        await one.until_ready()
        await other.until_ready()
        await turn.start()
        for number in range(40):
            frames = turn.frames("m", f"{number} ", "x ")
            await publish((first, second)[number % 2], turn.batch(frames))
        # A retry that arrives at the other relay is known there.
        await publish(second, turn.batch(frames))
        async with reading(second, turn.session) as late:
            await late.until_ready()
            assert late.text("m") == turn.texts["m"]
        await turn.complete("m")
        await turn.end()
        for reader in (one, other):
            await reader.until_type("execution.completed")
            assert reader.text("m") == turn.texts["m"]
            assert reader.gaps == []
    assert one.sequences == other.sequences == [1, 2, 3]


async def test_a_reader_moves_between_relays_by_its_cursor(stack: RelayStack) -> None:
    turn = stack.turn()

    async def produce(turn: Turn) -> None:
        await turn.start()
        for number in range(60):
            await turn.say(f"m{number}", "some", " text")
            await turn.complete(f"m{number}")

    producing = asyncio.create_task(produce(turn))
    cursor, seen = None, 0
    connections: list[list[int]] = []
    while seen < 61:
        relay = stack.channel(stack.relays[len(connections) % 2])
        async with reading(relay, turn.session, after=cursor) as reader:
            await reader.until_sequence(min(61, seen + 7), timeout=30)
        cursor, seen = reader.cursor, reader.sequences[-1]
        connections.append(reader.sequences)
    await producing
    assert [sequence for found in connections for sequence in found] == list(range(1, 62))
