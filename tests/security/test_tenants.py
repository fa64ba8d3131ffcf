"""Nobody reaches what is not theirs: every RPC without a token, for another project, without the scope, and with all of
it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import json_format

from services.chassis.auth import ANY_PROJECT, hash_token
from services.chassis.errors import from_rpc_error
from services.chassis.scopes import SCOPE_NAMES, SCOPES
from tests.security.table import DENIED, TABLE
from tests.support.cli import running
from tests.support.offering import offer
from tests.support.rpcs import RPCS, Rpc
from tests.support.servers import Servers

MINE, THEIRS = "mine", "theirs"
OPERATOR = "token-of-the-operator"


def token(project: str, scopes: Sequence[str]) -> str:
    """The token of a project with these scopes."""
    return "-".join(("token", "all" if project == ANY_PROJECT else project, *scopes))


def tokens() -> dict[str, dict[str, Any]]:
    """By hash: in each project one with each scope, and one that lacks only that."""
    found: dict[str, dict[str, Any]] = {}
    for project in (MINE, THEIRS, ANY_PROJECT):
        for scope in SCOPE_NAMES:
            for scopes in ([scope], [other for other in SCOPE_NAMES if other != scope]):
                name = token(project, scopes)
                found[hash_token(name)] = {"name": name, "project": project, "scopes": scopes}
    found[hash_token(OPERATOR)] = {"name": "operator", "project": ANY_PROJECT, "scopes": list(SCOPE_NAMES)}
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def channels(servers: Servers) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """To each service of a stack with tokens."""
    directory = servers.scratch()
    auth = directory / "tokens.json"
    auth.write_text(json.dumps(tokens()))
    async with running(directory / ".hearth", {"HEARTH_AUTH_FILE": str(auth), "HEARTH_TOKEN": OPERATOR}) as hearth:
        opened = {name: grpc.aio.insecure_channel(address) for name, address in hearth.addresses().items()}
        yield opened
        for channel in opened.values():
            await channel.close()


async def answer(rpc: Rpc, channel: grpc.aio.Channel, bearer: str, project: str) -> str:
    """What a call is answered: the reason of its refusal, or OK (which is the first response, of a stream)."""
    request = json_format.ParseDict(dict(TABLE[rpc.path].request(project)), rpc.request()).SerializeToString()
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    sent = () if rpc.streams_in else (request,)
    call = rpc.on(channel)(*sent, metadata=metadata, timeout=30)
    try:
        if rpc.streams_in:
            await offer(call, request)
        if rpc.streams_out:
            async for _ in call:
                call.cancel()
                break
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason or error.code().name
    return "OK"


def test_every_rpc_has_a_row_and_a_scope() -> None:
    paths = {rpc.path for rpc in RPCS}
    assert set(TABLE) == paths
    assert set(SCOPES) == paths


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.path)
async def test_only_who_may(rpc: Rpc, channels: dict[str, grpc.aio.Channel]) -> None:
    row, scope, channel = TABLE[rpc.path], SCOPES[rpc.path], channels[rpc.process]
    others = [other for other in SCOPE_NAMES if other != scope]
    assert await answer(rpc, channel, "", MINE) == "TOKEN_INVALID"
    assert await answer(rpc, channel, "no-such-token", MINE) == "TOKEN_INVALID"
    assert await answer(rpc, channel, token(MINE, others), MINE) == "SCOPE_MISSING"
    assert await answer(rpc, channel, token(ANY_PROJECT, others), MINE) == "SCOPE_MISSING"
    other = DENIED if row.everywhere else row.other
    assert await answer(rpc, channel, token(THEIRS, [scope]), MINE) == other
    own = ANY_PROJECT if row.everywhere else MINE
    assert await answer(rpc, channel, token(own, [scope]), MINE) == row.right
