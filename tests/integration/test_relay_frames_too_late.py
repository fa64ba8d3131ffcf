"""Frames that come when an event covers them already reach no reader, also where the relay did not see that event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.conftest import StartService
from tests.support.cutter import Cutter
from tests.support.relay_reader import reading
from tests.support.relay_stack import RelayStack, relay_processes
from tests.support.relay_turns import text_frame
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


async def test_a_request_that_hung_on_its_way_is_too_late(stack: RelayStack) -> None:
    """Nothing is kept of the execution, so what its events cover has to be looked up."""
    turn = stack.turn()
    await turn.start()
    await turn.say("m1", "a", "b", "c")
    await turn.complete("m1")
    async with stack.valkey() as valkey:
        await valkey.flushall()
    async with reading(stack.channel(), turn.session) as reader:
        await reader.until_ready()
        await turn.publish(text_frame(1, "m1", "b"))
        await turn.say("m2", "d", "e")
        await reader.until_text("m2", "de")
        await turn.complete("m2")
        await turn.end()
        await reader.until_type("execution.completed")
        assert reader.text("m1") == ""


async def test_frames_kept_while_the_bus_was_away_are_too_late_when_it_is_back(
    stack: RelayStack, start_service: StartService, scratch: Path
) -> None:
    turn = stack.turn()
    await turn.start()
    await turn.say("m1", "a", "b")
    await turn.complete("m1")
    await turn.say("m2", "c")
    async with Cutter(urlsplit(stack.valkey_url).netloc) as link:
        relay = await start_service(
            "services.relay",
            HEARTH_VALKEY_URL=f"redis://{link.address}/0",
            HEARTH_HISTORY_ADDRESS=stack.history.address,
        )
        link.silent = True
        link.cut()
        await relay.logs("bus")
        async with reading(stack.channel(relay), turn.session) as reader:
            await reader.until_ready()
            await reader.until(lambda: any(item.degraded.on for item in reader.of_kind("degraded")))
            link.silent = False
            link.cut()
            await reader.until_text("m2", "c")
            await turn.say("m2", "d")
            await turn.complete("m2")
            await turn.end()
            await reader.until_type("execution.completed")
            assert (reader.text("m1"), reader.text("m2")) == ("", "cd")
        await relay.terminate()
