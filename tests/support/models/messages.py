"""Anthropic Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from tests.support.models.conversation import (
    Conversation,
    Item,
    Json,
    Tool,
    Who,
    conversation,
    images_in,
    list_of,
    text_of,
)
from tests.support.models.script import Call, Piece, Say
from tests.support.models.wire import Wire, new_id


class Messages(Wire):
    """See the module. Of an answer, neighbouring texts are one block, and so are neighbouring thoughts."""

    path = "/v1/messages"

    def __init__(self) -> None:
        self._blocks: list[Json] = []
        self._open = ""  # the kind of the block that is being written

    def read(self, body: Json) -> Conversation:
        messages = list_of(body, "messages")
        return conversation(
            model=body.get("model"),
            stream=body.get("stream"),
            system=text_of(body.get("system")),
            items=[item for message in messages for item in _items(message)],
            tools=[Tool(str(tool.get("name")), tool.get("input_schema") or {}) for tool in list_of(body, "tools")],
            images=sum(images_in(message.get("content")) for message in messages),
        )

    def begin(self, body: Json) -> Iterator[bytes]:
        message = {**self._message(body), "content": [], "stop_reason": None, "usage": _usage(body, 1)}
        yield self._event("message_start", message=message)
        yield self._event("ping")

    def piece(self, body: Json, piece: Say | Call) -> Iterator[bytes]:
        if isinstance(piece, Call):
            yield from self._close()
            call: Json = {"type": "tool_use", "id": new_id("toolu_"), "name": piece.tool.name}
            yield from self._begin_block({**call, "input": {}}, {**call, "input": dict(piece.arguments)})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(piece.arguments)})
            yield from self._close()
            return
        kind = "thinking" if piece.thought else "text"
        if self._open != kind:
            yield from self._close()
            block = {"type": kind, kind: ""} | ({"signature": ""} if piece.thought else {})
            yield from self._begin_block(block, dict(block))
        self._blocks[-1][kind] += piece.text
        yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def end(self, body: Json, pieces: Sequence[Piece]) -> Iterator[bytes]:
        yield from self._close()
        delta = {"stop_reason": _reason(pieces), "stop_sequence": None}
        yield self._event("message_delta", delta=delta, usage={"output_tokens": len(pieces)})
        yield self._event("message_stop")

    def whole(self, body: Json, pieces: Sequence[Piece]) -> Json:
        for piece in pieces:
            if isinstance(piece, Say | Call):
                list(self.piece(body, piece))
        return {
            **self._message(body),
            "content": self._blocks,
            "stop_reason": _reason(pieces),
            "usage": _usage(body, len(pieces)),
        }

    def error(self, status: int, message: str) -> Json:
        kinds = {429: "rate_limit_error", 529: "overloaded_error"}
        kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def _begin_block(self, shown: Json, kept: Json) -> Iterator[bytes]:
        self._open = shown["type"]
        self._blocks.append(kept)
        yield self._event("content_block_start", index=len(self._blocks) - 1, content_block=shown)

    def _close(self) -> Iterator[bytes]:
        """Finish the block that is open."""
        if self._open == "thinking":
            self._blocks[-1]["signature"] = "c2lnbmVk"
            yield self._delta({"type": "signature_delta", "signature": "c2lnbmVk"})
        if self._open:
            yield self._event("content_block_stop", index=len(self._blocks) - 1)
        self._open = ""

    def _delta(self, delta: Json) -> bytes:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _event(self, name: str, **data: object) -> bytes:
        return self.event({"type": name, **data}, name)

    @staticmethod
    def _message(body: Json) -> Json:
        about = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": body.get("model")}
        return {**about, "stop_sequence": None}


def _items(message: Json) -> Iterator[Item]:
    """Results of tools come in messages of the user, beside what is said."""
    content = message.get("content")
    if message.get("role") != "user":
        return
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    for part in parts:
        if part.get("type") == "tool_result":
            yield Item(Who.TOOL, text_of(part.get("content")))
    yield Item(Who.USER, content if isinstance(content, str) else text_of(parts))


def _reason(pieces: Sequence[Piece]) -> str:
    return "tool_use" if any(isinstance(piece, Call) for piece in pieces) else "end_turn"


def _usage(body: Json, answered: int) -> Json:
    return {"input_tokens": len(json.dumps(body)) // 4, "output_tokens": answered}
