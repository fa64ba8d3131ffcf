"""Joins neighbouring text frames of one entity into one frame: the same text, in fewer messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.relay.v1 import relay_service_pb2
from hearth.types.v1 import frame_pb2
from services.relay.order import FrameIn, Out
from services.relay.wire import FrameWriter

# The contract's bound for a frame holds for a joined one too; the rest is room for what is not text.
_TEXT_MAX_BYTES = 60 * 1024


def frame_of(piece: FrameIn) -> frame_pb2.Frame:
    """The frame inside of a piece."""
    return relay_service_pb2.SubscribeResponse.FromString(piece.reply).items[0].frame.frame


def merge(pieces: Sequence[Out]) -> list[Out]:
    """`pieces` with each run of text frames of one entity joined as far as the size of a frame allows.

    A run is ended by anything else between, or by a hole in the indexes. Frames that are withheld (no reply) do not end
    it: the reader does not miss them.
    """
    merged: list[Out] = []
    run = _Run()
    for piece in pieces:
        if isinstance(piece, FrameIn) and run.takes(piece):
            continue
        merged += run.end()
        if not (isinstance(piece, FrameIn) and run.begins(piece)):
            merged.append(piece)
    return merged + run.end()


class _Run:
    """Frames that are being joined."""

    def __init__(self) -> None:
        self._pieces: list[FrameIn] = []
        self._texts: list[str] = []
        self._first: frame_pb2.Frame | None = None
        self._kind = ""
        self._size = 0
        # Withheld frames behind the run; they belong to it only if it goes on after them.
        self._behind: list[FrameIn] = []

    def begins(self, piece: FrameIn) -> bool:
        """Whether a run begins with `piece`, which then is part of it."""
        if not piece.reply:
            return False
        frame = frame_of(piece)
        kind, text = _text(frame)
        if not kind:
            return False
        self._pieces, self._texts, self._first, self._kind, self._size = [piece], [text], frame, kind, len(piece.reply)
        return True

    def takes(self, piece: FrameIn) -> bool:
        """Whether `piece` goes on with the run, of which it then is part."""
        if self._first is None:
            return False
        last = self._behind[-1] if self._behind else self._pieces[-1]
        if piece[:2] != last[:2] or piece.first != last.last + 1:
            return False
        if not piece.reply:
            self._behind.append(piece)
            return True
        if self._size + len(piece.reply) > _TEXT_MAX_BYTES:
            return False
        frame = frame_of(piece)
        kind, text = _text(frame)
        if kind != self._kind or frame.entity_id != self._first.entity_id:
            return False
        self._pieces.append(piece)
        self._texts.append(text)
        self._size += len(piece.reply)
        self._behind.clear()
        return True

    def end(self) -> list[Out]:
        """What became of the run, with the withheld frames behind it; the next one may begin."""
        if self._first is None:
            return []
        ended: list[Out] = [self._pieces[0] if len(self._pieces) == 1 else self._joined(self._first)]
        ended += self._behind
        self._pieces, self._texts, self._first, self._behind = [], [], None, []
        return ended

    def _joined(self, frame: frame_pb2.Frame) -> FrameIn:
        execution, epoch, first, _, _ = self._pieces[0]
        last = self._pieces[-1].last
        frame.merged_through = last
        getattr(frame, self._kind).text = "".join(self._texts)
        reply = FrameWriter(execution, epoch).reply(frame.SerializeToString())
        return FrameIn(execution, epoch, first, last, reply)


def _text(frame: frame_pb2.Frame) -> tuple[str, str]:
    """The body that is text to be continued, and the text; nothing when a frame cannot be joined with another."""
    match frame.WhichOneof("body"):
        case "text_delta":
            return "text_delta", frame.text_delta.text
        case "thought_delta":
            return "thought_delta", frame.thought_delta.text
        case "tool_output" if not frame.tool_output.replace:
            return "tool_output", frame.tool_output.text
    return "", ""
