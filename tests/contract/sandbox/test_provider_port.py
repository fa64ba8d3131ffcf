"""What every provider must do, whatever stands behind it. Run on `local`; another provider adds itself to PLACES."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from services.chassis.clock import SystemClock
from services.sandbox.compatibility import AgentCommand, Spec
from services.sandbox.daemons import new_token
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import (
    Address,
    CreateRequest,
    DaemonRequest,
    Instance,
    InstanceNotFound,
    InstanceState,
    NameTaken,
    Provider,
)
from services.sandbox.rows import Key, instance_name
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandboxes import Daemon, new_id

LABELS = {"hearth-deployment": new_id()}


def local(scratch: Path) -> Provider:
    return LocalProvider(scratch / "sandboxes", SystemClock(), inherit=[RUN_MARKER])


PLACES: dict[str, Callable[[Path], Provider]] = {"local": local}


@dataclass
class Place:
    """A provider under test, and what was made there."""

    provider: Provider
    http: aiohttp.ClientSession
    key: Key

    def request(self, sandbox_id: str, **labels: str) -> CreateRequest:
        spec = Spec(provider=self.provider.name, agent="any")
        return CreateRequest(instance_name(sandbox_id), {**LABELS, **labels}, self.key, spec)

    async def create(self, **labels: str) -> Instance:
        return await self.provider.create(self.request(new_id(), **labels))

    async def daemon(self, instance: Instance, token: str | None = None) -> tuple[Daemon, Address, str]:
        """Start its daemon anew; a caller with the token, the address, the token."""
        token = token or new_token()
        request = DaemonRequest(
            token=token,
            key=self.key,
            agents={"any": AgentCommand(("true",), {"OF_AGENT": "1"})},
            env={"PLAIN": "plain value"},
            secrets={"HIDDEN": "hidden value"},
        )
        address = await self.provider.restart_daemon(instance.provider_id, request)
        return self.caller(address, token), address, token

    def caller(self, address: Address, token: str) -> Daemon:
        endpoint = sandbox_pb2.Endpoint(url=address.url, token=token, headers=address.headers)
        return Daemon(self.http, endpoint)

    async def state(self, instance: Instance) -> InstanceState:
        return (await self.provider.get(instance.provider_id)).state


@pytest_asyncio.fixture(params=sorted(PLACES))
async def place(request: pytest.FixtureRequest, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setenv(RUN_MARKER, marker())
    provider = PLACES[request.param](scratch)
    async with aiohttp.ClientSession() as http:
        yield Place(provider, http, Key("p", f"s-{new_id()}"))
    for instance in await provider.list(LABELS):
        await provider.delete(instance.provider_id)
    assert await provider.list(LABELS) == []
    await provider.close()


async def test_a_new_instance_runs_and_is_found_by_id_name_and_label(place: Place) -> None:
    made = await place.create(mine="yes")
    other = await place.create(mine="no")
    assert made.state is InstanceState.RUNNING
    for reference in (made.provider_id, made.name):
        found = await place.provider.get(reference)
        assert (found.provider_id, found.name, found.state) == (made.provider_id, made.name, InstanceState.RUNNING)
        assert 0 <= found.age < 120
    listed = await place.provider.list({**LABELS, "mine": "yes"})
    assert [instance.provider_id for instance in listed] == [made.provider_id]
    assert {instance.provider_id for instance in await place.provider.list(LABELS)} == {
        made.provider_id,
        other.provider_id,
    }
    assert await place.provider.list({"hearth-deployment": new_id()}) == []


async def test_a_name_is_given_once_also_in_a_race(place: Place) -> None:
    request = place.request(new_id())
    results = await asyncio.gather(*(place.provider.create(request) for _ in range(4)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Instance", *["NameTaken"] * 3]
    with pytest.raises(NameTaken):
        await place.provider.create(request)


async def test_the_daemon_answers_to_its_token_only(place: Place) -> None:
    instance = await place.create()
    daemon, address, _ = await place.daemon(instance)
    assert await daemon.health() == 200
    assert await place.caller(address, new_token()).health() == 401
    assert await place.provider.endpoint(instance.provider_id) == address


async def test_a_new_daemon_takes_over_from_one_that_is_dead_with_all_it_started(place: Place) -> None:
    instance = await place.create()
    daemon, _, old_token = await place.daemon(instance)
    # It says its own id, then lives on in a session of its own.
    await daemon.run("sh", "-c", "setsid sleep 77.25 >/dev/null 2>&1 &")
    assert (await daemon.run("sh", "-c", "ps -eo args | grep -c '[s]leep 77.25'"))["stdout"].strip() == "1"
    daemon, address, _ = await place.daemon(instance)
    assert await daemon.health() == 200
    assert await place.caller(address, old_token).health() == 401
    assert (await daemon.run("sh", "-c", "ps -eo args | grep -c '[s]leep 77.25'"))["stdout"].strip() == "0"


async def test_stop_keeps_the_instance_and_start_brings_it_back(place: Place) -> None:
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    for _ in range(2):
        await place.provider.stop(instance.provider_id)
        assert await place.state(instance) is InstanceState.STOPPED
    assert await daemon.health() in (0, 502, 404)
    for _ in range(2):
        await place.provider.start(instance.provider_id)
        assert await place.state(instance) is InstanceState.RUNNING
    daemon, _, _ = await place.daemon(instance)
    assert await daemon.health() == 200


async def test_the_workspace_outlives_stops_and_instances(place: Place) -> None:
    workspace = place.provider.workspace(place.key)
    for turn in range(3):
        instance = await place.create()
        daemon, _, _ = await place.daemon(instance)
        seen = await daemon.run("sh", "-c", f"cd {workspace} && cat kept 2>/dev/null; echo turn {turn} >> kept")
        assert seen["stdout"].split("\n")[:-1] == [f"turn {before}" for before in range(turn)]
        # What an agent remembers lies below its HOME.
        home = await daemon.run("sh", "-c", "cat $HOME/memory 2>/dev/null; echo $HOME >> $HOME/memory; pwd")
        assert len(home["stdout"].splitlines()) == 1 + turn
        await place.provider.stop(instance.provider_id)
        await place.provider.delete(instance.provider_id)
    await place.provider.delete_workspace(place.key)
    await place.provider.delete_workspace(place.key)
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    assert (await daemon.run("ls", "-A", workspace))["stdout"].split() in ([], [".home"])


async def test_variables_reach_what_runs_there_and_nothing_of_ours_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_POSTGRES_DSN", "postgresql://ours")
    monkeypatch.setenv("SOME_PRIVATE_KEY", "ours")
    instance = await place.create()
    daemon, _, token = await place.daemon(instance)
    environment = (await daemon.run("env"))["stdout"]
    assert "HIDDEN=hidden value" in environment
    assert "HEARTH_POSTGRES_DSN" not in environment
    assert "SOME_PRIVATE_KEY" not in environment
    assert token not in environment


async def test_delete_is_for_any_state_and_may_be_repeated(place: Place) -> None:
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
    assert await daemon.health() in (0, 502, 404)
    await place.provider.delete(instance_name(new_id()))


async def test_what_is_not_there_is_not_found(place: Place) -> None:
    missing = instance_name(new_id())
    provider = place.provider
    for work in (provider.get(missing), provider.start(missing), provider.stop(missing), provider.endpoint(missing)):
        with pytest.raises(InstanceNotFound):
            await work


async def test_activity_may_be_refreshed_at_any_time(place: Place) -> None:
    instance = await place.create()
    await place.provider.refresh_activity(instance.provider_id)
