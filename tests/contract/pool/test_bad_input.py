"""Bad input is refused with the field named and changes nothing; what is not built says so, and what to use instead."""

from __future__ import annotations

import base64
import uuid

import grpc
import pytest

from hearth.pool.v1 import pool_pb2, pool_service_pb2, replica_service_pb2, replica_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, session_pb2
from tests.contract.pool.house import Backend, House, key, text_content
from tests.contract.pool.refusals import refused


def message(**changes: object) -> calls.SendInputRequest:
    """A good request, but for what is changed."""
    request = calls.SendInputRequest(session=key(), request_id="r", content=text_content("hello"))
    for name, value in changes.items():
        if name in {"request_id", "on_busy", "steer_execution_id"}:
            setattr(request, name, value)
            continue
        request.ClearField(name)  # type: ignore[arg-type]
        if name == "content":
            request.content.extend(value)  # type: ignore[arg-type]
        else:
            getattr(request, name).CopyFrom(value)
    return request


def part(**kind: object) -> content_pb2.ContentPart:
    """One part of a message."""
    return content_pb2.ContentPart(**kind)  # type: ignore[arg-type]


def spec(**fields: object) -> sessions.SessionSpec:
    """A spec."""
    return sessions.SessionSpec(**fields)  # type: ignore[arg-type]


def tail(*entries: sessions.TranscriptEntry) -> sessions.ExpectedTranscript:
    """The end of a conversation."""
    return sessions.ExpectedTranscript(entries=entries, tail_only=True)


def bound(*pairs: tuple[str, str], **more: object) -> calls.SendInputRequest:
    """A message with credentials, by name and variable."""
    bindings = [sessions.CredentialBinding(credential=name, target=target) for name, target in pairs]
    return message(spec=spec(credentials=bindings, **more))


_SAID = sessions.TranscriptEntry(user_message=sessions.TranscriptUserMessage(text="hello"))
_TOOL = sessions.TranscriptEntry(tool_call_id="t")
_HTTP = sessions.McpHttp(
    url="https://x",
    headers={"authorization": "x"},
    credentials=[sessions.CredentialBinding(credential="a", target="Authorization")],
)
_STDIO = sessions.McpStdio(command=["x"])
_WRONG: list[tuple[str, calls.SendInputRequest]] = [
    ("session.project", message(session=session_pb2.SessionKey(session="s"))),
    ("session.session", message(session=session_pb2.SessionKey(project="p", session="x" * 129))),
    ("session.session", message(session=session_pb2.SessionKey(project="p", session="a b"))),
    ("request_id", message(request_id="")),
    ("request_id", message(request_id="x" * 256)),
    ("content", message(content=[])),
    ("content", message(content=text_content("x") * 65)),
    ("content", message(content=text_content("  \n"))),
    ("content[0]", message(content=[content_pb2.ContentPart()])),
    ("content[0].text.text", message(content=text_content("a\0b"))),
    ("content[0].text.text", message(content=text_content("x" * (256 * 1024 + 1)))),
    ("content", message(content=text_content("x" * (250 * 1024)) * 5)),
    ("content[0].resource_link.uri", message(content=[part(resource_link=content_pb2.ResourceLinkPart(name="x"))])),
    ("content[0].inline_media", message(content=[part(inline_media=content_pb2.InlineMediaPart(data=b"x"))])),
    ("on_busy", message(on_busy=17)),
    ("spec.agent", message(spec=spec(agent="nobody"))),
    ("spec.sandbox.provider", message(spec=spec(sandbox=sandbox_pb2.SandboxSpec(provider="moon")))),
    ("spec.sandbox.agent", message(spec=spec(sandbox=sandbox_pb2.SandboxSpec(agent="scripted")))),
    ("spec.sandbox.image", message(spec=spec(sandbox=sandbox_pb2.SandboxSpec(image="a", snapshot="b")))),
    ("spec.sandbox.env", message(spec=spec(sandbox=sandbox_pb2.SandboxSpec(env={"A B": "x"})))),
    (
        "spec.sandbox.network.allow[0]",
        message(spec=spec(sandbox=sandbox_pb2.SandboxSpec(network=sandbox_pb2.NetworkPolicy(allow=["x"])))),
    ),
    ("spec.mcp_servers[0]", message(spec=spec(mcp_servers=[sessions.McpServer(name="a")]))),
    (
        "spec.mcp_servers[1].name",
        message(spec=spec(mcp_servers=[sessions.McpServer(name="a", stdio=_STDIO)] * 2)),
    ),
    (
        "spec.permissions.rules[0].tool",
        message(
            spec=spec(
                permissions=sessions.PermissionPolicy(
                    rules=[sessions.PermissionRule(tool="a*b", action=sessions.PERMISSION_ACTION_ALLOW)]
                )
            )
        ),
    ),
    (
        "expected_transcript.entries[0]",
        message(expected_transcript=sessions.ExpectedTranscript(entries=[sessions.TranscriptEntry()])),
    ),
    ("expected_transcript.entries[0]", message(expected_transcript=tail(_TOOL, _SAID))),
    ("expected_transcript.entries[1]", message(expected_transcript=tail(_SAID, _SAID))),
    (
        "content[0].attachment.attachment_id",
        message(content=[part(attachment=content_pb2.AttachmentPart(attachment_id="x"))]),
    ),
    ("steer_execution_id", message(on_busy=sessions.ON_BUSY_STEER, steer_execution_id="x")),
    ("steer_execution_id", message(steer_execution_id=str(uuid.uuid4()))),
    ("spec.credentials[0].credential", bound(("a b", "A"))),
    ("spec.credentials[0].target", bound(("a", ""))),
    ("spec.credentials[0].target", bound(("a", "A-B"))),
    ("spec.credentials[0].target", bound(("a", "HOME"))),
    ("spec.credentials[0].target", bound(("a", "HEARTH_X"))),
    ("spec.credentials[1].target", bound(("a", "A"), ("b", "A"))),
    ("spec.credentials[0].target", bound(("a", "A"), sandbox=sandbox_pb2.SandboxSpec(env={"A": "x"}))),
    (
        "spec.mcp_servers[0].http.credentials[0].target",
        message(spec=spec(mcp_servers=[sessions.McpServer(name="m", http=_HTTP)])),
    ),
]


@pytest.mark.parametrize(("field", "request_"), _WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(_WRONG)])
async def test_a_wrong_field_is_named(backend: Backend, field: str, request_: calls.SendInputRequest) -> None:
    error = await refused(backend.sessions.SendInput(request_))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in [name for name, _ in error.field_violations]
    if request_.session.project == "acme":
        assert (await refused(backend.session(request_.session))).reason == "SESSION_NOT_FOUND"


async def test_five_mebibytes_are_refused_and_the_service_goes_on(backend: Backend) -> None:
    error = await refused(backend.sessions.SendInput(message(content=text_content("x" * (5 * 1024 * 1024)))))
    assert error.code in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
    ending = await backend.run(key(), "hello")
    assert ending.HasField("execution_completed")


async def test_a_wrong_field_of_a_call_about_an_input_is_named(backend: Backend) -> None:
    session, nothing = key(), str(uuid.uuid4())
    for field, request in (
        ("input_id", calls.SendInputNowRequest(session=session, request_id="r", input_id="x")),
        (
            "execution_id",
            calls.SendInputNowRequest(session=session, request_id="r", input_id=nothing, execution_id="x"),
        ),
        ("request_id", calls.SendInputNowRequest(session=session, input_id=nothing)),
    ):
        error = await refused(backend.sessions.SendInputNow(request))
        assert (error.reason, [name for name, _ in error.field_violations]) == ("INVALID_FIELD", [field])


async def test_unknown_things(backend: Backend) -> None:
    session = key()
    nothing = str(uuid.uuid4())
    for call in (
        backend.session(session),
        backend.execution(session, nothing),
        backend.command(session, nothing),
        backend.stop(session, nothing),
        backend.sessions.ListInputs(calls.ListInputsRequest(session=session)),
        backend.sessions.ListInteractions(calls.ListInteractionsRequest(session=session)),
        backend.sessions.ResumeQueue(calls.ResumeQueueRequest(session=session, request_id="r")),
        backend.sessions.KillSession(calls.KillSessionRequest(session=session, request_id="r")),
        backend.sessions.DeleteSession(calls.DeleteSessionRequest(session=session, request_id="r")),
    ):
        assert (await refused(call)).reason == "SESSION_NOT_FOUND"
    ending = await backend.run(session, "hello")
    assert (await refused(backend.execution(session, nothing))).reason == "EXECUTION_NOT_FOUND"
    assert (await refused(backend.command(session, nothing))).reason == "COMMAND_NOT_FOUND"
    other = key()
    await backend.run(other, "hello")
    assert (await refused(backend.execution(other, ending.execution_id))).reason == "EXECUTION_NOT_FOUND"
    for wrong in ("x", "{" + nothing + "}", nothing.replace("-", "")):
        error = await refused(backend.execution(session, wrong))
        assert [name for name, _ in error.field_violations] == ["execution_id"]
    made_up = (
        "[" * 100_000,
        "[9223372036854775808]",
        '["0001-01-01T00:00:00+14:00", "a"]',
        '["2026-01-01T00:00:00+00:00", "\\u0000"]',
        '["2026-01-01T00:00:00+00:00", "\\ud800"]',
    )
    for token in ("x", "W10=", "WyJhIl0=", *(base64.urlsafe_b64encode(text.encode()).decode() for text in made_up)):
        for listing in (
            backend.sessions.ListInputs(calls.ListInputsRequest(session=session, page_token=token)),
            backend.sessions.ListSessions(calls.ListSessionsRequest(project="acme", page_token=token)),
        ):
            error = await refused(listing)
            assert [name for name, _ in error.field_violations] == ["page_token"]


async def test_a_stop_says_what_it_means(backend: Backend) -> None:
    error = await refused(backend.stop(key()))
    assert [name for name, _ in error.field_violations] == ["execution_id", "seen_epoch"]


async def test_operators_see_the_replica(backend: Backend, house: House) -> None:
    session = key()
    await backend.run(session, "hello")
    await backend.idle_entry(session)
    stats = await backend.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest())
    assert stats.turns_by_outcome["completed"] >= 1
    assert stats.entries_by_state["IDLE"] >= 1
    replicas = (await backend.pools.ListReplicas(pool_service_pb2.ListReplicasRequest())).replicas
    assert [replica.holder for replica in replicas] == [stats.holder]
    assert replicas[0].address == house.pool.address
    wrong = pool_service_pb2.DrainReplicaRequest(holder=str(uuid.uuid4()), request_id="r")
    assert (await refused(backend.pools.DrainReplica(wrong))).reason == "NOT_FOUND"
    async with grpc.aio.insecure_channel(house.pool.address) as channel:
        replica = replica_service_pb2_grpc.ReplicaServiceStub(channel)
        nudge = replica_service_pb2.NudgeRequest(session=session, epoch=1, holder=stats.holder)
        assert (await replica.Nudge(nudge)).receipt == pool_pb2.NUDGE_RECEIPT_ACCEPTED
        nudge.holder = str(uuid.uuid4())
        assert (await replica.Nudge(nudge)).receipt == pool_pb2.NUDGE_RECEIPT_NOT_HELD
