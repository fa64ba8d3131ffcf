"""A batch of frames as it came, checked and brought into the form in which it is kept and published. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from hearth.relay.v1 import bus_pb2, relay_pb2
from hearth.types.v1 import frame_pb2, session_pb2
from services.chassis import fields
from services.chassis.errors import InvalidArgument
from services.relay.wire import FrameWriter, live_frame, live_head

FRAME_MAX_BYTES = 64 * 1024
ENTITY_MAX_BYTES = 255
# Numbers above it are not exact in the script that compares them.
NUMBER_MAX = 2**53 - 1
# Of thousands of wrong frames the first ones say enough.
_PROBLEMS_MAX = 20
# A writer sends many batches: what is the same for all of them is worked out once.
_REMEMBERED = 8_192


class Entry(NamedTuple):
    """One frame: `content` is 8 bytes that stand for what is in it, `live` its entry in `LiveFrames`."""

    frame_index: int
    content: bytes
    live: bytes


class Prepared(NamedTuple):
    """A batch, or a part of a long one, that may be given to the ingress script.

    `key` is the session, `head` is `LiveFrames` of this batch without its frames, `too_large` what was wrong with the
    first frame that was left out, with all behind it.
    """

    key: tuple[str, str]
    execution_id: str
    epoch: int
    ended: bool
    head: bytes
    entries: list[Entry]
    too_large: session_pb2.FieldProblem | None = None


_live_head = lru_cache(maxsize=_REMEMBERED)(live_head)
_writer = lru_cache(maxsize=_REMEMBERED)(FrameWriter)


def check(batch: relay_pb2.FrameBatch, path: str) -> list[session_pb2.FieldProblem]:
    """Everything that is wrong with the head of a batch; `path` is where it stands in the request."""
    try:
        _check_head(batch.session.project, batch.session.session, batch.execution_id, batch.epoch)
    except InvalidArgument as refusal:
        return _problems((f"{path}.{name}", text) for name, text in refusal.field_violations)
    return []


# What is raised is not remembered: nobody fills the memory with heads that are wrong, of which each may be megabytes.
@lru_cache(maxsize=_REMEMBERED)
def _check_head(project: str, session: str, execution_id: str, epoch: int) -> None:
    checks = fields.Violations()
    checks.take(fields.key_part, "session.project", project)
    checks.take(fields.key_part, "session.session", session)
    checks.take(fields.uuid_text, "execution_id", execution_id)
    if not 1 <= epoch <= NUMBER_MAX:
        checks.add("epoch", f"must be between 1 and {NUMBER_MAX}")
    checks.raise_if_any()


def check_frames(batch: relay_pb2.FrameBatch, path: str, start: int, stop: int) -> list[session_pb2.FieldProblem]:
    """What is wrong with the frames of a batch at `start` to before `stop`. Their size is not looked at."""
    checks: fields.Violations | None = None
    previous = batch.frames[start - 1].frame_index if start else -1
    for position, frame in enumerate(batch.frames[start:stop], start):
        index = frame.frame_index
        # No character has more than four bytes.
        fine = (
            0 < len(frame.entity_id) <= ENTITY_MAX_BYTES // 4 or 0 < len(frame.entity_id.encode()) <= ENTITY_MAX_BYTES
        )
        if not (fine and previous < index <= NUMBER_MAX) or frame.HasField("merged_through"):
            checks = checks or fields.Violations()
            _check_frame(checks, frame, f"{path}.frames[{position}]", previous)
        previous = index
    return [] if checks is None else _problems(_found(checks))


def prepare(batch: relay_pb2.FrameBatch, path: str, start: int, stop: int) -> Prepared:
    """The frames of a checked batch at `start` to before `stop`, ready to be taken.

    A frame over 64 KiB ends it: what comes before is taken.
    """
    execution_id = batch.execution_id.lower()
    writer = _writer(execution_id, batch.epoch)
    entries: list[Entry] = []
    too_large: session_pb2.FieldProblem | None = None
    for position, frame in enumerate(batch.frames[start:stop], start):
        raw = frame.SerializeToString()
        if len(raw) > FRAME_MAX_BYTES:
            too_large = session_pb2.FieldProblem(
                field=f"{path}.frames[{position}]",
                description=f"must be at most {FRAME_MAX_BYTES} bytes, it has {len(raw)}",
            )
            break
        content = blake2b(raw, digest_size=8).digest()
        index = frame.frame_index
        entries.append(Entry(index, content, live_frame(index, writer.reply(raw))))
    last = stop >= len(batch.frames) or too_large is not None
    key = (batch.session.project, batch.session.session)
    head = _live_head(*key, execution_id, batch.epoch)
    if batch.traceparent and start == 0:
        head += bus_pb2.LiveFrames(traceparent=batch.traceparent).SerializeToString()
    return Prepared(key, execution_id, batch.epoch, batch.ended and last, head, entries, too_large)


def _problems(found: Iterable[tuple[str, str]]) -> list[session_pb2.FieldProblem]:
    return [session_pb2.FieldProblem(field=name, description=text) for name, text in found]


def _found(checks: fields.Violations) -> tuple[tuple[str, str], ...]:
    try:
        checks.raise_if_any()
    except InvalidArgument as refusal:
        return tuple(refusal.field_violations[:_PROBLEMS_MAX])
    return ()


def _check_frame(checks: fields.Violations, frame: frame_pb2.Frame, path: str, previous: int) -> None:
    if frame.frame_index <= previous:
        checks.add(f"{path}.frame_index", "must be above that of the frame before it in the batch")
    elif frame.frame_index > NUMBER_MAX:
        checks.add(f"{path}.frame_index", f"must be at most {NUMBER_MAX}")
    entity = len(frame.entity_id.encode())
    if not 1 <= entity <= ENTITY_MAX_BYTES:
        checks.add(f"{path}.entity_id", f"must be 1 to {ENTITY_MAX_BYTES} bytes")
    if frame.HasField("merged_through"):
        checks.add(f"{path}.merged_through", "is set by the relay only")
