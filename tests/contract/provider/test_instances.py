"""Instances: made, found, started, stopped and deleted, once and again, one caller or several."""

from __future__ import annotations

import asyncio

import pytest

from services.sandbox.providers.port import InstanceNotFound, InstanceState, NameTaken
from services.sandbox.rows import instance_name
from tests.contract.provider.places import Place, results
from tests.support.sandboxes import new_id


async def test_a_new_instance_runs_and_is_found_by_id_name_and_label(place: Place) -> None:
    made = await place.create(mine="yes")
    other = await place.create(mine="no")
    assert made.state is InstanceState.RUNNING
    for reference in (made.provider_id, made.name):
        found = await place.provider.get(reference)
        assert (found.provider_id, found.name, found.state) == (made.provider_id, made.name, InstanceState.RUNNING)
        assert found.labels == {**place.labels, "mine": "yes"}
        assert 0 <= found.age < 120
    listed = await place.provider.list({**place.labels, "mine": "yes"})
    assert [instance.provider_id for instance in listed] == [made.provider_id]
    assert await place.names() == sorted([made.name, other.name])
    assert await place.provider.list({"hearth-deployment": new_id()}) == []


async def test_a_name_is_given_once_also_in_a_race(place: Place) -> None:
    request = place.request()
    assert await results(*(place.provider.create(request) for _ in range(4))) == ["Instance", *["NameTaken"] * 3]
    with pytest.raises(NameTaken):
        await place.provider.create(request)
    assert await place.names() == [request.name]


async def test_w_r01_stop_keeps_the_instance_and_what_is_stopped_is_left_alone(place: Place) -> None:
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    for _ in range(2):
        await place.provider.stop(instance.provider_id)
        assert await place.state(instance) is InstanceState.STOPPED
    assert await daemon.health() in (0, 400, 404, 502)
    with pytest.raises(InstanceNotFound):
        await place.provider.stop(instance_name(new_id()))


async def test_w_r02_start_brings_back_what_is_stopped_and_leaves_what_runs(place: Place) -> None:
    instance = await place.create()
    await place.provider.stop(instance.name)
    for reference in (instance.name, instance.provider_id):
        await place.provider.start(reference)
        assert await place.state(instance) is InstanceState.RUNNING
    daemon, _, _ = await place.daemon(instance)
    assert await daemon.health() == 200
    with pytest.raises(InstanceNotFound):
        await place.provider.start(instance_name(new_id()))


async def test_w_r03_delete_is_for_any_state_and_one_that_is_gone_is_no_error(place: Place) -> None:
    running, stopped = await place.create(), await place.create()
    daemon, _, _ = await place.daemon(running)
    await place.provider.stop(stopped.provider_id)
    for instance in (running, stopped):
        for _ in range(2):
            await place.provider.delete(instance.provider_id)
        with pytest.raises(InstanceNotFound):
            await place.provider.get(instance.provider_id)
        with pytest.raises(InstanceNotFound):
            await place.provider.get(instance.name)
        await place.provider.delete(instance.name)
    assert await daemon.health() in (0, 400, 404, 502)
    await place.provider.delete(instance_name(new_id()))


async def test_two_at_once_agree(place: Place) -> None:
    instance = await place.create()
    reference = instance.provider_id
    assert await results(place.provider.stop(reference), place.provider.stop(reference)) == ["NoneType"] * 2
    assert await place.state(instance) is InstanceState.STOPPED
    assert await results(place.provider.start(reference), place.provider.start(reference)) == ["NoneType"] * 2
    assert await place.state(instance) is InstanceState.RUNNING
    assert await results(place.provider.delete(reference), place.provider.delete(reference)) == ["NoneType"] * 2
    assert await place.state(instance) is None


async def test_a_delete_wins_over_a_start_and_a_stop(place: Place) -> None:
    for other in (place.provider.start, place.provider.stop):
        instance = await place.create()
        if other == place.provider.start:
            await place.provider.stop(instance.provider_id)
        ended = await asyncio.gather(
            other(instance.provider_id), place.provider.delete(instance.provider_id), return_exceptions=True
        )
        assert ended[1] is None
        assert await place.state(instance) is None
        assert ended[0] is None or isinstance(ended[0], InstanceNotFound)


async def test_what_is_not_there_is_not_found(place: Place) -> None:
    missing = instance_name(new_id())
    for work in (place.provider.get(missing), place.provider.endpoint(missing)):
        with pytest.raises(InstanceNotFound):
            await work
    with pytest.raises(InstanceNotFound):
        await place.provider.restart_daemon(missing, place.daemon_request())


async def test_w_r03_activity_may_be_refreshed_at_any_time(place: Place) -> None:
    instance = await place.create()
    await place.provider.refresh_activity(instance.provider_id)
    await place.provider.refresh_activity(instance.name)


async def test_the_provider_tells_what_creation_bakes_in(place: Place) -> None:
    spec = place.request().spec
    baked = place.provider.baked(spec)
    assert place.provider.baked(spec) == baked
    assert all(isinstance(value, str) for value in baked.values())
