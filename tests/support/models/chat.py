"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
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
from tests.support.models.wire import Wire, joined, new_id

_WHO = {"user": Who.USER, "assistant": Who.MODEL, "tool": Who.TOOL}


class Chat(Wire):
    """See the module."""

    path = "/v1/chat/completions"

    def read(self, body: Json) -> Conversation:
        messages = list_of(body, "messages")
        return conversation(
            model=body.get("model"),
            stream=body.get("stream"),
            system="\n".join(text_of(m.get("content")) for m in messages if m.get("role") in ("system", "developer")),
            items=[Item(_WHO[m["role"]], text_of(m.get("content"))) for m in messages if m.get("role") in _WHO],
            tools=[_tool(entry["function"]) for entry in list_of(body, "tools") if entry.get("type") == "function"],
            images=sum(images_in(message.get("content")) for message in messages),
        )

    def begin(self, body: Json) -> Iterator[bytes]:
        self._id = new_id("chatcmpl-")
        yield self._chunk(body, {"role": "assistant", "content": ""})

    def piece(self, body: Json, piece: Say | Call) -> Iterator[bytes]:
        if isinstance(piece, Say):
            yield self._chunk(body, {"reasoning_content" if piece.thought else "content": piece.text})
            return
        arguments = json.dumps(piece.arguments)
        start = {"name": piece.tool.name, "arguments": ""}
        call = {"index": 0, "id": new_id("call_"), "type": "function", "function": start}
        yield self._chunk(body, {"tool_calls": [call]})
        yield self._chunk(body, {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})

    def end(self, body: Json, pieces: Sequence[Piece]) -> Iterator[bytes]:
        yield self._chunk(body, {}, _reason(pieces))
        if isinstance(options := body.get("stream_options"), dict) and options.get("include_usage"):
            yield self.event({**self._frame(body), "choices": [], "usage": _usage(body, pieces)})
        yield b"data: [DONE]\n\n"

    def whole(self, body: Json, pieces: Sequence[Piece]) -> Json:
        message: Json = {"role": "assistant", "content": joined(pieces)}
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        if calls:
            message["tool_calls"] = [
                {
                    "id": new_id("call_"),
                    "type": "function",
                    "function": {"name": call.tool.name, "arguments": json.dumps(call.arguments)},
                }
                for call in calls
            ]
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": _reason(pieces)}],
            "usage": _usage(body, pieces),
        }

    def _frame(self, body: Json) -> Json:
        created = int(time.time())
        return {"id": self._id, "object": "chat.completion.chunk", "created": created, "model": body.get("model")}

    def _chunk(self, body: Json, delta: Json, reason: str | None = None) -> bytes:
        return self.event({**self._frame(body), "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _tool(function: Json) -> Tool:
    return Tool(str(function.get("name")), function.get("parameters") or {})


def _reason(pieces: Sequence[Piece]) -> str:
    return "tool_calls" if any(isinstance(piece, Call) for piece in pieces) else "stop"


def _usage(body: Json, pieces: Sequence[Piece]) -> Json:
    asked, answered = len(json.dumps(body)) // 4, len(pieces)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
