"""The daemon of an instance: only its token opens it, and a new one starts only after all of the old one is dead."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

import pytest

from hearth.secret import hidden
from services.sandbox.compatibility import AgentCommand
from services.sandbox.daemons import new_token
from services.sandbox.providers.port import ProviderError
from tests.contract.provider.places import AGENTS, Place
from tests.support.sandboxes import INITIALIZE, alive

SLEEPERS = "ps -eo args | grep -c '[s]leep 77.25'"


async def test_the_daemon_answers_to_its_token_only(place: Place) -> None:
    instance = await place.create()
    daemon, address, token = await place.daemon(instance)
    assert await daemon.health() == 200
    assert await place.caller(address, new_token().reveal()).health() == 401
    assert await place.provider.endpoint(instance.provider_id) == address
    assert await place.provider.endpoint(instance.name) == address
    for text in (repr(address), repr(place.daemon_request(token))):
        assert token not in text
        assert not address.headers or all(value not in text for value in address.headers.values())


async def test_a_new_daemon_takes_over_from_one_that_is_dead_with_all_it_started(place: Place) -> None:
    instance = await place.create()
    daemon, old_address, old_token = await place.daemon(instance)
    await daemon.run("sh", "-c", "setsid sleep 77.25 >/dev/null 2>&1 &")
    assert (await daemon.run("sh", "-c", SLEEPERS))["stdout"].strip() == "1"
    daemon, address, _ = await place.daemon(instance)
    assert await daemon.health() == 200
    assert await place.caller(address, old_token).health() == 401
    assert await place.caller(old_address, old_token).health() != 200
    assert (await daemon.run("sh", "-c", SLEEPERS))["stdout"].strip() == "0"


async def test_an_agent_that_ignores_the_end_of_its_input_and_sigterm_does_not_survive_a_change_of_holder(
    place: Place,
) -> None:
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    pids = await place.stubborn(daemon)
    daemon, _, _ = await place.daemon(instance)
    assert [pid for pid in pids if alive(pid)] == []
    assert await daemon.health() == 200


async def test_it_does_not_survive_a_stop_or_a_delete_either(place: Place) -> None:
    instance = await place.create()
    for end in (place.provider.stop, place.provider.delete):
        await place.provider.start(instance.provider_id)
        daemon, _, _ = await place.daemon(instance)
        pids = await place.stubborn(daemon)
        await end(instance.provider_id)
        assert [pid for pid in pids if alive(pid)] == []


async def test_what_lives_in_another_instance_is_left_alone(place: Place) -> None:
    mine, other = await place.create(), await place.create()
    bystander, _, _ = await place.daemon(other)
    for _ in range(2):
        await place.daemon(mine)
    assert await bystander.health() == 200
    await place.provider.delete(mine.provider_id)
    assert await bystander.health() == 200


async def test_of_two_restarts_at_once_one_daemon_is_left(place: Place) -> None:
    instance = await place.create()
    await place.daemon(instance)
    tokens = [new_token().reveal(), new_token().reveal()]
    await asyncio.gather(*(place.daemon(instance, token) for token in tokens), return_exceptions=True)
    address = await place.provider.endpoint(instance.provider_id)
    answers = [await place.caller(address, token).health() for token in tokens]
    assert sorted(answers) in ([200, 401], [0, 0], [401, 401], [502, 502])
    daemon, _, _ = await place.daemon(instance)
    assert await daemon.health() == 200


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


async def test_agents_get_their_own_variables_and_those_of_the_spec(place: Place) -> None:
    code = (
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    names = ('OF_AGENT', 'PLAIN', 'HIDDEN', 'HOME')\n"
        "    found = {name: os.environ.get(name) for name in names}\n"
        "    reply = {'jsonrpc': '2.0', 'id': json.loads(line)['id'], 'result': {'cwd': os.getcwd(), **found}}\n"
        "    print(json.dumps(reply), flush=True)\n"
    )
    agents = {**AGENTS, "telling": AgentCommand((sys.executable, "-c", code), hidden({"OF_AGENT": "own"}))}
    instance = await place.create()
    request = place.daemon_request(agents=agents)
    address = await place.provider.restart_daemon(instance.provider_id, request)
    status, body = await place.caller(address, request.token.reveal()).post("t", INITIALIZE, agent="telling")
    assert status == 200, body
    workspace = place.provider.workspace(place.key)
    for wanted in ('"OF_AGENT": "own"', '"PLAIN": "plain value"', '"HIDDEN": "hidden value"'):
        assert wanted.replace(" ", "") in body.decode().replace(" ", "") or wanted in body.decode()
    assert f'{workspace}/.home"' in body.decode()


async def test_a_login_does_not_outlive_the_daemon_under_which_it_was_made(place: Place) -> None:
    instance = await place.create()
    daemon, _, _ = await place.daemon(instance)
    await daemon.run(
        "sh", "-c", "mkdir -p $HOME/.codex && echo token > $HOME/.codex/auth.json && echo kept > $HOME/.codex/kept"
    )
    daemon, _, _ = await place.daemon(instance)
    seen = await daemon.run("sh", "-c", "ls $HOME/.codex")
    assert seen["stdout"].split() == ["kept"]


async def test_no_daemon_starts_in_an_instance_that_is_stopped(place: Place) -> None:
    instance = await place.create()
    await place.provider.stop(instance.provider_id)
    with pytest.raises(ProviderError):
        await place.provider.restart_daemon(instance.provider_id, place.daemon_request())


async def test_a_secret_is_in_no_error_and_in_no_text_of_a_request(place: Place) -> None:
    request = place.daemon_request(secrets=hidden({"HIDDEN": "hidden value"}))
    assert "hidden value" not in repr(request)
    assert "plain value" not in repr(request)
    assert dataclasses.replace(request, agent="other").agent == "other"
