"""What the three APIs have in common: a request is read, and its answer written piece by piece or as a whole."""

from __future__ import annotations

import abc
import json
import secrets
from collections.abc import Iterator, Sequence

from tests.support.models.conversation import Conversation, Json
from tests.support.models.script import Call, Piece, Say


class Wire(abc.ABC):
    """One API; an object serves one request. The methods that stream yield server-sent events."""

    path: str

    @abc.abstractmethod
    def read(self, body: Json) -> Conversation:
        """What is asked."""

    @abc.abstractmethod
    def begin(self, body: Json) -> Iterator[bytes]:
        """What comes before the first piece."""

    @abc.abstractmethod
    def piece(self, body: Json, piece: Say | Call) -> Iterator[bytes]:
        """The next piece of the answer."""

    @abc.abstractmethod
    def end(self, body: Json, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """What comes behind the last of these pieces."""

    @abc.abstractmethod
    def whole(self, body: Json, pieces: Sequence[Piece]) -> Json:
        """The answer in one."""

    def error(self, status: int, message: str) -> Json:
        """The body of a refusal."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": None, "param": None}}

    @staticmethod
    def event(data: Json, name: str = "") -> bytes:
        """A server-sent event."""
        head = f"event: {name}\n" if name else ""
        return f"{head}data: {json.dumps(data)}\n\n".encode()


def new_id(prefix: str) -> str:
    """An id that nobody has."""
    return prefix + secrets.token_hex(12)


def joined(pieces: Sequence[Piece], *, thought: bool = False) -> str:
    """All that is said, or thought."""
    return "".join(piece.text for piece in pieces if isinstance(piece, Say) and piece.thought is thought)
