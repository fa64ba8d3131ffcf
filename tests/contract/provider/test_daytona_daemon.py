"""The daemon in a sandbox at Daytona: how it is started, what happens when it does not come up, where secrets go."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from hearth.secret import hidden
from services.sandbox.compatibility import AgentCommand
from services.sandbox.providers.daytona_options import SANDBOX_AGENT
from services.sandbox.providers.port import DaemonFailed, ProviderError, StillAlive
from tests.contract.provider.places import AGENTD, AGENTS, Place, connect
from tests.support.daytona import Fault, Kind, RunningStandIn, StandIn
from tests.support.exhaustive import sampled
from tests.support.harness import sandbox_agent_binary
from tests.support.sandboxes import INITIALIZE, STUBBORN_AGENT, alive

TROUBLES = {
    "429": Fault("execute", Kind.STATUS, status=429, retry_after=0.1, times=1),
    "500": Fault("execute", Kind.STATUS, status=500, times=1),
    "drop": Fault("execute", Kind.DROP, times=1),
    "lost": Fault("execute", Kind.LOSE_REPLY, times=1),
    "502-after": Fault("execute", Kind.FAIL_AFTER, status=502, times=1),
    "slow": Fault("execute", Kind.DELAY, seconds=1.0, times=1),
    "preview-url-429": Fault("preview_url", Kind.STATUS, status=429, retry_after=0.1, times=1),
    "preview-url-lost": Fault("preview_url", Kind.LOSE_REPLY, times=1),
    "preview-502": Fault("preview", Kind.STATUS, status=502, times=3),
    "preview-drop": Fault("preview", Kind.DROP, times=3),
    "preview-401": Fault("preview", Kind.STATUS, status=401, times=3),
    "get-500": Fault("get", Kind.STATUS, status=500, times=3),
}


@pytest.mark.parametrize("name", sampled(TROUBLES, every=3))
async def test_a_restart_gets_through_any_trouble_of_the_way_in(
    at_daytona: Place, stand_in: RunningStandIn, name: str
) -> None:
    instance = await at_daytona.create()
    _, _, old = await at_daytona.daemon(instance)
    stand_in.faults.add(TROUBLES[name])
    daemon, address, _ = await at_daytona.daemon(instance)
    assert await daemon.health() == 200
    assert await at_daytona.caller(address, old).health() == 401
    assert await at_daytona.provider.endpoint(instance.provider_id) == address


async def test_the_token_of_the_preview_is_asked_anew_after_a_start(at_daytona: Place) -> None:
    instance = await at_daytona.create()
    _, before, _ = await at_daytona.daemon(instance)
    await at_daytona.provider.stop(instance.provider_id)
    await at_daytona.provider.start(instance.provider_id)
    daemon, after, token = await at_daytona.daemon(instance)
    assert after != before
    assert await daemon.health() == 200
    assert await at_daytona.caller(before, token).health() == 401
    assert set(after.headers) == {"X-Daytona-Preview-Token"}


async def test_what_cannot_be_shown_dead_is_told_and_no_daemon_starts_beside_it(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    instance = await at_daytona.create()
    _, address, token = await at_daytona.daemon(instance)
    # Without a moment to kill them in, those of the old daemon are there to the end.
    hasty = Place(await connect(stand_in, scratch, grace_seconds=0.0, kill_seconds=0.0), at_daytona.http)
    hasty.key = at_daytona.key
    with pytest.raises(StillAlive, match=r"\d+"):
        await hasty.daemon(instance)
    assert await at_daytona.caller(address, token).health() == 200
    await hasty.provider.close()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("no-such-program",), "not found|No such file"),
        (("sh", "-c", "echo went wrong with $HIDDEN and $HEARTH_AGENTD_TOKEN >&2; exit 3"), "went wrong with"),
        (("sleep", "60"), "does not answer"),
    ],
    ids=["missing", "ends", "silent"],
)
async def test_a_daemon_that_does_not_come_up_is_told_with_its_log_and_without_secrets(
    stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession, command: tuple[str, ...], told: str
) -> None:
    place = Place(await connect(stand_in, scratch, daemon=command, daemon_seconds=2.0), http)
    instance = await place.create()
    request = place.daemon_request()
    with pytest.raises(DaemonFailed, match=told) as caught:
        await place.provider.restart_daemon(instance.provider_id, request)
    for secret in (request.token.reveal(), "hidden value"):
        assert secret not in repr(caught.value)
    await place.clear()
    await place.provider.close()


async def test_w_s01_secrets_are_in_the_environment_of_the_daemon_and_nowhere_else(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    instance = await at_daytona.create()
    secret, plain = "s3cret-of-the-user", "plain-of-the-spec"
    request = at_daytona.daemon_request(
        secrets=hidden({"HIDDEN": secret}),
        env=hidden({"PLAIN": plain}),
        agents={"any": AgentCommand(("true",), hidden({"OWN": "own-of-agent"}))},
    )
    address = await at_daytona.provider.restart_daemon(instance.provider_id, request)
    daemon = at_daytona.caller(address, request.token.reveal())
    assert secret in (await daemon.run("env"))["stdout"]
    files = [path for path in scratch.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    for path in files:
        content = path.read_bytes()
        for planted in (secret, request.token.reveal(), "own-of-agent"):
            assert planted.encode() not in content, path
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    commands = [str(entry.data["command"]) for entry in stand_in.log.of("process")]
    assert commands
    for text in (*lines, *commands, repr(request), json.dumps([dict(e.data) for e in stand_in.log], default=str)):
        assert secret not in text
        assert request.token.reveal() not in text
        assert plain not in text


async def test_an_error_of_a_command_tells_no_secret(at_daytona: Place, stand_in: RunningStandIn) -> None:
    instance = await at_daytona.create()
    request = at_daytona.daemon_request()
    message = f"cannot run it with hidden value and {request.token.reveal()} and {stand_in.api_key}"
    stand_in.faults.add(Fault("execute", Kind.STATUS, status=400, message=message))
    with pytest.raises(ProviderError) as caught:
        await at_daytona.provider.restart_daemon(instance.provider_id, request)
    assert "cannot run it" in str(caught.value)
    for secret in ("hidden value", request.token.reveal(), stand_in.api_key):
        assert secret not in repr(caught.value)


async def test_another_process_takes_over_a_sandbox_that_it_did_not_make(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    instance = await at_daytona.create()
    daemon, _, old = await at_daytona.daemon(instance)
    pids = await at_daytona.stubborn(daemon)
    other = Place(await connect(stand_in, scratch), at_daytona.http)
    other.key = at_daytona.key
    daemon, address, _ = await other.daemon(instance)
    assert await daemon.health() == 200
    assert await at_daytona.caller(address, old).health() == 401
    assert [pid for pid in pids if alive(pid)] == []
    await other.provider.close()


async def test_of_two_processes_that_take_over_at_once_at_most_one_daemon_is_left(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path
) -> None:
    instance = await at_daytona.create()
    other = Place(await connect(stand_in, scratch), at_daytona.http)
    other.key = at_daytona.key
    requests = [at_daytona.daemon_request() for _ in range(2)]
    await asyncio.gather(
        at_daytona.provider.restart_daemon(instance.provider_id, requests[0]),
        other.provider.restart_daemon(instance.provider_id, requests[1]),
        return_exceptions=True,
    )
    address = await at_daytona.provider.endpoint(instance.provider_id)
    answers = [await at_daytona.caller(address, request.token.reveal()).health() for request in requests]
    assert answers.count(200) <= 1
    daemon, _, _ = await at_daytona.daemon(instance)
    assert await daemon.health() == 200
    assert [await at_daytona.caller(address, request.token.reveal()).health() for request in requests] == [401, 401]
    await other.provider.close()


@pytest.mark.parametrize("state", ["stopped", "unknown"])
async def test_a_lie_about_the_state_costs_a_restart_another_look(
    at_daytona: Place, stand_in: RunningStandIn, scratch: Path, http: aiohttp.ClientSession, state: str
) -> None:
    instance = await at_daytona.create()
    # It knows nothing of the sandbox, so it looks.
    other = Place(await connect(stand_in, scratch), http)
    lie = stand_in.faults.add(Fault("get", Kind.LIE, state=state, times=1))
    daemon, _, _ = await other.daemon(instance)
    assert lie.fired == 1
    assert await daemon.health() == 200
    await other.provider.close()


async def test_a_sandbox_that_stops_under_a_restart_is_told(at_daytona: Place, stand_in: RunningStandIn) -> None:
    instance = await at_daytona.create()
    stand_in.kill(instance.provider_id)
    with pytest.raises(ProviderError, match=r"error|not started"):
        await asyncio.wait_for(at_daytona.daemon(instance), 20)


async def test_the_toolbox_is_found_where_a_lookup_does_not_tell_it(
    at_daytona: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await at_daytona.create()
    handle = at_daytona.provider._sdk._handles[instance.provider_id]  # type: ignore[attr-defined]
    monkeypatch.setattr(handle, "toolbox_proxy_url", "")
    daemon, _, _ = await at_daytona.daemon(instance)
    assert await daemon.health() == 200


async def test_the_real_sandbox_agent_is_started_taken_over_and_leaves_nothing(
    scratch: Path, http: aiohttp.ClientSession
) -> None:
    binary = sandbox_agent_binary()
    async with StandIn.running(scratch / "real", agent_command=[str(binary)]) as stand_in:
        place = Place(await connect(stand_in, scratch, daemon=SANDBOX_AGENT, grace_seconds=0.5), http)
        instance = await place.create()
        # As a snapshot has it: agents that were installed for its user.
        launchers = stand_in.sandbox(instance.provider_id).home / ".local/share/sandbox-agent/bin"
        (launchers / "agent_processes").mkdir(parents=True)
        agent = launchers / "stubborn.py"
        agent.write_text(STUBBORN_AGENT)
        for path, line in (
            (launchers / "claude", "exit 0"),
            (launchers / "agent_processes" / "claude-acp", f'cd "$WORK" && exec {sys.executable} {agent}'),
        ):
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)
        workspace = place.provider.workspace(place.key)
        agents = {
            **AGENTS,
            "claude": AgentCommand(("ignored",), hidden({"WORK": workspace, "SANDBOX_AGENT_BIN": str(binary)})),
        }
        request = place.daemon_request(agents=agents, agent="claude")
        address = await place.provider.restart_daemon(instance.provider_id, request)
        daemon = place.caller(address, request.token.reveal())
        assert await daemon.health() == 200
        assert await place.caller(address, "another").health() == 401
        status, body = await daemon.post("s1", INITIALIZE, agent="claude")
        assert status == 200, body
        pids: list[int] = json.loads(Path(workspace, "pids").read_text())
        assert all(alive(pid) for pid in pids)
        environment = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
        assert f"HOME={workspace}/.home".encode() in environment
        assert b"HIDDEN=hidden value" in environment
        assert not any(entry.startswith(b"HEARTH_AGENTD_TOKEN") for entry in environment)
        # A second holder: the daemon's end alone would leave the agent.
        again = place.daemon_request(agents=agents, agent="claude")
        address = await place.provider.restart_daemon(instance.provider_id, again)
        assert [pid for pid in pids if alive(pid)] == []
        assert await place.caller(address, request.token.reveal()).health() == 401
        assert await place.caller(address, again.token.reveal()).health() == 200
        await place.clear()
        await place.provider.close()


def test_the_command_of_a_daemon_may_need_no_placeholder() -> None:
    assert "{token}" not in AGENTD
    assert "{token}" in SANDBOX_AGENT
