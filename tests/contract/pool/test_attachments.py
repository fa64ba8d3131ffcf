"""Files for messages: uploaded in pieces, kept with the session, in the workspace before the agent is asked."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator

import asyncpg
import grpc
import pytest

from hearth.pool.v1 import pool_service_pb2
from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from tests.contract.pool.house import Backend, agent_text, key, summary, text_content
from tests.contract.pool.refusals import refused

MEBIBYTE = 1024 * 1024


def describe(session: session_pb2.SessionKey, data: bytes, **changes: object) -> calls.AttachmentDescription:
    """A description of some bytes, but for what is changed."""
    fields: dict[str, object] = {
        "request_id": str(uuid.uuid4()),
        "name": "notes.txt",
        "media_type": "text/plain",
        "size_bytes": len(data),
        "digest": hashlib.sha256(data).hexdigest(),
    }
    return calls.AttachmentDescription(session=session, **{**fields, **changes})  # type: ignore[arg-type]


async def upload(
    backend: Backend, description: calls.AttachmentDescription, data: bytes, *, piece: int = MEBIBYTE
) -> content_pb2.AttachmentPart:
    """Upload a file in pieces."""

    async def requests() -> AsyncIterator[calls.PutAttachmentRequest]:
        yield calls.PutAttachmentRequest(description=description)
        for start in range(0, len(data), piece):
            yield calls.PutAttachmentRequest(chunk=data[start : start + piece])

    answer: calls.PutAttachmentResponse = await backend.sessions.PutAttachment(requests(), timeout=30)
    return answer.attachment


async def put(
    backend: Backend, session: session_pb2.SessionKey, data: bytes, **changes: object
) -> content_pb2.AttachmentPart:
    """Upload a file."""
    return await upload(backend, describe(session, data, **changes), data)


def path_of(file: content_pb2.AttachmentPart) -> str:
    """Where the agent finds it, from the directory in which it works."""
    return f".hearth/attachments/{file.attachment_id}/{file.name}"


async def evict(backend: Backend, session: session_pb2.SessionKey) -> None:
    """Let the agent of a session go."""
    await backend.pools.EvictEntry(
        pool_service_pb2.EvictEntryRequest(session=session, request_id=str(uuid.uuid4())), timeout=20
    )


async def test_the_agent_finds_it_in_the_workspace(backend: Backend) -> None:
    session = key()
    file = await put(backend, session, b"the answer is 42")
    assert (file.name, file.media_type, file.size_bytes) == ("notes.txt", "text/plain", 16)
    cold = await backend.run(session, f"read {path_of(file)}", files=[file])
    other = await put(backend, session, b"now it is 43", name="more-notes.txt")
    # The id says it all.
    warm = await backend.run(
        session, f"read {path_of(other)}", files=[content_pb2.AttachmentPart(attachment_id=other.attachment_id)]
    )
    assert [summary(turn).how for turn in (cold, warm)] == ["cold", "warm"]
    events = await backend.events(session)
    assert "the answer is 42" in agent_text(events, cold.execution_id)
    assert "now it is 43" in agent_text(events, warm.execution_id)
    said = [event.message_completed for event in events if event.message_completed.role == content_pb2.ROLE_USER]
    assert [part.attachment for message in said for part in message.content if part.HasField("attachment")] == [
        file,
        other,
    ]


async def test_w_c09_a_message_may_be_a_file_alone_and_it_is_a_link_in_the_prompt(backend: Backend) -> None:
    session = key()
    file = await put(backend, session, b"x")
    ending = await backend.run(session, "", files=[file])
    said = agent_text(await backend.events(session), ending.execution_id)
    assert "[resource_link notes.txt file:///" in said
    assert path_of(file) in said


async def test_it_is_there_for_later_turns_and_other_sandboxes(backend: Backend) -> None:
    session = key()
    file = await put(backend, session, b"still here")
    first = await backend.run(session, "hello", files=[file])
    await evict(backend, session)
    await backend.sandboxes.DeleteSandbox(
        sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=summary(first).sandbox_id), timeout=20
    )
    second = await backend.run(session, f"read {path_of(file)}")
    assert summary(second).how == "cold"
    assert "still here" in agent_text(await backend.events(session), second.execution_id)


async def test_w_c07_files_count_for_the_conversation(backend: Backend) -> None:
    session = key()
    file, other = await put(backend, session, b"x"), await put(backend, session, b"x")
    await backend.run(session, "look", files=[file])

    def expected(*files: content_pb2.AttachmentPart) -> sessions.ExpectedTranscript:
        said = sessions.TranscriptUserMessage(text="look", attachment_ids=[one.attachment_id for one in files])
        return sessions.ExpectedTranscript(entries=[sessions.TranscriptEntry(user_message=said)])

    right = await backend.run(session, "look", files=[file], expected=expected(file))
    wrong = await backend.run(session, "hello", expected=expected(other))
    assert [summary(turn).how for turn in (right, wrong)] == ["warm", "restarted"]


async def test_the_largest_that_is_allowed(backend: Backend) -> None:
    session, data = key(), os.urandom(20 * MEBIBYTE)
    file = await put(backend, session, data, name="large.bin", media_type="application/octet-stream")
    digest = hashlib.sha256(data).hexdigest()
    assert file.digest == digest
    ending = await backend.run(
        session,
        f"run sha256sum {path_of(file)}",
        files=[file],
        spec=sessions.SessionSpec(
            permissions=sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ALLOW)
        ),
    )
    tools = [event for event in await backend.events(session) if event.HasField("tool_completed")]
    assert ending.HasField("execution_completed")
    assert digest in tools[0].tool_completed.output


async def test_a_retry_is_the_same_file(backend: Backend) -> None:
    session, data = key(), b"once"
    description = describe(session, data, request_id="upload")
    one, two = await asyncio.gather(*(upload(backend, description, data) for _ in range(2)))
    assert one == two == await upload(backend, description, data, piece=1)
    error = await refused(put(backend, session, b"other", request_id="upload"))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    error = await refused(backend.send(session, "hello", request_id="upload"))
    assert error.reason == "REQUEST_ID_REUSED"


@pytest.mark.parametrize(
    ("field", "reason", "changes"),
    [
        ("session.session", "INVALID_FIELD", {"session": session_pb2.SessionKey(project="acme")}),
        ("description.request_id", "INVALID_FIELD", {"request_id": ""}),
        ("description.name", "INVALID_FIELD", {"name": "../x"}),
        ("description.media_type", "INVALID_FIELD", {"media_type": "x"}),
        ("description.size_bytes", "TOO_LARGE", {"size_bytes": 20 * MEBIBYTE + 1}),
        ("description.size_bytes", "INVALID_FIELD", {"size_bytes": 3}),
        ("description.size_bytes", "INVALID_FIELD", {"size_bytes": 5}),
        ("description.digest", "INVALID_FIELD", {"digest": "x"}),
        ("description.digest", "INVALID_FIELD", {"digest": "0" * 64}),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_kept(
    backend: Backend, field: str, reason: str, changes: dict[str, object]
) -> None:
    session = key()
    description = describe(session, b"data")
    for name, value in changes.items():
        if isinstance(value, session_pb2.SessionKey):
            description.session.CopyFrom(value)
        else:
            setattr(description, name, value)
    error = await refused(upload(backend, description, b"data"))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert [name for name, _ in error.field_violations] == [field]
    assert (await refused(backend.session(session))).reason == "SESSION_NOT_FOUND"


async def test_an_upload_begins_with_its_description(backend: Backend) -> None:
    for requests in ([], [calls.PutAttachmentRequest()], [calls.PutAttachmentRequest(chunk=b"x")]):
        error = await refused(backend.sessions.PutAttachment(iter(requests), timeout=20))
        assert [name for name, _ in error.field_violations] == ["description"]


async def test_a_file_belongs_to_its_session(backend: Backend) -> None:
    session, other = key(), key()
    file = await put(backend, session, b"mine")
    error = await refused(backend.send(other, "hello", files=[file]))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "ATTACHMENT_NOT_FOUND")
    assert [name for name, _ in error.field_violations] == ["content[1].attachment.attachment_id"]
    file.digest = "0" * 64
    error = await refused(backend.send(session, "hello", files=[file]))
    assert [name for name, _ in error.field_violations] == ["content[1].attachment.digest"]


async def test_a_queued_message_may_be_given_a_file(backend: Backend) -> None:
    session = key()
    await backend.send(session, "sleep 1")
    queued = await backend.send(session, "hello")
    file = await put(backend, session, b"late")
    content = [*text_content("look"), content_pb2.ContentPart(attachment=file)]
    update = calls.UpdateInputRequest(session=session, request_id="u", input_id=queued.queued.input_id, content=content)
    answer = await backend.sessions.UpdateInput(update, timeout=20)
    assert list(answer.input.content) == content
    update.request_id, update.content[1].attachment.attachment_id = "v", str(uuid.uuid4())
    assert (await refused(backend.sessions.UpdateInput(update, timeout=20))).reason == "ATTACHMENT_NOT_FOUND"


async def test_a_deleted_session_keeps_none(backend: Backend, database: asyncpg.Connection[asyncpg.Record]) -> None:
    session = key()
    file = await put(backend, session, b"x")
    await backend.run(session, "hello", files=[file])
    await backend.sessions.KillSession(calls.KillSessionRequest(session=session, request_id="k"), timeout=20)
    count = "SELECT count(*) FROM pool.attachment WHERE project = $1 AND session = $2"
    assert await database.fetchval(count, session.project, session.session) == 1
    await backend.sessions.DeleteSession(calls.DeleteSessionRequest(session=session, request_id="d"), timeout=20)
    assert await database.fetchval(count, session.project, session.session) == 0
    assert (await refused(put(backend, session, b"y"))).reason == "SESSION_DELETED"


async def test_a_file_that_cannot_be_written_fails_its_turn_before_the_agent_is_asked(backend: Backend) -> None:
    session = key()
    first = await backend.run(session, "remember my name is Ada")
    file = await put(backend, session, b"x")
    # The directory that it would go to is a file.
    await backend.run(session, "fs-write .hearth x")
    failed: event_pb2.Event = await backend.run(session, "what is my name?", files=[file])
    assert failed.execution_failed.code == "RUN_DEFECT"
    assert "attachment" in failed.execution_failed.message
    # Not for the warm agent alone: another one was tried.
    assert summary(failed).sandbox_id != summary(first).sandbox_id
    after = await backend.run(session, "what is my name?")
    assert "Ada" in agent_text(await backend.events(session), after.execution_id)


async def test_a_session_that_holds_nothing_but_files_can_be_looked_at_and_deleted(backend: Backend) -> None:
    session = key()
    file = await put(backend, session, b"x")
    found = await backend.session(session)
    assert (found.epoch, found.HasField("execution"), found.queued_inputs) == (0, False, 0)
    # A refused message leaves the files, and no execution.
    assert (await refused(backend.send(session, "  "))).reason == "INVALID_FIELD"
    await backend.sessions.DeleteSession(calls.DeleteSessionRequest(session=session, request_id="d"), timeout=20)
    assert (await refused(backend.send(session, "hello", files=[file]))).reason == "SESSION_DELETED"


async def test_a_file_that_is_named_twice_is_one(backend: Backend) -> None:
    session = key()
    file = await put(backend, session, b"twice")
    ending = await backend.run(session, f"read {path_of(file)}", files=[file, file])
    said = agent_text(await backend.events(session), ending.execution_id)
    assert "twice" in said
    assert said.count("[resource_link") == 2
