"""A batch of frames as it came, checked and brought into the form in which it is kept and published. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from hearth.relay.v1 import relay_pb2
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


class Entry(NamedTuple):
    """One frame: `content` is 8 bytes that stand for what is in it, `live` its entry in `LiveFrames`."""

    frame_index: int
    content: bytes
    live: bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that may be given to the ingress script."""

    project: str
    session: str
    execution_id: str
    epoch: int
    ended: bool
    entries: list[Entry] = field(default_factory=list)
    # What was wrong with the first frame that was left out, with all behind it.
    too_large: session_pb2.FieldProblem | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The session."""
        return self.project, self.session

    @property
    def head(self) -> bytes:
        """`LiveFrames` of this batch without its frames."""
        return live_head(self.project, self.session, self.execution_id, self.epoch)


def prepare(batch: relay_pb2.FrameBatch, path: str) -> Prepared | list[session_pb2.FieldProblem]:
    """`batch` ready to be taken, or everything that is wrong with it; `path` is where it stands in the request.

    A frame over 64 KiB does not make the batch wrong: what comes before it is taken.
    """
    checks = fields.Violations()
    project = checks.take(fields.key_part, f"{path}.session.project", batch.session.project)
    session = checks.take(fields.key_part, f"{path}.session.session", batch.session.session)
    execution_id = checks.take(fields.uuid_text, f"{path}.execution_id", batch.execution_id)
    if not 1 <= batch.epoch <= NUMBER_MAX:
        checks.add(f"{path}.epoch", f"must be between 1 and {NUMBER_MAX}")
    previous = -1
    for position, frame in enumerate(batch.frames):
        _check_frame(checks, frame, f"{path}.frames[{position}]", previous)
        previous = frame.frame_index
    try:
        checks.raise_if_any()
    except InvalidArgument as refusal:
        found = refusal.field_violations[:_PROBLEMS_MAX]
        return [session_pb2.FieldProblem(field=name, description=text) for name, text in found]
    prepared = Prepared(project, session, execution_id, batch.epoch, batch.ended)
    writer = FrameWriter(execution_id, batch.epoch)
    for position, frame in enumerate(batch.frames):
        raw = frame.SerializeToString()
        if len(raw) > FRAME_MAX_BYTES:
            problem = session_pb2.FieldProblem(
                field=f"{path}.frames[{position}]",
                description=f"must be at most {FRAME_MAX_BYTES} bytes, it has {len(raw)}",
            )
            return Prepared(project, session, execution_id, batch.epoch, batch.ended, prepared.entries, problem)
        content = hashlib.blake2b(raw, digest_size=8).digest()
        index = frame.frame_index
        prepared.entries.append(Entry(index, content, live_frame(index, writer.reply(raw))))
    return prepared


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
