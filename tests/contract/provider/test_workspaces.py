"""Workspaces outlive stops and instances, are one for each session, and end when they are deleted."""

from __future__ import annotations

from pathlib import PurePosixPath

from services.sandbox.rows import Key
from tests.contract.provider.places import Place


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
        await place.provider.start(instance.provider_id)
        daemon, _, _ = await place.daemon(instance)
        assert (await daemon.run("cat", f"{workspace}/kept"))["stdout"].count("turn") == turn + 1
        await place.provider.delete(instance.provider_id)
    await place.provider.delete_workspace(place.key)
    await place.provider.delete_workspace(place.key)
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    assert (await daemon.run("ls", "-A", workspace))["stdout"].split() in ([], [".home"])


async def test_the_end_of_one_workspace_leaves_its_neighbours(place: Place) -> None:
    other = Key(place.key.project, f"{place.key.session}-other")
    instance = await place.provider.create(place.request(key=other))
    request = place.daemon_request(key=other)
    address = await place.provider.restart_daemon(instance.provider_id, request)
    daemon = place.caller(address, request.token.reveal())
    workspace = place.provider.workspace(other)
    await daemon.run("sh", "-c", f"echo mine > {workspace}/kept")
    await place.provider.delete_workspace(place.key)
    assert (await daemon.run("cat", f"{workspace}/kept"))["stdout"] == "mine\n"


def test_no_name_of_a_session_climbs_out_of_its_directory(place: Place) -> None:
    keys = [Key(*pair) for pair in (("a", "b"), ("..", ".."), ("a", ".."), ("a:b", "c"), ("a", "b:c"), (".", "x"))]
    paths = [PurePosixPath(place.provider.workspace(key)) for key in keys]
    top = paths[0].parent.parent
    assert len(set(paths)) == len(keys)
    for path in paths:
        assert path.parent.parent == top
        assert ".." not in path.parts
