"""A reader that joins beside others gets what holds at that moment, whatever the relay had heard of the log.

One history tells nobody of what it commits, and the relay does not compare heads by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import pytest_asyncio

from tests.support import events
from tests.support.history_client import Client
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import append
from tests.support.servers import Servers

_NEVER = "3600"


@pytest.fixture(scope="module")
def processes(servers: Servers, module_postgres_dsn: str) -> Iterator[tuple[RelayStack, ServiceProcess]]:
    """The services of this module, and the mute history beside them."""
    with relay_processes(
        servers, module_postgres_dsn, HEARTH_RELAY_HEADS_EVERY=_NEVER, HEARTH_RELAY_HEADS_IDLE_WITHIN=_NEVER
    ) as running:
        mute = ServiceProcess(
            "services.history",
            servers.scratch(),
            {"HEARTH_POSTGRES_DSN": module_postgres_dsn, "HEARTH_VALKEY_URL": servers.empty_valkey()},
        )
        mute.start_blocking()
        yield running, mute
        mute.stop()


@pytest_asyncio.fixture
async def stack(processes: tuple[RelayStack, ServiceProcess]) -> AsyncIterator[RelayStack]:
    """The services, with channels for this test."""
    async with processes[0].connected():
        yield processes[0]


@pytest.fixture
def mute(processes: tuple[RelayStack, ServiceProcess], stack: RelayStack) -> grpc.aio.Channel:
    """The history of whose commits no relay hears."""
    return stack.channel(processes[1])


async def test_the_tail_begins_at_the_head_of_now(stack: RelayStack, mute: grpc.aio.Channel) -> None:
    session = events.key()
    async with reading(stack.channel(), session) as follower:
        await follower.until_ready()
        # A log that is not known yet, and one that is.
        for sequence in (1, 2):
            await append(mute, session, events.custom())
            assert follower.sequences == list(range(1, sequence))
            async with reading(stack.channel(), session, tail=True) as tail:
                await tail.until_ready()
                assert [item.ready.through for item in tail.of_kind("ready")] == [sequence]
                await follower.until_sequence(sequence)
                assert tail.events == []


@pytest.mark.parametrize("another_follows", [False, True])
async def test_a_reader_that_has_seen_the_ending_gets_no_frame_of_the_execution(
    stack: RelayStack, mute: grpc.aio.Channel, another_follows: bool
) -> None:
    """It was told of the ending elsewhere; the relay still takes the execution for one that runs."""
    turn = stack.turn()
    await turn.start()
    await turn.say("m", "a", "b")
    async with reading(stack.channel(), turn.session) as follower:
        await follower.until_text("m", "ab")
        await append(mute, turn.session, turn.covering(turn.run.completed()))
        if another_follows:
            await append(mute, turn.session, events.Run(2).started())
        seen = await Client(mute).read(turn.session)
        async with reading(stack.channel(), turn.session, after=seen[-1].cursor) as reader:
            await reader.until_ready()
            assert reader.kinds() == ["ready"]
            await append(mute, turn.session, events.custom())
            # Another that joins has the relay look.
            async with reading(stack.channel(), turn.session, tail=True):
                await reader.until_sequence(len(seen) + 1)
            assert reader.frames == []
