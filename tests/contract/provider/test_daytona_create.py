"""Creating at Daytona: what the request carries, and that what goes wrong leaves one sandbox that is told, or none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from hearth.secret import Secret, hidden
from services.sandbox.providers.port import (
    InstanceState,
    NameTaken,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
)
from tests.contract.provider.places import Place, connect, given_up, results
from tests.support.daytona import Delays, Fault, Kind, RunningStandIn, StandIn
from tests.support.daytona.limits import Quotas
from tests.support.sandboxes import new_id
from tests.support.waiting import eventually


async def test_w_r10_create_carries_timers_labels_and_the_workspace_and_no_archiving(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    request = at_daytona.request(snapshot="agents-v1", target="eu", env=hidden({"PLAIN": "value"}))
    made = await at_daytona.provider.create(request)
    wanted = stand_in.sandbox(made.provider_id).wanted
    assert (wanted.auto_stop, wanted.auto_delete, wanted.ttl) == (15, 30, 0)
    assert wanted.auto_archive == 7 * 24 * 60  # what the server takes when nothing is said
    assert (wanted.name, wanted.snapshot, wanted.target, wanted.public) == (request.name, "agents-v1", "eu", False)
    assert request.labels.items() <= wanted.labels.items()
    assert wanted.env == {"PLAIN": "value"}
    (mount,) = wanted.mounts
    assert mount.path == at_daytona.provider.workspace(at_daytona.key)
    assert mount.subpath == f"{at_daytona.key.project}/{at_daytona.key.session}"
    assert [volume.name for volume in stand_in.volumes.all()] == ["hearth-workspaces"]


async def test_w_r10_a_snapshot_or_an_image_and_never_both(at_daytona: Place, stand_in: RunningStandIn) -> None:
    provider = at_daytona.provider
    both = at_daytona.request(snapshot="one", image="debian:12")
    sized = at_daytona.request(snapshot="one", cpus=2)
    for request, field in ((both, "image"), (sized, "resources")):
        with pytest.raises(ProviderRefused) as caught:
            provider.check(request.spec)
        assert caught.value.field == field
        with pytest.raises(ProviderRefused):
            await provider.create(request)
    assert stand_in.log.of("call", call="create") == []
    made = await provider.create(at_daytona.request(image="debian:12", cpus=2, memory_mib=1500, disk_mib=4096))
    found = stand_in.sandbox(made.provider_id)
    assert found.wanted.dockerfile.strip() == "FROM debian:12"
    assert (found.resources.cpu, found.resources.memory, found.resources.disk) == (2, 2, 4)


@pytest.mark.parametrize(
    ("network", "allow", "blocked", "listed"),
    [
        ("", (), False, None),
        ("OPEN", (), False, None),
        ("BLOCKED", (), True, None),
        ("ALLOW_LIST", (), True, None),
        ("ALLOW_LIST", (" ",), True, None),
        ("ALLOW_LIST", ("10.0.0.0/8", " 1.2.3.4/32"), False, "1.2.3.4/32,10.0.0.0/8"),
    ],
)
async def test_w_r10_an_allow_list_of_nothing_blocks_all(
    at_daytona: Place, stand_in: RunningStandIn, network: str, allow: tuple[str, ...], blocked: bool, listed: str | None
) -> None:
    if allow == (" ",):
        request = at_daytona.request(network=network)
    else:
        request = at_daytona.request(network=network, allow=allow)
    found = stand_in.sandbox((await at_daytona.provider.create(request)).provider_id)
    assert (found.network_block_all, found.network_allow_list) == (blocked, listed)


def test_what_daytona_can_never_do_is_refused_before_it_is_asked(at_daytona: Place) -> None:
    for spec, field in (
        ({"network": "ALLOW_LIST", "allow": ("fd00::/8",)}, "network"),
        ({"env": {"DAYTONA_SANDBOX_ID": "another"}}, "env"),
    ):
        with pytest.raises(ProviderRefused) as caught:
            at_daytona.provider.check(at_daytona.request(**spec).spec)
        assert caught.value.field == field


async def test_a_create_sent_away_by_the_rate_limit_tells_when_to_come_back(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    stand_in.faults.add(Fault("create", Kind.STATUS, status=429, retry_after=7, times=1))
    with pytest.raises(ProviderUnavailable) as caught:
        await at_daytona.create()
    assert caught.value.retry_after == 7
    assert await at_daytona.names() == []
    assert len(stand_in.log.of("call", call="create")) == 1


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.DROP])
async def test_a_create_that_failed_before_anything_was_done_may_be_tried_again(
    at_daytona: Place, stand_in: RunningStandIn, kind: Kind
) -> None:
    stand_in.faults.add(Fault("create", kind, status=503, times=1))
    request = at_daytona.request()
    with pytest.raises(ProviderUnavailable):
        await at_daytona.provider.create(request)
    made = await at_daytona.provider.create(request)
    assert made.state is InstanceState.RUNNING
    await at_daytona.until_names(request.name)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("create", Kind.LOSE_REPLY, times=1),
        Fault("create", Kind.FAIL_AFTER, status=502, times=1),
        Fault("create", Kind.FAIL_AFTER, status=504, times=1),
        Fault("create", Kind.LIE, state="creating", times=1),
        Fault("create", Kind.STUCK, seconds=1, times=1),
    ],
    ids=lambda fault: f"{fault.kind.value}-{fault.status}",
)
async def test_a_create_that_was_done_without_an_answer_is_found_by_its_name(
    at_daytona: Place, stand_in: RunningStandIn, fault: Fault
) -> None:
    stand_in.faults.add(fault)
    made = await at_daytona.create()
    assert made.state is InstanceState.RUNNING
    assert await at_daytona.names() == [made.name]
    assert len(stand_in.log.of("call", call="create")) == 1
    assert stand_in.faults.counts()[fault.kind.value] == 1


async def test_a_create_that_takes_longer_than_the_sdk_waits_is_found_by_its_name(
    scratch: Path, http: aiohttp.ClientSession
) -> None:
    async with StandIn.running(scratch / "slow", delays=Delays(create=(1.6, 1.6))) as slow:
        place = Place(await connect(slow, scratch, slice_seconds=1.0, create_seconds=20.0, call_seconds=2.0), http)
        made = await place.create()
        assert made.state is InstanceState.RUNNING
        assert len(slow.log.of("call", call="create")) == 1
        await place.clear()
        await place.provider.close()


async def test_one_that_breaks_while_it_is_made_is_told_with_its_reason_and_removed(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    stand_in.faults.add(Fault("create", Kind.BREAK, message="no runner has room", times=1))
    with pytest.raises(ProviderError, match="no runner has room"):
        await at_daytona.create()
    await at_daytona.until_names()
    await eventually(lambda: stand_in.log.of("state", new="destroyed"))


async def test_one_that_never_comes_up_is_given_up_in_time_and_removed_when_that_can_be_done(
    stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession
) -> None:
    stand_in.faults.add(Fault("create", Kind.STUCK, times=1))
    provider = await connect(
        stand_in, scratch, slice_seconds=1.0, create_seconds=2.5, call_seconds=1.0, clean_up_seconds=10.0
    )
    place = Place(provider, http)
    with pytest.raises(ProviderUnavailable, match="stays creating"):
        await place.create()
    assert len(await place.names()) == 1
    stand_in.release()
    await place.until_names()
    await provider.close()


async def test_one_that_comes_after_its_create_was_given_up_is_removed(
    scratch: Path, http: aiohttp.ClientSession
) -> None:
    async with StandIn.running(scratch / "slow", delays=Delays(create=(0.4, 0.4))) as slow:
        place = Place(await connect(slow, scratch), http)
        task = asyncio.create_task(place.create())
        await eventually(lambda: slow.log.of("state", new="creating"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await place.until_names()
        assert slow.log.of("state", new="destroyed")
        await place.provider.close()


async def test_a_name_that_is_taken_is_told_and_what_has_it_is_left_alone(
    at_daytona: Place, stand_in: RunningStandIn
) -> None:
    request = at_daytona.request()
    made = await at_daytona.provider.create(request)
    daemon, _, _ = await at_daytona.daemon(made)
    for fault in (None, Fault("create", Kind.DROP, times=1), Fault("create", Kind.STATUS, status=500, times=1)):
        if fault is not None:
            stand_in.faults.add(fault)
        with pytest.raises(NameTaken):
            await at_daytona.provider.create(request)
        await given_up(at_daytona.provider.create(request), 40)
    await asyncio.sleep(0.3)  # for whatever might still take it away
    assert await daemon.health() == 200
    assert await at_daytona.names() == [request.name]


async def test_of_two_processes_that_create_one_name_one_makes_it(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    other = await connect(stand_in, scratch)
    for _ in range(3):
        request = at_daytona.request()
        stand_in.faults.add(Fault("create", Kind.LOSE_REPLY, times=1))
        ended = await results(at_daytona.provider.create(request), other.create(request))
        assert ended == ["Instance", "NameTaken"]
        await at_daytona.provider.delete(request.name)
    await other.close()


async def test_a_quota_is_a_refusal_that_names_the_resources(scratch: Path, http: aiohttp.ClientSession) -> None:
    async with StandIn.running(scratch / "small", quotas=Quotas(cpu=1, cpu_each=4), snapshots=["there"]) as small:
        place = Place(await connect(small, scratch, snapshot="there"), http)
        first = await place.create()
        with pytest.raises(ProviderRefused) as caught:
            await place.create()
        assert caught.value.field == "resources"
        with pytest.raises(ProviderRefused) as caught:
            await place.provider.create(place.request(image="debian:12", cpus=9))
        assert caught.value.field == "resources"
        with pytest.raises(ProviderRefused) as caught:
            await place.provider.create(place.request(snapshot="not-there"))
        assert caught.value.field == "snapshot"
        # A start that the quota forbids does not go on for ever.
        await place.provider.stop(first.provider_id)
        second = await place.create()
        with pytest.raises(ProviderRefused, match="limit exceeded"):
            await asyncio.wait_for(place.provider.start(first.provider_id), 10)
        assert await place.names() == sorted([first.name, second.name])
        await place.clear()
        await place.provider.close()


async def test_the_api_key_is_in_no_message_and_a_wrong_one_is_said_to_be_wrong(
    stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession
) -> None:
    key = f"dtn_{new_id()}"
    place = Place(await connect(stand_in, scratch, api_key=Secret(key), volume=""), http)
    for work in (place.create(), place.names(), place.provider.get("anything")):
        with pytest.raises(ProviderError) as caught:
            await work
        assert "API key" in str(caught.value)
        assert not isinstance(caught.value, ProviderUnavailable | ProviderRefused)
        assert key not in repr(caught.value)
    assert key not in repr(place.provider)
    await place.provider.close()


async def test_a_wrong_address_never_proves_that_something_is_gone(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    made = await at_daytona.create()
    for url in (stand_in.url.removesuffix("/api"), f"{stand_in.url}/v2", "http://127.0.0.1:1/api"):
        elsewhere = await connect(stand_in, scratch, api_url=url, call_seconds=1.0, delete_seconds=1.0)
        for work in (elsewhere.get(made.provider_id), elsewhere.delete(made.provider_id)):
            with pytest.raises(ProviderUnavailable):
                await work
        await elsewhere.close()
    assert await at_daytona.names() == [made.name]
