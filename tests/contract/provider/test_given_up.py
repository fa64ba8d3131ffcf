"""Every call may be given up at any await: what it did by then is found, and nothing is left that nobody knows."""

from __future__ import annotations

import asyncio

import pytest

from services.sandbox.providers.port import InstanceState
from tests.contract.provider.places import Place, given_up

# Rounds of the loop after which a call is given up. A create at the stand-in takes some hundreds.
STEPS = (0, 1, 3, 8, 16, 32, 48, 70, 100, 150, 250, 400)


async def test_a_create_given_up_at_any_await_leaves_what_it_is_known_by_or_nothing(place: Place) -> None:
    for steps in STEPS:
        request = place.request()
        task = await given_up(place.provider.create(request), steps)
        if task.cancelled():
            await place.provider.delete(request.name)
            await place.until_names()
        else:
            assert await place.names() == [request.name]
            await place.provider.delete(task.result().provider_id)


async def test_a_name_can_be_used_again_after_a_create_was_given_up(place: Place) -> None:
    for steps in STEPS:
        request = place.request()
        task = await given_up(place.provider.create(request), steps)
        if task.cancelled():
            await place.provider.delete(request.name)
            made = await place.provider.create(request)
            # Nothing that was begun before comes and takes it away.
            await asyncio.sleep(0.2)
            assert await place.state(made) is InstanceState.RUNNING
            assert await place.names() == [request.name]
        await place.provider.delete(request.name)


@pytest.mark.parametrize("steps", STEPS[::2])
async def test_a_start_and_a_stop_given_up_at_any_await_are_done_by_the_next(place: Place, steps: int) -> None:
    instance = await place.create()
    await given_up(place.provider.stop(instance.provider_id), steps)
    await place.provider.stop(instance.provider_id)
    assert await place.state(instance) is InstanceState.STOPPED
    await given_up(place.provider.start(instance.provider_id), steps)
    await place.provider.start(instance.provider_id)
    assert await place.state(instance) is InstanceState.RUNNING
    await given_up(place.provider.delete(instance.provider_id), steps)
    await place.provider.delete(instance.provider_id)
    assert await place.state(instance) is None


async def test_a_restart_given_up_at_any_await_leaves_nothing_that_the_next_does_not_end(place: Place) -> None:
    instance = await place.create()
    for steps in STEPS[::4]:
        daemon, address, old = await place.daemon(instance)
        request = place.daemon_request()
        await given_up(place.provider.restart_daemon(instance.provider_id, request), steps)
        daemon, address, _ = await place.daemon(instance)
        assert await daemon.health() == 200
        for token in (old, request.token.reveal()):
            assert await place.caller(address, token).health() == 401
