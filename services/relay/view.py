"""What is unfinished in the execution that runs: which of its kept frames a reader who comes late still needs.

Pure. A frame of an entity whose event the reader was given is of no use to it. Frames of all others are handed out
before the events that cover them, as if the reader had been there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from services.relay.merge import frame_of, merge
from services.relay.order import EventIn, FrameIn, Role


class View:
    """The events of one execution, folded.

    It is complete from sequence `since` on; `started` is the sequence of its `execution.started`, 0 while that is not
    known.
    """

    __slots__ = (
        "_completed",
        "_marks",
        "execution",
        "since",
        "started",
    )

    def __init__(self, execution: str, since: int, *, started: bool = False) -> None:
        self.execution = execution
        self.since = since
        self.started = since if started else 0
        self._completed: dict[str, int] = {}
        # Sequence, epoch and frames_through of its events.
        self._marks: list[tuple[int, int, int]] = []

    @property
    def complete(self) -> bool:
        """Whether all of the execution is in it."""
        return self.started != 0

    def fold(self, event: EventIn) -> None:
        """Take an event into account, in any order; those of other executions change nothing."""
        if event.execution != self.execution:
            return
        if event.role is Role.STARTED:
            self.started = event.sequence
        if event.completes:
            self._completed[event.completes] = event.sequence
        if event.through >= 0:
            self._marks.append((event.sequence, event.epoch, event.through))

    def oldest(self, sequence: int) -> None:
        """Nothing is kept before `sequence`: what began earlier counts as begun there."""
        self.started = self.started or sequence

    def completed(self, entity: str, at: int) -> bool:
        """Whether an event at or below `at` completes `entity`."""
        return self._completed.get(entity, at + 1) <= at

    def marks(self, epoch: int, at: int) -> list[int]:
        """The frames_through of the events of `epoch` at or below `at`, ascending."""
        return sorted({through for sequence, of, through in self._marks if of == epoch and sequence <= at})


class Snapshot(NamedTuple):
    """Kept frames for a reader that has or gets the events up to some sequence.

    `pieces` ascend, joined but never over the frames_through of an event; what the reader does not need is withheld.
    `started` is the sequence from which on events of the execution come.
    """

    execution: str
    epoch: int
    started: int
    pieces: Sequence[FrameIn]

    def up_to(self, position: int, through: int) -> int:
        """Where in `pieces`, from `position` on, those up to frame index `through` end."""
        return max(position, bisect_left(self.pieces, through + 1, key=lambda piece: piece.last))


def condense(frames: Sequence[FrameIn], view: View, at: int) -> list[FrameIn]:
    """What a reader with the events up to `at` needs of `frames`, in as few pieces as possible.

    `frames` are of one epoch and ascend. Those of entities completed at or below `at` are withheld; text is joined
    where no event lies between.
    """
    if not frames:
        return []
    needed = [frame._replace(reply=b"") if view.completed(frame_of(frame).entity_id, at) else frame for frame in frames]
    pieces: list[FrameIn] = []
    start = 0
    for mark in (*view.marks(frames[0].epoch, at), frames[-1].last):
        stop = bisect_left(needed, mark + 1, lo=start, key=lambda frame: frame.last)
        pieces += _as_few(needed[start:stop])
        start = stop
    return pieces


def _as_few(frames: Sequence[FrameIn]) -> list[FrameIn]:
    pieces: list[FrameIn] = []
    for piece in merge(frames):
        assert isinstance(piece, FrameIn)
        if pieces and not pieces[-1].reply and not piece.reply and pieces[-1].last + 1 == piece.first:
            pieces[-1] = pieces[-1]._replace(last=piece.last)
        else:
            pieces.append(piece)
    return pieces
