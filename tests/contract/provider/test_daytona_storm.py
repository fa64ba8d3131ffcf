"""Everything that can go wrong does, at random, at every call: what is told is of the port, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from services.sandbox.providers.port import InstanceNotFound, InstanceState, ProviderError
from tests.contract.provider.places import Place, connect
from tests.support.daytona import RunningStandIn
from tests.support.exhaustive import sampled

LIVES = 12
STEPS = 6
PROBABILITY = 0.05


async def one_life(place: Place, chance: random.Random) -> None:
    """Make a sandbox and do things to it, some of them given up. What goes wrong must be an error of the port."""
    request = place.request()
    try:
        await place.provider.create(request)
    except ProviderError:
        return
    for _ in range(STEPS):
        works: list[Callable[[], Awaitable[object]]] = [
            lambda: place.provider.stop(request.name),
            lambda: place.provider.start(request.name),
            lambda: place.provider.restart_daemon(request.name, place.daemon_request()),
            lambda: place.provider.endpoint(request.name),
            lambda: place.provider.refresh_activity(request.name),
            lambda: place.provider.set_network(request.name, chance.choice(["OPEN", "BLOCKED"]), ()),
        ]
        try:
            # Now and then its caller has no more time.
            await asyncio.wait_for(chance.choice(works)(), 0.2 if chance.random() < 0.1 else 60)
        except (TimeoutError, ProviderError):
            continue


@pytest.mark.parametrize("seed", sampled([1, 2], every=2))
async def test_nothing_is_left_after_a_storm(
    stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession, seed: int
) -> None:
    provider = await connect(
        stand_in,
        scratch,
        call_seconds=2.0,
        slice_seconds=3.0,
        create_seconds=8.0,
        start_seconds=8.0,
        stop_seconds=8.0,
        delete_seconds=8.0,
        daemon_seconds=8.0,
        clean_up_seconds=3.0,
        grace_seconds=0.1,
    )
    place = Place(provider, http)
    stand_in.faults.everything(PROBABILITY, seed=seed, seconds=0.3)
    lives = [one_life(Place(provider, http, labels=place.labels), random.Random(f"{seed}-{n}")) for n in range(LIVES)]
    for life in range(0, LIVES, 4):
        await asyncio.gather(*lives[life : life + 4])
    counts = stand_in.faults.counts()
    print(f"faults fired: {counts}")
    assert sum(counts[kind] for kind in counts if "/" not in kind) >= 20
    stand_in.faults.clear()
    stand_in.release()
    for instance in await provider.list(place.labels):
        # What is there can be told, and whatever it is, it can be deleted.
        try:
            found = await provider.get(instance.provider_id)
        except InstanceNotFound:
            continue
        assert isinstance(found.state, InstanceState)
        await provider.delete(instance.provider_id)
    await place.until_names()
    assert stand_in.running() == 0
    assert stand_in.sandboxes() == []
    await provider.close()
