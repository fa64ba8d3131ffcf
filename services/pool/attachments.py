"""Files for messages: what an upload must be, and what a message that names some of them says of them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2
from services.chassis import fields
from services.chassis.clock import Clock
from services.chassis.errors import (
    DeadlineExceeded,
    HearthError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    invalid,
)
from services.chassis.fields import Violations
from services.pool.rows import Key

MAX_BYTES = 20 * 1024 * 1024
MAX_CHUNK_BYTES = 1024 * 1024
# What a process holds of all uploads at a time; of those of one project, a quarter.
MAX_UNDER_WAY_BYTES = 256 * 1024 * 1024
# The longest silence of an upload, and the longest upload.
PAUSE_SECONDS = 15.0
UPLOAD_SECONDS = 300.0
_NAME_BYTES = 255
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,127}/[A-Za-z0-9!#$&^_.+-]{1,127}(;[ -~]{1,127})?")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class Attachment:
    """A row of `pool.attachment` without its content. `digest` is the SHA-256."""

    attachment_id: str
    name: str
    media_type: str
    digest: bytes
    size_bytes: int

    def part(self) -> content_pb2.AttachmentPart:
        """What a message says of it."""
        return content_pb2.AttachmentPart(
            attachment_id=self.attachment_id,
            digest=self.digest.hex(),
            name=self.name,
            media_type=self.media_type,
            size_bytes=self.size_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NewAttachment:
    """A checked upload. `fingerprint` is that of its description, which names the digest of its content."""

    key: Key
    request_id: str
    fingerprint: bytes
    name: str
    media_type: str
    digest: bytes
    content: bytes = dataclasses.field(repr=False)


def check_description(description: calls.AttachmentDescription) -> None:
    """What may be uploaded; the session and the right to it are checked apart."""
    checks = Violations()
    checks.take(
        lambda field, value: fields.request_id(value, field=field), "description.request_id", description.request_id
    )
    problem = _name_problem(description.name)
    if problem:
        checks.add("description.name", problem)
    if not _MEDIA_TYPE.fullmatch(description.media_type):
        checks.add("description.media_type", "must be a media type, as image/png")
    if description.size_bytes > MAX_BYTES:
        text = f"must be at most {MAX_BYTES} bytes, it is {description.size_bytes}"
        checks.add("description.size_bytes", text, reason="TOO_LARGE")
    if not _DIGEST.fullmatch(description.digest):
        checks.add("description.digest", "must be a SHA-256 in 64 lower-case hexadecimal digits")
    checks.raise_if_any()


def _name_problem(name: str) -> str:
    if not name.strip():
        return "must not be empty"
    if len(name.encode()) > _NAME_BYTES:
        return f"must be at most {_NAME_BYTES} bytes"
    if "/" in name or "\\" in name or name in {".", ".."}:
        return "must be a file name without directories"
    if any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in name):
        return "must hold no control characters"
    return ""


class Uploads:
    """Receives contents. What has come of them is bounded, together and by project, since each is held whole until it
    is stored; what a description only announces takes nothing from anybody."""

    def __init__(self, clock: Clock, most: int = MAX_UNDER_WAY_BYTES) -> None:
        """`most` is in bytes."""
        self._clock = clock
        self._most = most
        self._held: collections.Counter[str] = collections.Counter()

    def paced(self, stream: AsyncIterator[calls.PutAttachmentRequest]) -> AsyncIterator[calls.PutAttachmentRequest]:
        """The messages of an upload that begins now. Raises DEADLINE_EXCEEDED where the next one does not come in
        time."""
        return _Paced(stream, self._clock)

    async def receive(
        self,
        description: calls.AttachmentDescription,
        rest: AsyncIterator[calls.PutAttachmentRequest],
        held: ExitStack,
    ) -> bytes:
        """The content that follows a checked description, compared with it. It counts until `held` is closed."""
        take = held.enter_context(self._room(description.session.project))
        content = bytearray()
        async for request in rest:
            if request.WhichOneof("payload") != "chunk":
                raise invalid("chunk", "must be set in every message but the first")
            size = len(request.chunk)
            if size > MAX_CHUNK_BYTES:
                raise invalid("chunk", f"must be at most {MAX_CHUNK_BYTES} bytes", reason="TOO_LARGE")
            if len(content) + size > description.size_bytes:
                raise invalid("description.size_bytes", f"is {description.size_bytes}, and more bytes came")
            take(size)
            content += request.chunk
        if len(content) != description.size_bytes:
            raise invalid("description.size_bytes", f"is {description.size_bytes}, and {len(content)} bytes came")
        if hashlib.sha256(content).hexdigest() != description.digest:
            raise invalid("description.digest", "is not the SHA-256 of the bytes that came")
        return bytes(content)

    @contextmanager
    def _room(self, project: str) -> Iterator[Callable[[int], None]]:
        """What one upload holds. Raises OVERLOADED where it is asked to hold more than there is room for."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._held[project] + size > self._most // 4:
                raise _overloaded("too many uploads of this project are under way")
            if self._held.total() + size > self._most:
                raise _overloaded("too many uploads are under way")
            self._held[project] += size
            taken += size

        try:
            yield take
        finally:
            self._held[project] -= taken
            if not self._held[project]:
                del self._held[project]


class _Paced:
    """See `Uploads.paced`."""

    def __init__(self, stream: AsyncIterator[calls.PutAttachmentRequest], clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._ends = clock.monotonic() + UPLOAD_SECONDS

    def __aiter__(self) -> _Paced:
        return self

    async def __anext__(self) -> calls.PutAttachmentRequest:
        left = self._ends - self._clock.monotonic()
        if left <= 0:
            raise _late(left)
        reading = asyncio.ensure_future(anext(self._stream))
        # A stream that breaks while nobody waits for it any more is nothing to be logged.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting = asyncio.ensure_future(self._clock.sleep(min(PAUSE_SECONDS, left)))
        try:
            await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _late(left)
            return reading.result()
        finally:
            reading.cancel()
            waiting.cancel()


def _late(left: float) -> HearthError:
    what = f"sent nothing for {PAUSE_SECONDS:g} s" if left > PAUSE_SECONDS else f"took longer than {UPLOAD_SECONDS:g} s"
    return DeadlineExceeded(
        f"the upload {what}, so it was ended and nothing is kept; upload the file again, the same request id is safe",
        reason="DEADLINE_EXCEEDED",
    )


def _overloaded(problem: str) -> HearthError:
    return ResourceExhausted(f"{problem}; try again", reason="OVERLOADED", retry_after=1.0)


def named(content: Sequence[content_pb2.ContentPart]) -> list[str]:
    """The ids of the attachments that a message names, each once, in its order."""
    return list(
        dict.fromkeys(
            part.attachment.attachment_id.lower() for part in content if part.WhichOneof("part") == "attachment"
        )
    )


def resolved(
    field: str, content: Sequence[content_pb2.ContentPart], known: Mapping[str, Attachment]
) -> list[content_pb2.ContentPart]:
    """A message with everything that is known of its attachments, by id. Raises ATTACHMENT_NOT_FOUND, or names the
    field in which the caller says something else of one."""
    found = []
    for index, part in enumerate(content):
        if part.WhichOneof("part") != "attachment":
            found.append(part)
            continue
        path = f"{field}[{index}].attachment"
        attachment = known.get(part.attachment.attachment_id.lower())
        if attachment is None:
            raise _not_found(path, part.attachment.attachment_id)
        _compare(path, part.attachment, attachment.part())
        found.append(content_pb2.ContentPart(attachment=attachment.part()))
    return found


def _compare(path: str, given: content_pb2.AttachmentPart, known: content_pb2.AttachmentPart) -> None:
    for name in ("digest", "name", "media_type", "size_bytes"):
        value = getattr(given, name)
        if value and value != getattr(known, name):
            raise InvalidArgument(
                f"{path}.{name}: is not that of the attachment",
                reason="INVALID_FIELD",
                field_violations=((f"{path}.{name}", "is not that of the attachment; it may be left out"),),
            )


def _not_found(path: str, attachment_id: str) -> HearthError:
    return NotFound(
        "no such attachment in this session; upload it with PutAttachment",
        reason="ATTACHMENT_NOT_FOUND",
        field_violations=((f"{path}.attachment_id", "names an attachment that this session does not have"),),
        resource=("attachment", attachment_id, ""),
    )
