"""What may be uploaded, and what a message says of the files that it names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, session_pb2
from services.chassis.errors import HearthError, InvalidArgument
from services.pool.attachments import (
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    Attachment,
    Uploads,
    check_description,
    named,
    resolved,
)

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


async def chunks(*parts: bytes, description: bool = False) -> AsyncIterator[calls.PutAttachmentRequest]:
    for part in parts:
        yield calls.PutAttachmentRequest(chunk=part)
    if description:
        yield calls.PutAttachmentRequest(description=described())


async def test_contents_come_in_pieces() -> None:
    assert await Uploads().receive(described(), chunks(DATA[:3], b"", DATA[3:])) == DATA
    empty = described(size_bytes=0, digest=hashlib.sha256().hexdigest())
    assert await Uploads().receive(empty, chunks()) == b""


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
async def test_contents_that_are_not_what_was_described(
    field: str, stream: AsyncIterator[calls.PutAttachmentRequest]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await Uploads().receive(described(), stream)
    assert [name for name, _ in caught.value.field_violations] == [field]


async def test_all_uploads_together_are_bounded() -> None:
    uploads, more = Uploads(most=2 * len(DATA)), asyncio.Event()

    async def slow() -> AsyncIterator[calls.PutAttachmentRequest]:
        yield calls.PutAttachmentRequest(chunk=DATA)
        await more.wait()

    under_way = [asyncio.create_task(uploads.receive(described(), slow())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(HearthError) as caught:
        await uploads.receive(described(), chunks(DATA))
    assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 1.0)
    more.set()
    assert await asyncio.gather(*under_way) == [DATA, DATA]
    assert await uploads.receive(described(), chunks(DATA)) == DATA


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
