"""What is listed and shown to one project holds nothing of another, whatever it asks for: both have data everywhere."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import json_format

from hearth.client import Client, session_key
from hearth.session.v1 import session_pb2
from services.pool.sealing import new_key
from tests.contract.pool.house import eventually
from tests.security.guarded import OPERATOR, Guarded, entry, guarded
from tests.support.rpcs import RPCS, Rpc
from tests.support.servers import Servers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

READING = [rpc for rpc in RPCS if rpc.name.startswith(("Get", "List", "Read", "Stream"))]
WILDCARDS = ("", "*", "%", "_", ".*")
# Everything is in two of them, so that there is a page after the first.
SESSIONS = ("one", "two")


@dataclasses.dataclass(slots=True)
class Project:
    """One project, and every id and word that is its own."""

    name: str
    token: str
    # What requests name, by the field that names it.
    ids: dict[str, str] = dataclasses.field(default_factory=dict)
    own: set[str] = dataclasses.field(default_factory=set)
    pages: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Two:
    """A stack with two projects that did the same things."""

    stack: Guarded
    mine: Project
    theirs: Project

    async def answer(self, rpc: Rpc, token: str, request: Mapping[str, Any]) -> str:
        """What a call is told, be it an answer or a refusal, as text."""
        message = json_format.ParseDict(dict(request), rpc.request()).SerializeToString()
        call = rpc.on(self.stack.channel(rpc.process, token))(message, timeout=30)
        try:
            found = [one async for one in call] if rpc.streams_out else [await call]
        except Exception as error:  # noqa: BLE001 - whatever it is, it must tell nothing
            return str(error)
        return "".join(json_format.MessageToJson(one) for one in found)


async def fill(stack: Guarded, name: str) -> Project:
    """A project with two sessions, of which each has a turn, a waiting gate and input, a credential and a sandbox."""
    project = Project(name, f"token of {name}")
    stack.grant({f"token of {other}": entry(other, other) for other in ("mine", "theirs")})
    async with Client(stack.addresses(), token=project.token) as client:
        for session in SESSIONS:
            word = f"word-{name}-{uuid.uuid4().hex}"
            key = session_key(name, f"{session}-{name}")
            spec = session_pb2.SessionSpec(
                permissions=session_pb2.PermissionPolicy(default_action=session_pb2.PERMISSION_ACTION_ASK)
            )
            await client.admin.put_credential(name, f"key-{name}-{session}", "value")
            sent = await client.send(key, f"ask rm {json.dumps({'word': word})}", spec=spec)
            execution = sent.started.execution.execution_id
            async with asyncio.timeout(60):
                async for transcript in client.follow(key):
                    if transcript.asked:
                        break
            await client.send(key, word)
            stopped = await client.stop(key, execution_id=execution) if session == "two" else None
            project.own |= {word, key.session, execution, f"key-{name}-{session}"}
            project.ids |= {"execution_id": execution, "session": key.session}
            if stopped is not None:
                project.ids["command_id"] = stopped.command_id
                project.own.add(stopped.command_id)
    async with Client(stack.addresses(), token=OPERATOR) as operator:
        async for sandbox in operator.admin.sandboxes(project=name):
            project.ids["sandbox_id"] = sandbox.sandbox_id
            project.own.add(sandbox.sandbox_id)
    return project


def request(rpc: Rpc, project: str, ids: Mapping[str, str], page_token: str = "") -> dict[str, Any]:
    """A request of an RPC that names these wherever it can name something, for pages of one."""
    session = {"project": project, "session": ids.get("session", "")}
    known: dict[str, Any] = {
        "session": session,
        "sessions": [session],
        "project": project,
        "page_size": 1,
        "page_token": page_token,
        **{name: value for name, value in ids.items() if name != "session"},
    }
    fields = rpc.request.DESCRIPTOR.fields
    found = {field.name: known[field.name] for field in fields if field.name in known}
    if "session" in found and rpc.request.DESCRIPTOR.fields_by_name["session"].message_type is None:
        del found["session"]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(servers: Servers) -> AsyncIterator[Two]:
    environment = {"HEARTH_SECRET_KEY": new_key()}
    async with guarded(servers.scratch(), environment) as stack:
        found = Two(stack, await fill(stack, "mine"), await fill(stack, "theirs"))
        for project in (found.mine, found.theirs):
            for rpc in READING:
                text = await found.answer(rpc, project.token, request(rpc, project.name, project.ids))
                project.pages[rpc.name] = str(_tokens(text))
        yield found


def _tokens(text: str) -> str:
    try:
        return str(json.loads(text).get("nextPageToken", ""))
    except ValueError:
        return ""


def attempts(rpc: Rpc, two: Two) -> Iterator[dict[str, Any]]:
    """Requests by which one project could try to see another."""
    mine, theirs = two.mine, two.theirs
    yield request(rpc, theirs.name, theirs.ids)
    yield request(rpc, mine.name, theirs.ids)
    yield request(rpc, theirs.name, mine.ids)
    for wildcard in WILDCARDS:
        yield request(rpc, wildcard, theirs.ids)
        yield request(rpc, mine.name, {**mine.ids, "session": wildcard})
    made = theirs.pages[rpc.name]
    for token in (made, made[:-1], made[::-1], mine.pages[rpc.name][::-1], _encoded(theirs.name), _encoded("")):
        yield request(rpc, mine.name, mine.ids, token)
        yield request(rpc, "", {}, token)


def _encoded(text: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([text]).encode()).decode()


@pytest.mark.parametrize("rpc", READING, ids=lambda rpc: rpc.name)
async def test_nothing_of_another_project_is_told(rpc: Rpc, two: Two) -> None:
    for asked in attempts(rpc, two):
        told = await two.answer(rpc, two.mine.token, asked)
        named = json.dumps(asked)
        assert not {one for one in two.theirs.own if one in told and one not in named}, asked


async def test_what_is_kept_from_others_is_told_to_its_own(two: Two) -> None:
    for project in (two.mine, two.theirs):
        told = ""
        for rpc in READING:
            for page_token in ("", project.pages[rpc.name]):
                for session in SESSIONS:
                    ids = {**project.ids, "session": f"{session}-{project.name}"}
                    told += await two.answer(rpc, project.token, request(rpc, project.name, ids, page_token))
        assert {one for one in project.own if one not in told} == set()
        assert {rpc for rpc, token in project.pages.items() if token} >= {"ListSessions", "ListCredentials"}


async def test_counters_of_all_are_for_those_who_may_see_all(two: Two) -> None:
    async def stats(token: str) -> dict[str, Any]:
        rpc = next(rpc for rpc in READING if rpc.name == "GetPoolStats")
        found: dict[str, Any] = json.loads(await two.answer(rpc, token, {}))
        return found

    everything, mine = await stats(OPERATOR), await stats(two.mine.token)
    assert everything["turnsByHow"]
    assert set(mine) <= {"holder", "entriesByState"}
    replicas = next(rpc for rpc in READING if rpc.name == "ListReplicas")

    async def told() -> bool:
        # A replica tells how many it has with its next beat.
        return "entries" in await two.answer(replicas, OPERATOR, {})

    await eventually(told)
    assert "entries" not in await two.answer(replicas, two.mine.token, {})
