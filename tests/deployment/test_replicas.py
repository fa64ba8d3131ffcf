"""Two of each service on servers as they are managed for one: replicas come, go and die while people talk, and all of
their callers find those that are there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import redis.asyncio

from tests.deployment.compose import SERVICES
from tests.deployment.conftest import Deployed, operator
from tests.deployment.talkers import agents, talking

TWO = {f"HEARTH_{name.upper()}_REPLICAS": "2" for name in SERVICES}


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_replicas_come_go_and_die_under_load(scratch: Path, deployed: Deployed) -> None:
    async with deployed(HEARTH_AGENTS=agents(scratch), **TWO) as placed:
        async with redis.asyncio.Redis.from_url(placed.stores["HEARTH_VALKEY_URL"]) as client:
            # Managed services refuse these.
            await client.acl_setuser("default", enabled=True, reset=False, commands=["-config", "-debug", "-shutdown"])
        for name in SERVICES:
            await placed.start(name)
        async with talking(placed, 6) as talkers:
            await talkers.more(2)
            for name in ("history", "sandbox", "relay"):
                first = placed.of(name)[0]
                first.process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(first.process.wait)
                await talkers.more(1)
                await placed.add(name, first.number)
                await talkers.more(1)
            # A pool is told to go, as one that is scaled in; a killed one loses its turns, which is another test.
            first = placed.of("pool")[0]
            assert await asyncio.to_thread(first.stop) == 0
            await talkers.more(1)
            await placed.add("pool", first.number)
            await talkers.more(1)
            found = await talkers.finish()
        assert found["C4"] > 0
        replicas = (await operator(placed).run("pool", "replicas", "--json")).stdout
        assert replicas.count('"address"') >= 2, replicas
        # Both of them drove turns.
        driving = [it.log.read_text().count("serving") for it in placed.containers if it.service.name == "pool"]
        assert all(driving)
