"""S1: at most one instance of a session accepts harness traffic; what was there before is proven dead."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import aiohttp

from hearth.sandbox.v1 import sandbox_pb2
from tests.support.sandboxes import (
    Daemon,
    Sandboxes,
    alive,
    disposition,
    how,
    members,
    new_id,
    start_stubborn,
    state,
    until_dead,
)

ENVIRONMENT = {"HEARTH_PROBE_TIMEOUT": "1"}


async def test_the_life_of_a_sandbox(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    created = await sandboxes.acquire(session, 1, holder=holder)
    assert how(created) == "CREATED"
    assert [stage.stage for stage in created.timings.stages] == ["create", "daemon", "probe"]
    assert await Daemon(http, created.endpoint).health() == 200
    (Path(created.workspace) / "kept").write_text("yes")
    pids = {process.pid for process in members(created.sandbox_id)}

    assert disposition(await sandboxes.release(session, 1)) == "PARKED"
    assert state(await sandboxes.get(created.sandbox_id)) == "RUNNING/PARKED"
    attached = await sandboxes.acquire(session, 2, holder=holder)
    assert how(attached) == "ATTACHED"
    assert (attached.sandbox_id, attached.endpoint) == (created.sandbox_id, created.endpoint)
    assert {process.pid for process in members(created.sandbox_id)} == pids

    assert disposition(await sandboxes.release(session, 2, reason="IDLE_EXPIRED")) == "STOPPED"
    assert members(created.sandbox_id) == []
    restarted = await sandboxes.acquire(session, 3, holder=holder)
    assert how(restarted) == "RESTARTED"
    assert restarted.sandbox_id == created.sandbox_id
    assert restarted.endpoint.token != created.endpoint.token

    assert disposition(await sandboxes.release(session, 3, reason="FAILED_TURN")) == "DELETED"
    assert members(created.sandbox_id) == []
    anew = await sandboxes.acquire(session, 4, holder=holder)
    assert how(anew) == "CREATED"
    assert anew.sandbox_id != created.sandbox_id
    assert anew.workspace == created.workspace
    assert (Path(anew.workspace) / "kept").read_text() == "yes"


async def test_another_holder_gets_a_new_token_and_everything_old_is_dead(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    old = await sandboxes.acquire(session, 1, holder=holder)
    stubborn = await start_stubborn(Daemon(http, old.endpoint), old.workspace)
    before = {process.pid for process in members(old.sandbox_id)}
    await sandboxes.release(session, 1)

    new = await sandboxes.acquire(session, 2, holder=new_id())
    assert how(new) == "RESTARTED"
    assert new.sandbox_id == old.sandbox_id
    assert new.endpoint.token != old.endpoint.token
    assert [pid for pid in {*before, *stubborn} if alive(pid)] == []
    assert await Daemon(http, new.endpoint).health() == 200
    stale = sandbox_pb2.Endpoint(url=new.endpoint.url, token=old.endpoint.token)
    assert await Daemon(http, stale).health() == 401


async def test_a_stop_ends_an_agent_that_does_everything_to_stay(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    stubborn = await start_stubborn(Daemon(http, answer.endpoint), answer.workspace)
    assert disposition(await sandboxes.release(session, 1, reason="IDLE_EXPIRED")) == "STOPPED"
    assert [pid for pid in stubborn if alive(pid)] == []
    assert members(answer.sandbox_id) == []


async def test_so_does_a_delete(sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    stubborn = await start_stubborn(Daemon(http, answer.endpoint), answer.workspace)
    assert disposition(await sandboxes.release(session, 1, reason="KILLED")) == "DELETED"
    assert [pid for pid in stubborn if alive(pid)] == []
    assert members(answer.sandbox_id) == []


async def test_a_lost_daemon_is_started_anew_and_what_it_left_is_killed(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    agent, apart, bare = await start_stubborn(Daemon(http, answer.endpoint), answer.workspace)
    (daemon,) = [process for process in members(answer.sandbox_id) if process.pid not in (agent, apart)]
    os.kill(daemon.pid, signal.SIGKILL)
    await until_dead(daemon.pid)
    again = await sandboxes.acquire(session, 2, holder=holder)
    assert how(again) == "RESTARTED"
    assert again.sandbox_id == answer.sandbox_id
    assert not alive(agent)
    assert not alive(apart)
    # It cleared its environment and may have lost its last ancestor: then nothing tells that it was ours.
    with contextlib.suppress(ProcessLookupError):
        os.kill(bare, signal.SIGKILL)


async def test_a_frozen_daemon_counts_as_lost(sandboxes: Sandboxes, session: str, holder: str) -> None:
    answer = await sandboxes.acquire(session, 1, holder=holder)
    (daemon,) = members(answer.sandbox_id)
    daemon.suspend()
    again = await sandboxes.acquire(session, 2, holder=holder)
    assert how(again) == "RESTARTED"
    assert not alive(daemon.pid)


async def test_another_spec_needs_another_sandbox(sandboxes: Sandboxes, session: str, holder: str) -> None:
    first = await sandboxes.acquire(session, 1, holder=holder)
    spec = sandbox_pb2.SandboxSpec(agent="scripted", env={"NEW": "1"})
    second = await sandboxes.acquire(session, 2, holder=holder, spec=spec)
    assert how(second) == "CREATED"
    assert second.sandbox_id != first.sandbox_id
    assert members(first.sandbox_id) == []
    assert "delete" in [stage.stage for stage in second.timings.stages]


async def test_another_value_needs_another_daemon(
    sandboxes: Sandboxes, session: str, holder: str, http: aiohttp.ClientSession
) -> None:
    def spec(value: str, generation: int = 1) -> sandbox_pb2.SandboxSpec:
        secret = sandbox_pb2.SecretSlot(env_name="KEY", value=f"secret-{value}", generation=generation)
        return sandbox_pb2.SandboxSpec(agent="scripted", env={"PLAIN": value}, secrets=[secret])

    first = await sandboxes.acquire(session, 1, holder=holder, spec=spec("one"))
    second = await sandboxes.acquire(session, 2, holder=holder, spec=spec("two"))
    assert how(second) == "RESTARTED"
    assert second.sandbox_id == first.sandbox_id
    third = await sandboxes.acquire(session, 3, holder=holder, spec=spec("two", generation=2))
    assert how(third) == "CREATED"


async def test_projects_do_not_share_a_session(sandboxes: Sandboxes, session: str, holder: str) -> None:
    one = await sandboxes.acquire(session, 1, holder=holder)
    other = await sandboxes.acquire(session, 1, holder=holder, project="p2")
    assert one.sandbox_id != other.sandbox_id
    assert one.workspace != other.workspace
