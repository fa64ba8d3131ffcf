"""The stand-in of Daytona, called by the real SDK: the life of a sandbox, and the rules of the server on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    CreateSecretParams,
    DaytonaAuthenticationError,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaError,
    DaytonaForbiddenError,
    DaytonaNotFoundError,
    DaytonaUnprocessableEntityError,
    ListSandboxesQuery,
    Resources,
    UpdateSecretParams,
    VolumeMount,
)

from tests.support.daytona import Delays, RunningStandIn, StandIn
from tests.support.daytona.client import connected
from tests.support.daytona.limits import Quotas
from tests.support.daytona.processes import marked
from tests.support.waiting import eventually


@pytest_asyncio.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[RunningStandIn]:
    async with StandIn.running(tmp_path / "daytona") as running:
        yield running


@pytest_asyncio.fixture
async def client(stand_in: RunningStandIn) -> AsyncIterator[AsyncDaytona]:
    async with connected(stand_in) as connection:
        yield connection


async def refused(call: Awaitable[object], error: type[DaytonaError], words: str) -> None:
    """Assert that a call is refused so, and says why."""
    with pytest.raises(error) as caught:
        await call
    assert words in str(caught.value)


async def make(client: AsyncDaytona, name: str = "", **more: object) -> AsyncSandbox:
    """A sandbox that runs."""
    return await client.create(CreateSandboxFromSnapshotParams(name=name or None, **more))  # type: ignore[arg-type]


async def test_a_sandbox_is_created_found_stopped_started_and_deleted(
    client: AsyncDaytona, stand_in: RunningStandIn
) -> None:
    made = await make(client, "one", env_vars={"A": "1"}, labels={"k": "v"}, auto_stop_interval=7)
    assert (made.name, made.state, made.auto_stop_interval) == ("one", "started", 7)
    assert stand_in.running() == 1

    for reference in (made.id, "one"):
        found = await client.get(reference)
        assert (found.id, found.labels["k"], found.env) == (made.id, "v", {"A": "1"})

    await made.stop(timeout=20)
    assert made.state == "stopped"
    assert stand_in.running() == 0
    assert not marked(made.id)

    await made.start(timeout=20)
    assert (made.state, stand_in.running()) == ("started", 1)

    await made.delete(timeout=20, wait=True)
    assert stand_in.running() == 0
    await refused(client.get(made.id), DaytonaNotFoundError, "not found")
    await refused(client.get("one"), DaytonaNotFoundError, "not found")
    assert not stand_in.sandboxes()
    states = [entry.data["new"] for entry in stand_in.log.of("state")]
    assert states == [
        *("creating", "started", "stopping", "stopped", "starting", "started", "destroying", "destroyed"),
    ]


async def test_what_the_state_does_not_allow_is_refused(client: AsyncDaytona) -> None:
    made = await make(client)
    await refused(made.start(timeout=5), DaytonaBadRequestError, "not in valid state")
    await refused(made.archive(), DaytonaBadRequestError, "not stopped")
    await refused(made.recover(timeout=5), DaytonaBadRequestError, "error state")
    await refused(made.pause(timeout=5), DaytonaUnprocessableEntityError, "class container")
    await made.stop(timeout=20)
    await refused(made.stop(timeout=5), DaytonaBadRequestError, "not in a stoppable state")
    await made.delete(timeout=20, wait=True)
    await refused(made.delete(timeout=5), DaytonaNotFoundError, "not found")
    await refused(made.start(timeout=5), DaytonaNotFoundError, "not found")


async def test_while_a_sandbox_changes_its_state_it_takes_no_other_order(tmp_path: Path) -> None:
    delays = Delays(stop=(5.0, 5.0), delete=(5.0, 5.0))
    async with StandIn.running(tmp_path, delays=delays) as stand_in, connected(stand_in) as client:
        made, other = await make(client, "made"), await make(client, "other")
        stopping = asyncio.create_task(made.stop(timeout=20))
        await eventually(lambda: stand_in.sandbox(made.id).state == "stopping")
        rival = await client.get(made.id)
        for call in (rival.start(timeout=5), rival.stop(timeout=5), rival.delete(timeout=5)):
            await refused(call, DaytonaConflictError, "state change in progress")
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

        # A name is free, and leads nowhere, as soon as its sandbox is told to go; by its id it is still there.
        await other.delete(timeout=5)
        assert (await client.get(other.id)).state == "destroying"
        await refused(client.get("other"), DaytonaNotFoundError, "not found")
        again = await make(client, "other")
        assert again.id != other.id


async def test_a_name_is_given_once(client: AsyncDaytona) -> None:
    await make(client, "one")
    await refused(make(client, "one"), DaytonaConflictError, "already exists")


async def test_listing_goes_by_labels_over_pages(client: AsyncDaytona) -> None:
    names = [f"s{number}" for number in range(5)]
    await asyncio.gather(*(make(client, name, labels={"of": "us", "name": name}) for name in names))
    await make(client, "other", labels={"of": "them"})
    query = ListSandboxesQuery(labels={"of": "us"}, limit=2)
    found = [sandbox async for sandbox in client.list(query)]
    assert sorted(sandbox.name for sandbox in found) == names
    one = [sandbox async for sandbox in client.list(ListSandboxesQuery(labels={"of": "us", "name": "s3"}))]
    assert [sandbox.name for sandbox in one] == ["s3"]
    assert [sandbox async for sandbox in client.list(ListSandboxesQuery(labels={"of": "nobody"}))] == []


async def test_settings_of_a_sandbox_are_changed(client: AsyncDaytona) -> None:
    made = await make(client, labels={"a": "1"}, network_block_all=True)
    assert made.network_block_all is True
    await made.set_labels({"b": "2", "code-toolbox-language": "python"})
    await made.set_autostop_interval(3)
    await made.set_auto_delete_interval(-1)
    await made.set_auto_archive_interval(60)
    await made.set_ttl(90)
    await made.update_network_settings(network_allow_list="10.0.0.0/8,192.168.1.1/32")
    await made.refresh_activity()
    found = await client.get(made.id)
    assert found.labels == {"b": "2", "code-toolbox-language": "python"}
    assert (found.auto_stop_interval, found.auto_delete_interval, found.auto_archive_interval) == (3, -1, 60)
    assert (found.network_block_all, found.network_allow_list) == (True, "10.0.0.0/8,192.168.1.1/32")
    await made.update_network_settings(network_block_all=False)
    found = await client.get(made.id)
    assert (found.network_block_all, found.network_allow_list) == (False, None)
    await refused(made.update_network_settings(network_allow_list="nonsense"), DaytonaBadRequestError, "CIDR")


async def test_only_the_key_opens(stand_in: RunningStandIn) -> None:
    async with connected(stand_in, api_key="dtn_wrong") as stranger:
        await refused(make(stranger), DaytonaAuthenticationError, "Invalid credentials")
    assert not stand_in.sandboxes()


async def test_an_image_is_built_and_takes_resources(client: AsyncDaytona) -> None:
    params = CreateSandboxFromImageParams(image="debian:12", resources=Resources(cpu=2, memory=4, disk=8))
    made = await client.create(params, timeout=20)
    # An event ends the SDK's wait; a look that was under way then may still show it an older state.
    await made.refresh_data()
    assert (made.state, made.cpu, made.memory, made.disk) == ("started", 2, 4, 8)
    assert made.build_info is not None
    await refused(make(client, "x", auto_stop_interval=1, volumes=[_mount("nothing", "/x")]), DaytonaNotFoundError, "")


async def test_quotas_and_unknown_snapshots_are_refused(tmp_path: Path) -> None:
    quotas = Quotas(cpu=2, cpu_each=4)
    async with StandIn.running(tmp_path, quotas=quotas, snapshots=["mine"]) as stand_in, connected(stand_in) as client:
        await refused(make(client, snapshot="theirs"), DaytonaBadRequestError, "Snapshot theirs not found")
        first = await make(client, snapshot="mine")
        await make(client, snapshot="mine")
        await refused(make(client, snapshot="mine"), DaytonaForbiddenError, "Total CPU limit exceeded")
        big = CreateSandboxFromImageParams(image="debian:12", resources=Resources(cpu=8))
        await refused(client.create(big), DaytonaBadRequestError, "per sandbox")
        # What is stopped holds no processor.
        await first.stop(timeout=20)
        await make(client, snapshot="mine")


async def test_an_ephemeral_sandbox_goes_when_it_stops(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    made = await make(client, ephemeral=True)
    await made.stop(timeout=20)
    assert made.state == "destroyed"
    await eventually(lambda: not stand_in.sandboxes())


async def test_archive_and_restore(client: AsyncDaytona) -> None:
    made = await make(client)
    await made.process.exec("echo kept > file")
    await made.stop(timeout=20)
    await made.archive()
    while made.state != "archived":
        await made.refresh_data()
    await made.start(timeout=20)
    assert (await made.process.exec("cat file")).result == "kept\n"


async def test_timers_stop_and_delete_what_nobody_uses(tmp_path: Path) -> None:
    async with StandIn.running(tmp_path, minute=0.4) as stand_in, connected(stand_in) as client:
        made = await make(client, auto_stop_interval=1, auto_delete_interval=1)
        kept = await make(client, auto_stop_interval=0)
        await eventually(lambda: len(stand_in.sandboxes()) == 1)
        timers = [entry.data["which"] for entry in stand_in.log.of("timer") if entry.sandbox == made.id]
        assert timers == ["auto-stop", "auto-delete"]
        assert stand_in.sandbox(kept.id).state == "started"


async def test_activity_puts_auto_stop_off(tmp_path: Path) -> None:
    async with StandIn.running(tmp_path, minute=2.0) as stand_in, connected(stand_in) as client:
        used, looked_at = await make(client, auto_stop_interval=1), await make(client, auto_stop_interval=1)
        # Looking at it and going through the preview proxy do not count.
        while stand_in.sandbox(looked_at.id).state == "started":
            await used.refresh_activity()
            await looked_at.refresh_data()
            await asyncio.sleep(0.05)
        assert stand_in.sandbox(used.id).state == "started"


async def test_volumes_outlive_sandboxes_and_are_seen_by_subpath(
    client: AsyncDaytona, stand_in: RunningStandIn, tmp_path: Path
) -> None:
    volume = await client.volume.get("work", create=True)
    assert (await client.volume.get("work")).id == volume.id
    path = str(tmp_path / "mounts" / "p" / "s")
    made = await make(client, volumes=[_mount(volume.id, path, "p/s")])
    await made.process.exec(f"echo kept > {path}/file")
    assert (stand_in.volumes.path(volume.id) / "p/s/file").read_text() == "kept\n"
    await refused(client.volume.delete(volume), DaytonaConflictError, "in use")
    await made.delete(timeout=20, wait=True)
    assert not (tmp_path / "mounts").exists()
    again = await make(client, volumes=[_mount(volume.id, path, "p/s")])
    assert (await again.process.exec(f"cat {path}/file")).result == "kept\n"
    await again.delete(timeout=20, wait=True)
    await client.volume.delete(volume)
    assert await client.volume.list() == []
    for wrong in ("relative", "/", "/etc/x", "/a//b", "/a/../b"):
        await refused(make(client, volumes=[_mount(volume.id, wrong)]), DaytonaBadRequestError, "Invalid mount path")


async def test_secrets_show_as_placeholders(client: AsyncDaytona) -> None:
    secret = await client.secret.create(CreateSecretParams(name="key", value="s3cret", hosts=["api.example.com"]))
    made = await make(client, secrets={"API_KEY": "key"})
    assert (await made.process.exec("printf %s $API_KEY")).result == secret.placeholder
    changed = await client.secret.update(secret.id, UpdateSecretParams(value="other"))
    assert (changed.id, changed.placeholder) == (secret.id, secret.placeholder)
    assert [one.name for one in (await client.secret.list()).items] == ["key"]
    await client.secret.delete(secret.id)
    await refused(make(client, secrets={"API_KEY": "key"}), DaytonaBadRequestError, "not found")


async def test_nothing_is_left_when_it_ends(tmp_path: Path) -> None:
    mount = tmp_path / "elsewhere" / "mount"
    async with StandIn.running(tmp_path / "daytona") as stand_in, connected(stand_in) as client:
        volume = await client.volume.get("work", create=True)
        made = [await make(client, volumes=[_mount(volume.id, str(mount))]) for _ in range(2)]
        for one in made:
            await one.process.exec("setsid sleep 1000 >/dev/null 2>&1 &")
            assert len(marked(one.id)) >= 2
        assert mount.is_symlink()
    assert not any(marked(one.id) for one in made)
    assert not mount.parent.exists()


def _mount(volume: str, path: str, subpath: str | None = None) -> VolumeMount:
    return VolumeMount.model_validate({"volume_id": volume, "mount_path": path, "subpath": subpath})
