"""The newest pieces of one session, kept until every reader has taken them, within bounds. Pure bookkeeping."""

from __future__ import annotations

from collections import deque

from services.relay.order import EventIn, FrameIn

# What a piece costs beside its bytes, so that many empty ones count too.
_PIECE_BYTES = 64


class Tail:
    """Pieces at positions that only grow: `first` is the oldest kept, `end` the next to come."""

    __slots__ = ("_max_bytes", "_max_pieces", "_pieces", "_sizes", "end", "first")

    def __init__(self, *, max_bytes: int, max_pieces: int) -> None:
        self._max_bytes = max_bytes
        self._max_pieces = max_pieces
        self._pieces: list[FrameIn | EventIn] = []
        # Bytes of everything ever appended before each kept piece, and before the next one.
        self._sizes: list[int] = [0]
        self.first = 0
        self.end = 0

    def append(self, piece: FrameIn | EventIn) -> None:
        """Add a piece at `end`."""
        self._pieces.append(piece)
        self._sizes.append(self._sizes[-1] + len(piece.reply) + _PIECE_BYTES)
        self.end += 1

    def size(self, start: int, stop: int) -> int:
        """Bytes of the pieces from `start` to before `stop`, all of them kept."""
        return self._sizes[stop - self.first] - self._sizes[start - self.first]

    def pieces(self, start: int, stop: int) -> list[FrameIn | EventIn]:
        """The pieces from `start` to before `stop`, all of them kept."""
        return self._pieces[start - self.first : stop - self.first]

    def fitting(self, start: int, stop: int, budget: int) -> int:
        """Where to stop so that the pieces from `start` have at most `budget` bytes; at least one, if there is one."""
        low, high = min(start + 1, stop), stop
        while low < high:
            middle = (low + high + 1) // 2
            if self.size(start, middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def trim(self, needed: int, *, fresh: int | None = None) -> None:
        """Let go of everything before position `needed`, and of the oldest beyond the bounds.

        What comes at `fresh` or later is not touched by the bounds: no reader had a chance to take it yet.
        """
        keep = max(needed, self.end - self._max_pieces, self.first)
        if self.size(keep, self.end) > self._max_bytes:
            keep = self._newest(keep)
        if fresh is not None:
            keep = max(min(keep, fresh), min(needed, self.end), self.first)
        if keep > self.first:
            gone = keep - self.first
            del self._pieces[:gone]
            del self._sizes[:gone]
            self.first = keep

    def break_off(self) -> None:
        """Let go of everything, and leave a hole: whoever stands at the end has missed something."""
        self.trim(self.end)
        self.first += 1
        self.end += 1

    def _newest(self, low: int) -> int:
        high = self.end
        while low < high:
            middle = (low + high) // 2
            if self.size(middle, self.end) <= self._max_bytes:
                high = middle
            else:
                low = middle + 1
        return low


class Waiting:
    """Frames of an execution whose start has not come yet: of the newest one only, over the bounds the oldest go."""

    __slots__ = ("_bytes", "_frames", "_max_bytes", "_max_frames")

    def __init__(self, *, max_bytes: int, max_frames: int) -> None:
        self._max_bytes = max_bytes
        self._max_frames = max_frames
        # Most sessions never need it, and an empty deque is as large as everything else here.
        self._frames: deque[FrameIn] | None = None
        self._bytes = 0

    def add(self, frame: FrameIn) -> None:
        """Keep a frame; those of an older epoch, or that are here already, are not."""
        if self._frames:
            newest = self._frames[-1]
            if frame.epoch < newest.epoch or (frame.epoch == newest.epoch and frame.first <= newest.last):
                return
            if frame.epoch > newest.epoch:
                self.clear()
        if self._frames is None:
            self._frames = deque()
        self._frames.append(frame)
        self._bytes += len(frame.reply)
        while self._bytes > self._max_bytes or len(self._frames) > self._max_frames:
            self._bytes -= len(self._frames.popleft().reply)

    def release(self, execution: str, epoch: int) -> list[FrameIn]:
        """The frames of an execution that begins at `epoch`; nothing is kept after it but what is newer."""
        if not self._frames or (newest := self._frames[-1]).epoch < epoch:
            self.clear()
            return []
        if newest.execution != execution:
            if newest.epoch == epoch:
                self.clear()
            return []
        released = list(self._frames)
        self.clear()
        return released

    def clear(self) -> None:
        """Keep nothing."""
        self._frames = None
        self._bytes = 0
