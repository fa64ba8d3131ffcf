"""What may be uploaded, and what a message says of the files that it names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, session_pb2
from services.chassis.errors import DeadlineExceeded, HearthError, InvalidArgument
from services.pool.attachments import (
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    MAX_UNDER_WAY_BYTES,
    PAUSE_SECONDS,
    UPLOAD_SECONDS,
    Attachment,
    Uploads,
    check_description,
    named,
    resolved,
)
from services.pool.requests import description_of
from tests.unit.pool.clocks import ManualClock, settle

Stream = AsyncIterator[calls.PutAttachmentRequest]

DATA = b"some bytes"
ID = "0f9a3c1e-5f0f-4a1c-9a55-2b8e4d1f7a60"
KNOWN = Attachment(ID, "a.txt", "text/plain", hashlib.sha256(DATA).digest(), len(DATA))


def described(**changes: object) -> calls.AttachmentDescription:
    fields: dict[str, object] = {
        "session": session_pb2.SessionKey(project="p", session="s"),
        "request_id": "r",
        "name": "a.txt",
        "media_type": "text/plain",
        "size_bytes": len(DATA),
        "digest": hashlib.sha256(DATA).hexdigest(),
    }
    return calls.AttachmentDescription(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a b.txt", "größe.pdf", ".env", "..."])
def test_a_name_is_any_file_name(name: str) -> None:
    check_description(described(name=name))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("name", ""),
        ("name", " "),
        ("name", ".."),
        ("name", "."),
        ("name", "a/b"),
        ("name", "a\\b"),
        ("name", "a\nb"),
        ("name", "a\0b"),
        ("name", "ü" * 128),
        ("media_type", ""),
        ("media_type", "text"),
        ("media_type", "text/plain\r\nX: y"),
        ("size_bytes", MAX_BYTES + 1),
        ("digest", ""),
        ("digest", hashlib.sha256(DATA).hexdigest().upper()),
    ],
)
def test_a_wrong_description_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_description(described(**{field: value}))
    assert [name for name, _ in caught.value.field_violations] == [f"description.{field}"]


async def chunks(*parts: bytes, description: bool = False) -> Stream:
    for part in parts:
        yield calls.PutAttachmentRequest(chunk=part)
    if description:
        yield calls.PutAttachmentRequest(description=described())


async def stalled(*requests: calls.PutAttachmentRequest) -> Stream:
    """Some requests, and silence after them."""
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def received(uploads: Uploads, description: calls.AttachmentDescription, stream: Stream) -> bytes:
    with ExitStack() as held:
        return await uploads.receive(description, stream, held)


def of(project: str, **changes: object) -> calls.AttachmentDescription:
    return described(session=session_pb2.SessionKey(project=project, session="s"), **changes)


async def test_contents_come_in_pieces() -> None:
    uploads = Uploads(ManualClock())
    assert await received(uploads, described(), chunks(DATA[:3], b"", DATA[3:])) == DATA
    empty = described(size_bytes=0, digest=hashlib.sha256().hexdigest())
    assert await received(uploads, empty, chunks()) == b""


@pytest.mark.parametrize(
    ("field", "stream"),
    [
        ("description.size_bytes", chunks(DATA, b"!")),
        ("description.size_bytes", chunks(DATA[:-1])),
        ("description.digest", chunks(DATA[::-1])),
        ("chunk", chunks(DATA, description=True)),
        ("chunk", chunks(b"x" * (MAX_CHUNK_BYTES + 1))),
    ],
    ids=["more", "less", "other", "twice", "large"],
)
async def test_contents_that_are_not_what_was_described(field: str, stream: Stream) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await received(Uploads(ManualClock()), described(), stream)
    assert [name for name, _ in caught.value.field_violations] == [field]


async def test_what_is_only_announced_takes_room_from_nobody() -> None:
    uploads = Uploads(ManualClock())
    many = 2 * MAX_UNDER_WAY_BYTES // MAX_BYTES
    silent = [asyncio.create_task(received(uploads, of("one", size_bytes=MAX_BYTES), stalled())) for _ in range(many)]
    await settle()
    assert not any(task.done() for task in silent)
    for project in ("one", "two"):
        assert await received(uploads, of(project), chunks(DATA)) == DATA
    for task in silent:
        task.cancel()


async def test_one_project_holds_a_quarter_and_all_together_are_bounded() -> None:
    uploads = Uploads(ManualClock(), most=4 * len(DATA))
    chunk = calls.PutAttachmentRequest(chunk=DATA)
    under_way = []
    for number in range(4):
        under_way.append(asyncio.create_task(received(uploads, of(f"p{number}"), stalled(chunk))))
        await settle()
        with pytest.raises(HearthError) as caught:
            await received(uploads, of(f"p{number}"), chunks(DATA))
        assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 1.0)
    with pytest.raises(HearthError) as caught:
        await received(uploads, of("other"), chunks(DATA))
    assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 1.0)
    under_way[0].cancel()
    await settle()
    assert await received(uploads, of("other"), chunks(DATA)) == DATA
    for task in under_way:
        task.cancel()


async def test_a_content_counts_until_it_is_stored() -> None:
    uploads = Uploads(ManualClock(), most=4 * len(DATA))
    with ExitStack() as held:
        await uploads.receive(described(), chunks(DATA), held)
        with pytest.raises(HearthError) as caught:
            await received(uploads, described(), chunks(DATA))
        assert caught.value.reason == "OVERLOADED"
    assert await received(uploads, described(), chunks(DATA)) == DATA


@pytest.mark.parametrize("begun", [False, True], ids=["before its description", "in its content"])
async def test_an_upload_that_is_silent_ends(begun: bool) -> None:
    clock = ManualClock()
    uploads = Uploads(clock)
    first = [calls.PutAttachmentRequest(description=described())] if begun else []

    async def upload() -> bytes:
        stream = uploads.paced(stalled(*first))
        return await received(uploads, await description_of(stream), stream)

    task = asyncio.create_task(upload())
    await clock.advance(PAUSE_SECONDS - 1)
    assert not task.done()
    await clock.advance(1)
    with pytest.raises(DeadlineExceeded, match="sent nothing for 15 s") as caught:
        task.result()
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert not clock.sleeping


async def test_an_upload_that_trickles_ends_and_gives_back_what_it_held() -> None:
    clock = ManualClock()
    uploads = Uploads(clock, most=4 * len(DATA))

    async def trickle() -> Stream:
        yield calls.PutAttachmentRequest(chunk=DATA[:-1])
        while True:
            await clock.sleep(PAUSE_SECONDS - 1)
            yield calls.PutAttachmentRequest(chunk=b"")

    task = asyncio.create_task(received(uploads, described(), uploads.paced(trickle())))
    await clock.advance(UPLOAD_SECONDS - 1)
    assert not task.done()
    await clock.advance(1)
    with pytest.raises(DeadlineExceeded, match="took longer than 300 s"):
        task.result()
    assert await received(uploads, described(), chunks(DATA)) == DATA


async def test_an_upload_that_never_pauses_ends_too() -> None:
    clock = ManualClock()

    async def endless() -> Stream:
        while True:
            clock.seconds += 1
            yield calls.PutAttachmentRequest(chunk=b"")

    uploads = Uploads(clock)
    with pytest.raises(DeadlineExceeded):
        await received(uploads, described(), uploads.paced(endless()))


async def test_a_stream_that_breaks_or_ends_does_so_for_its_reader() -> None:
    clock = ManualClock()

    async def broken() -> Stream:
        yield calls.PutAttachmentRequest(chunk=DATA)
        raise ConnectionError("gone")

    uploads = Uploads(clock)
    with pytest.raises(ConnectionError):
        await received(uploads, described(), uploads.paced(broken()))
    assert await received(uploads, described(), uploads.paced(chunks(DATA))) == DATA
    await settle()
    assert not clock.sleeping


def attached(**changes: object) -> content_pb2.ContentPart:
    fields: dict[str, object] = {"attachment_id": ID, **changes}
    return content_pb2.ContentPart(attachment=content_pb2.AttachmentPart(**fields))  # type: ignore[arg-type]


def test_a_message_is_completed_with_what_is_known() -> None:
    text = content_pb2.ContentPart(text=content_pb2.TextPart(text="look"))
    content = [text, attached(), attached(attachment_id=ID.upper())]
    assert named(content) == [ID]
    whole = content_pb2.ContentPart(attachment=KNOWN.part())
    assert resolved("content", content, {ID: KNOWN}) == [text, whole, whole]
    assert resolved("content", [whole], {ID: KNOWN}) == [whole]


def test_what_a_message_says_wrong_of_a_file_is_named() -> None:
    for name, value in {"digest": "0" * 64, "name": "b.txt", "media_type": "text/html", "size_bytes": 1}.items():
        with pytest.raises(InvalidArgument) as caught:
            resolved("content", [attached(**{name: value})], {ID: KNOWN})
        assert [field for field, _ in caught.value.field_violations] == [f"content[0].attachment.{name}"]


def test_a_file_of_another_session_is_not_found() -> None:
    with pytest.raises(HearthError) as caught:
        resolved("content", [attached()], {})
    assert caught.value.reason == "ATTACHMENT_NOT_FOUND"
    assert caught.value.field_violations[0][0] == "content[0].attachment.attachment_id"
