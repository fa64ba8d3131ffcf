"""Credentials of a project: stored sealed, listed by name, given to the agents whose spec names them, and to no other.

What an agent has been given is read from the environment of its process, which no call shows.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_service_pb2
from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from tests.contract.pool.house import Backend, House, eventually, key, summary
from tests.contract.pool.refusals import refused
from tests.support.servers import Servers

VARIABLE = "MODEL_KEY"


def name() -> str:
    """A name that no test used yet."""
    return f"key-{uuid.uuid4().hex[:8]}"


def uses(*credentials: str) -> sessions.SessionSpec:
    """A spec whose agent gets credentials, in variables that are numbered from the second on."""
    return sessions.SessionSpec(
        credentials=[
            sessions.CredentialBinding(credential=one, target=VARIABLE if not number else f"{VARIABLE}_{number}")
            for number, one in enumerate(credentials)
        ]
    )


async def put(
    backend: Backend,
    credential: str,
    value: str,
    *,
    request_id: str = "",
    project: str = "acme",
    expires_in: float | None = None,
) -> sessions.Credential:
    """Store a credential."""
    request = calls.PutCredentialRequest(
        project=project, request_id=request_id or str(uuid.uuid4()), name=credential, value=value
    )
    if expires_in is not None:
        request.expires_at.FromDatetime(datetime.now(UTC) + timedelta(seconds=expires_in))
    return (await backend.sessions.PutCredential(request, timeout=20)).credential


async def delete(backend: Backend, credential: str, *, request_id: str = "", project: str = "acme") -> None:
    """Forget a credential."""
    request = calls.DeleteCredentialRequest(
        project=project, request_id=request_id or str(uuid.uuid4()), name=credential
    )
    await backend.sessions.DeleteCredential(request, timeout=20)


async def listed(backend: Backend, project: str = "acme", **page: Any) -> dict[str, sessions.Credential]:
    """The credentials of a project, by name."""
    answer = await backend.sessions.ListCredentials(calls.ListCredentialsRequest(project=project, **page), timeout=20)
    return {one.name: one for one in answer.credentials}


def agent_of(event: event_pb2.Event) -> int:
    """The process that answered."""
    pid: int = json.loads(summary(event).agent_report_json)["hearth.dev/agent"]["pid"]
    return pid


def given(event: event_pb2.Event, variable: str = VARIABLE) -> str | None:
    """What the agent that answered has in a variable."""
    return psutil.Process(agent_of(event)).environ().get(variable)


async def misses(backend: Backend) -> dict[str, int]:
    """Why turns were not warm so far."""
    return dict((await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest())).misses_by_reason)


async def sandboxes(backend: Backend, session: session_pb2.SessionKey) -> int:
    """How many sandboxes were ever made for a session."""
    request = sandbox_service_pb2.ListSandboxesRequest(
        project=session.project, session=session.session, include_gone=True
    )
    return len((await backend.sandboxes.ListSandboxes(request, timeout=20)).sandboxes)


async def test_they_are_listed_by_name_and_without_value(backend: Backend) -> None:
    project = f"p-{uuid.uuid4().hex[:8]}"
    first = await put(backend, "b", "one", project=project)
    await put(backend, "a", "two", project=project, expires_in=3600)
    again = await put(backend, "b", "three", project=project)
    assert again.generation > first.generation > 0
    found = await listed(backend, project)
    assert list(found) == ["a", "b"]
    assert found["b"] == again
    assert not found["b"].HasField("expires_at")
    assert found["a"].HasField("expires_at")
    assert not any(value in str(found) for value in ("one", "two", "three"))
    page = await backend.sessions.ListCredentials(calls.ListCredentialsRequest(project=project, page_size=1))
    assert [one.name for one in page.credentials] == ["a"]
    assert list(await listed(backend, project, page_token=page.next_page_token)) == ["b"]
    await delete(backend, "a", project=project)
    await delete(backend, "a", project=project)
    assert list(await listed(backend, project)) == ["b"]


async def test_a_request_that_is_repeated_changes_nothing(backend: Backend) -> None:
    credential = name()
    one, two = await asyncio.gather(*(put(backend, credential, "x", request_id=credential) for _ in range(2)))
    assert one == two
    for other in (
        put(backend, credential, "y", request_id=credential),
        put(backend, name(), "x", request_id=credential),
        put(backend, credential, "x", request_id=credential, expires_in=5),
        delete(backend, credential, request_id=credential),
    ):
        error = await refused(other)
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    await delete(backend, credential, request_id=f"{credential}-delete")
    later = await put(backend, credential, "z")
    # A late retry of either is answered, and what came after it stays.
    await delete(backend, credential, request_id=f"{credential}-delete")
    assert await put(backend, credential, "x", request_id=credential) == later
    assert (await listed(backend))[credential] == later
    assert later.generation > one.generation


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("project", {"project": ""}),
        ("request_id", {"request_id": ""}),
        ("name", {"name": ""}),
        ("name", {"name": "a b"}),
        ("name", {"name": "x" * 129}),
        ("value", {"value": ""}),
        ("value", {"value": "a\0b"}),
        ("value", {"value": "x" * (64 * 1024 + 1)}),
    ],
)
async def test_a_wrong_field_is_named_and_no_value_repeated(
    backend: Backend, field: str, changes: dict[str, str]
) -> None:
    request = calls.PutCredentialRequest(project="acme", request_id="r", name="wrong", value="sk-value")
    for changed, value in changes.items():
        setattr(request, changed, value)
    error = await refused(backend.sessions.PutCredential(request))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [found for found, _ in error.field_violations] == [field]
    assert "sk-value" not in error.message
    assert "wrong" not in await listed(backend)


async def test_an_end_must_lie_ahead(backend: Backend) -> None:
    error = await refused(put(backend, "past", "x", expires_in=-1))
    assert [found for found, _ in error.field_violations] == ["expires_at"]
    assert "past" not in await listed(backend)


async def test_w_e10_a_rotated_credential_reaches_the_agent_by_a_new_one(backend: Backend) -> None:
    session, credential, other = key(), name(), name()
    await put(backend, credential, "first")
    await put(backend, other, "same")
    before = await misses(backend)
    first = await backend.run(session, "hello", spec=uses(credential, other))
    assert (given(first), given(first, f"{VARIABLE}_1")) == ("first", "same")
    second = await backend.run(session, "hello")
    assert summary(second).how == "warm"
    await put(backend, credential, "second")
    third = await backend.run(session, "hello")
    fourth = await backend.run(session, "hello")
    assert (given(third), given(third, f"{VARIABLE}_1")) == ("second", "same")
    assert agent_of(third) != agent_of(first)
    assert not psutil.pid_exists(agent_of(first))
    assert [summary(turn).how for turn in (third, fourth)] == ["cold", "warm"]
    # What it was baked into is gone: nothing that held the old value is started again.
    assert summary(third).sandbox_id != summary(first).sandbox_id
    assert (await misses(backend)).get("credentials-rotated", 0) == before.get("credentials-rotated", 0) + 1
    assert (await backend.session(session)).spec == uses(credential, other)


async def test_w_c10_the_same_value_again_keeps_the_agent(backend: Backend) -> None:
    session, credential = key(), name()
    one = await put(backend, credential, "value")
    first = await backend.run(session, "hello", spec=uses(credential))
    two = await put(backend, credential, "value", expires_in=24 * 3600)
    second = await backend.run(session, "hello")
    assert two.generation > one.generation
    assert summary(second).how == "warm"
    assert agent_of(second) == agent_of(first)


async def test_deleted_and_stored_again_is_another_value(backend: Backend) -> None:
    session, credential = key(), name()
    await put(backend, credential, "one")
    await backend.run(session, "hello", spec=uses(credential))
    await delete(backend, credential)
    await put(backend, credential, "two")
    second = await backend.run(session, "hello")
    assert given(second) == "two"


async def test_projects_do_not_share_them(backend: Backend) -> None:
    credential = name()
    await put(backend, credential, "theirs", project="other")
    error = await refused(backend.send(key(), "hello", spec=uses(credential)))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "CREDENTIAL_NOT_FOUND")


async def test_what_is_missing_is_refused_by_name_and_stores_nothing(backend: Backend) -> None:
    session, there, missing = key(), name(), name()
    await put(backend, there, "x")
    error = await refused(backend.send(session, "hello", spec=uses(there, missing)))
    assert error.reason == "CREDENTIAL_NOT_FOUND"
    assert error.metadata["credential"] == missing
    assert [field for field, _ in error.field_violations] == ["spec.credentials[1].credential"]
    assert (await refused(backend.session(session))).reason == "SESSION_NOT_FOUND"


async def test_the_spec_in_force_is_checked_too(backend: Backend) -> None:
    session, credential = key(), name()
    await put(backend, credential, "x")
    first = await backend.run(session, "hello", spec=uses(credential))
    await delete(backend, credential)
    error = await refused(backend.send(session, "hello"))
    assert error.reason == "CREDENTIAL_NOT_FOUND"
    assert len([one for one in await backend.events(session) if one.HasField("execution_started")]) == 1
    second = await backend.run(session, "hello", spec=sessions.SessionSpec())
    assert agent_of(second) != agent_of(first)
    assert given(second) is None


async def test_one_that_expired_is_refused_by_name(backend: Backend) -> None:
    session, credential = key(), name()
    await put(backend, credential, "x", expires_in=0.5)

    async def refused_as_expired() -> bool:
        try:
            sent = await backend.send(session, "hello", spec=uses(credential))
        except grpc.aio.AioRpcError:
            return True
        await backend.settled(session, sent.started.execution.execution_id)
        return False

    await eventually(refused_as_expired)
    error = await refused(backend.send(session, "hello", spec=uses(credential)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CREDENTIAL_EXPIRED")
    assert error.metadata["credential"] == credential
    await put(backend, credential, "y")
    assert given(await backend.run(session, "hello", spec=uses(credential))) == "y"


async def test_what_is_gone_when_its_turn_comes_fails_the_turn_before_anything_starts(backend: Backend) -> None:
    session, credential = key(), name()
    await put(backend, credential, "x")
    sent = await backend.send(session, "sleep 1")
    queued = await backend.send(session, "hello", spec=uses(credential))
    assert queued.HasField("queued")
    await delete(backend, credential)

    async def failed() -> event_pb2.Event | None:
        found = [event for event in await backend.events(session) if event.HasField("execution_failed")]
        return found[0] if found else None

    event = await eventually(failed)
    assert event.execution_failed.code == "CREDENTIAL_NOT_FOUND"
    assert credential in event.execution_failed.message
    assert not event.execution_failed.retryable
    assert "acquire" not in {stage.stage for stage in summary(event).stages}
    assert event.execution_id != sent.started.execution.execution_id
    assert await sandboxes(backend, session) == 1


async def test_w_c11_w_d15_one_that_ends_within_a_turn_costs_warmth_and_no_turn(backend: Backend) -> None:
    session, credential = key(), name()
    # A turn may last two hours.
    await put(backend, credential, "x", expires_in=3600)
    before = await misses(backend)
    turns = [await backend.run(session, "hello", spec=uses(credential)) for _ in range(3)]
    assert all(turn.HasField("execution_completed") for turn in turns)
    assert "warm" not in {summary(turn).how for turn in turns}
    assert (await misses(backend)).get("credentials-expiring", 0) == before.get("credentials-expiring", 0) + 2
    await put(backend, credential, "x", expires_in=3 * 3600)
    assert summary(await backend.run(session, "hello")).how == "warm"


@pytest.fixture(scope="module")
def keyless_house(servers: Servers) -> Iterator[House]:
    """Services without a key."""
    dsn = servers.create_database(migrated=True)
    found = House(servers.scratch(), dsn, servers.empty_valkey())
    try:
        found.start_blocking()
        yield found
    finally:
        found.stop()
        servers.drop_database(dsn)


@pytest_asyncio.fixture
async def keyless(keyless_house: House) -> AsyncIterator[Backend]:
    """A backend of those."""
    found = Backend(keyless_house)
    yield found
    await found.close()


async def test_without_a_key_nothing_is_stored(keyless: Backend) -> None:
    error = await refused(put(keyless, "a", "x"))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SECRET_KEY_MISSING")
    assert not await listed(keyless)
    await delete(keyless, "a")
    assert (await keyless.run(key(), "hello")).HasField("execution_completed")
