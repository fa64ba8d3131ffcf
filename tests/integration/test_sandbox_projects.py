"""A token of one project sees and does nothing in another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio

from services.chassis.auth import hash_token
from tests.conftest import StartService
from tests.support.sandboxes import Sandboxes, new_id, refused, service_environment


class Bearer(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends a token with each call."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._token}")
        return await continuation(details._replace(metadata=metadata), request)


async def test_projects_are_closed_to_each_other(start_service: StartService, migrated_dsn: str, scratch: Path) -> None:
    scopes = ["internal", "admin"]
    tokens = {
        hash_token("of p1"): {"name": "one", "project": "p1", "scopes": scopes},
        hash_token("of p2"): {"name": "two", "project": "p2", "scopes": scopes},
        hash_token("of all"): {"name": "all", "project": "*", "scopes": scopes},
    }
    (scratch / "auth.json").write_text(json.dumps(tokens))
    service = await start_service(
        "services.sandbox",
        **service_environment(migrated_dsn, scratch / "sandboxes", HEARTH_AUTH_FILE=str(scratch / "auth.json")),
    )
    channels = {
        name: grpc.aio.insecure_channel(service.address, interceptors=[Bearer(f"of {name}")])
        for name in ("p1", "p2", "all")
    }
    one, two, every = (Sandboxes(channels[name]) for name in ("p1", "p2", "all"))
    me = new_id()
    mine = await one.acquire("s", holder=me, project="p1")
    theirs = await two.acquire("s", holder=me, project="p2")

    assert (await refused(one.acquire("s", 2, holder=me, project="p2"))).reason == "PROJECT_DENIED"
    assert (await refused(one.release("s", project="p2"))).reason == "PROJECT_DENIED"
    assert (await refused(one.list(project="p2"))).reason == "PROJECT_DENIED"
    assert (await refused(one.usage("p2"))).reason == "PROJECT_DENIED"
    assert (await refused(one.get(theirs.sandbox_id))).reason == "SANDBOX_NOT_FOUND"
    assert (await refused(one.delete(theirs.sandbox_id))).reason == "SANDBOX_NOT_FOUND"
    assert (await refused(one.reconcile())).reason == "PROJECT_DENIED"
    assert (await refused(two.renew(me, ("s", 1, 1)))).reason == "PROJECT_DENIED"

    assert [row.sandbox_id for row in await one.list()] == [mine.sandbox_id]
    assert {row.sandbox_id for row in await every.list()} == {mine.sandbox_id, theirs.sandbox_id}
    assert sum(tier.count for tier in (await one.usage()).tiers) == 1
    assert (await every.reconcile()).checked == 2
    await every.clear()
    for channel in channels.values():
        await channel.close()
