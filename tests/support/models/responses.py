"""OpenAI Responses: `POST /v1/responses`."""

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
from tests.support.models.wire import Wire, new_id


class Responses(Wire):
    """See the module. Of an answer, neighbouring texts are one item, and so are neighbouring thoughts."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self._id = new_id("resp_")
        self._number = 0
        self._output: list[Json] = []  # finished items
        self._open: Json | None = None  # the item that is being written, and its text so far
        self._text = ""

    def read(self, body: Json) -> Conversation:
        entries = list_of(body, "input") or [{"type": "message", "role": "user", "content": body.get("input")}]
        messages = [entry for entry in entries if entry.get("type", "message") == "message"]
        system = [str(body.get("instructions") or "")]
        system += [text_of(entry.get("content")) for entry in messages if entry.get("role") in ("system", "developer")]
        return conversation(
            model=body.get("model"),
            stream=body.get("stream"),
            system="\n".join(system),
            items=[item for entry in entries if (item := _item(entry))],
            tools=[tool for entry in list_of(body, "tools") for tool in _tools(entry)],
            images=sum(images_in(entry.get("content")) for entry in messages),
        )

    def begin(self, body: Json) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(body, "in_progress"))

    def piece(self, body: Json, piece: Say | Call) -> Iterator[bytes]:
        if isinstance(piece, Call):
            yield from self._close()
            yield from self._call(piece)
            return
        kind = "reasoning" if piece.thought else "message"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin_item(kind)
        self._text += piece.text
        if piece.thought:
            yield self._inside("response.reasoning_summary_text.delta", "summary_index", delta=piece.text)
        else:
            yield self._inside("response.output_text.delta", "content_index", delta=piece.text, logprobs=[])

    def end(self, body: Json, pieces: Sequence[Piece]) -> Iterator[bytes]:
        yield from self._close()
        yield self._event("response.completed", response=self._response(body, "completed", len(pieces)))

    def whole(self, body: Json, pieces: Sequence[Piece]) -> Json:
        for piece in pieces:
            if isinstance(piece, Say | Call):
                list(self.piece(body, piece))
        list(self._close())
        return self._response(body, "completed", len(pieces))

    def _begin_item(self, kind: str) -> Iterator[bytes]:
        self._text = ""
        item: Json = {"id": new_id("rs_" if kind == "reasoning" else "msg_"), "type": kind}
        item |= {"summary": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        self._open = {**item, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._open)
        if kind == "reasoning":
            part: Json = {"type": "summary_text", "text": ""}
            yield self._inside("response.reasoning_summary_part.added", "summary_index", part=part)
        else:
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._inside("response.content_part.added", "content_index", part=part)

    def _close(self) -> Iterator[bytes]:
        """Finish the item that is open."""
        if self._open is None:
            return
        text = self._text
        if self._open["type"] == "reasoning":
            part: Json = {"type": "summary_text", "text": text}
            yield self._inside("response.reasoning_summary_text.done", "summary_index", text=text)
            yield self._inside("response.reasoning_summary_part.done", "summary_index", part=part)
            whole = {"summary": [part]}
        else:
            part = {"type": "output_text", "text": text, "annotations": []}
            yield self._inside("response.output_text.done", "content_index", text=text, logprobs=[])
            yield self._inside("response.content_part.done", "content_index", part=part)
            whole = {"content": [part]}
        item = {**self._open, **whole, "status": "completed"}
        self._open = None
        yield from self._done(item)

    def _call(self, call: Call) -> Iterator[bytes]:
        arguments = json.dumps(call.arguments)
        item: Json = {"id": new_id("fc_"), "type": "function_call", "call_id": new_id("call_"), "name": call.tool.name}
        if call.tool.namespace:
            item["namespace"] = call.tool.namespace
        place = len(self._output)
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        about = {"item_id": item["id"], "output_index": place}
        yield self._event("response.function_call_arguments.delta", **about, delta=arguments)
        yield self._event("response.function_call_arguments.done", **about, arguments=arguments)
        yield from self._done({**item, "arguments": arguments, "status": "completed"})

    def _done(self, item: Json) -> Iterator[bytes]:
        place = len(self._output)
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _inside(self, name: str, index: str, **data: object) -> bytes:
        """An event about the first part of the item that is open."""
        assert self._open is not None
        about = {"item_id": self._open["id"], "output_index": len(self._output), index: 0}
        return self._event(name, **about, **data)

    def _event(self, name: str, **data: object) -> bytes:
        self._number += 1
        return self.event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def _response(self, body: Json, status: str, answered: int = 0) -> Json:
        asked = len(json.dumps(body)) // 4
        usage = {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answered,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + answered,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "model": body.get("model"),
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "usage": usage if status == "completed" else None,
        }


def _item(entry: Json) -> Item | None:
    match entry:
        case {"type": "function_call_output" | "custom_tool_call_output" | "local_shell_call_output", "output": output}:
            return Item(Who.TOOL, _result(output))
        case {"role": "user", "content": content}:
            return Item(Who.USER, text_of(content))
    return None


def _result(output: object) -> str:
    """Agents give a tool's answer as text, as parts, or as an object with the content in it."""
    if isinstance(output, dict):
        return _result(output.get("content"))
    return text_of(output)


def _tools(entry: Json) -> Iterator[Tool]:
    """The functions among the tools; some come in groups, whose name is told apart when they are called."""
    if entry.get("type") == "namespace":
        for tool in list_of(entry, "tools"):
            yield Tool(str(tool.get("name")), tool.get("parameters") or {}, str(entry.get("name")))
    elif entry.get("type") == "function":
        yield Tool(str(entry.get("name")), entry.get("parameters") or {})
