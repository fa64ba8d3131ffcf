"""Reading ACP: what an agent says in JSON, as the values of the port. Pure.

Agents differ and change, so nothing here trusts a shape: what is not as expected says nothing new, and what has no word
in the port becomes an `OtherUpdate`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from hearth.types.v1 import content_pb2
from services.pool.harness.differences import MAX_STEPS, difference
from services.pool.harness.port import (
    OtherUpdate,
    PermissionAsked,
    PermissionOption,
    PlanChanged,
    PromptResult,
    QuestionAsked,
    TextChunk,
    ToolUpdate,
    Update,
    UsageChanged,
)

Json = Mapping[str, Any]

# Names text that a message carries as context, and that is no file.
CONTEXT_URI = "hearth:context"
# In the text of a dialog of Pi: the tool call that it is about. And how the ids of dialogs begin.
ASKED_CALL = "hearth.dev/tool_call"
_DIALOG = "pi-ui-"
# Of an id that is kept as it is.
_ID_CHARACTERS = 255


def read_update(update: object) -> Update | None:
    """The `update` of a `session/update` notification; None when there is nothing in it for anybody."""
    found: Json = update if isinstance(update, dict) else {}
    kind = found.get("sessionUpdate")
    match kind:
        case "agent_message_chunk" | "agent_thought_chunk":
            return _chunk(found, thought=kind == "agent_thought_chunk")
        case "tool_call" | "tool_call_update":
            return _tool(found, started=kind == "tool_call")
        case "plan":
            return PlanChanged([_step(entry) for entry in _list(found, "entries") if isinstance(entry, dict)])
        case "usage_update":
            return UsageChanged(_context_usage(found))
        case str() if kind != "user_message_chunk":
            return OtherUpdate(clean(kind), to_json(found))
    return None


def is_usage(update: object) -> bool:
    """Whether the `update` of a notification tells what a session has used; it counts also while nothing runs."""
    return isinstance(update, dict) and update.get("sessionUpdate") == "usage_update"


def read_permission(request_key: str, params: object) -> PermissionAsked | None:
    """The params of `session/request_permission`; None when they do not say what is asked."""
    if not isinstance(params, dict) or not isinstance(params.get("toolCall"), dict):
        return None
    call = _asked_call(params["toolCall"])
    options = [
        PermissionOption(_text(option, "optionId"), _text(option, "name"), _text(option, "kind"))
        for option in _list(params, "options")
        if isinstance(option, dict) and isinstance(option.get("optionId"), str)
    ]
    return PermissionAsked(
        request_key=request_key,
        tool_call_id=short_id(_text(call, "toolCallId")),
        title=_text(call, "title"),
        kind=_text(call, "kind"),
        input_json=_input(call) or "{}",
        options=options,
    )


def _asked_call(call: Json) -> Json:
    """The call that is asked about. An extension of Pi can only ask by a dialog; ours names the call in its text, in
    the shape of a call. What a model can write is no such thing: a dialog is told by its id, which is the adapter's."""
    dialog = _object(call, "rawInput")
    if not _text(call, "toolCallId").startswith(_DIALOG) or dialog.get("method") != "confirm":
        return call
    try:
        message: object = json.loads(_text(dialog, "message"))
    except ValueError:
        return call
    return (_object(message, ASKED_CALL) if isinstance(message, dict) else {}) or call


def read_question(request_key: str, method: str, params: object) -> QuestionAsked:
    """The params of `_hearth/ask` (`prompt`, `schema`) or `_hearth/client_tool` (`name`, `input`, `schema`)."""
    found: Json = params if isinstance(params, dict) else {}
    client_tool = method == "_hearth/client_tool"
    schema = found.get("schema")
    prompt = _text(found, "prompt") or _text(found, "question")
    return QuestionAsked(
        request_key=request_key,
        tool_call_id=short_id(_text(found, "toolCallId")),
        client_tool=client_tool,
        prompt=_text(found, "name") if client_tool else prompt,
        input_json=to_json(found["input"]) if found.get("input") is not None else "{}",
        schema_json=to_json(schema) if schema is not None else "",
    )


def read_result(result: object) -> PromptResult | None:
    """The result of `session/prompt`; None when it does not say why the agent stopped."""
    if not isinstance(result, dict) or not isinstance(result.get("stopReason"), str):
        return None
    meta = result.get("_meta")
    return PromptResult(
        stop_reason=clean(result["stopReason"]),
        usage=_turn_usage(result["usage"]) if isinstance(result.get("usage"), dict) else None,
        report_json=to_json(meta) if isinstance(meta, dict) and meta else "",
    )


def prompt_blocks(
    content: Sequence[content_pb2.ContentPart], workspace: str, capabilities: Json
) -> list[dict[str, Any]]:
    """A message of a user as ACP content blocks. An attachment becomes a link to its file in the workspace.

    `capabilities` are the agent's `promptCapabilities`: what it does not take is given as text, or named.
    """
    return [block for part in content if (block := _block(part, workspace, capabilities)) is not None]


def attachment_path(attachment: content_pb2.AttachmentPart, workspace: str) -> str:
    """Where an attachment lies in the sandbox."""
    name = PurePosixPath(attachment.name).name or "file"
    return str(PurePosixPath(workspace, ".hearth", "attachments", attachment.attachment_id, name))


def set_apart(text: str) -> str:
    """A text that others follow in a message, with a blank line at its end: some agents join them as they are."""
    return text.rstrip("\n") + "\n\n"


def to_json(value: object) -> str:
    """JSON text, in one line, with the characters as they are."""
    return clean(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def short_id(text: str) -> str:
    """An id of the agent, of which many are kept: itself, or its digest when it is long."""
    return text if len(text) <= _ID_CHARACTERS else hashlib.sha256(text.encode()).hexdigest()


def clean(text: str) -> str:
    """Text that UTF-8 and every reader can carry: no lone surrogates, no NUL."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chunk(update: Json, *, thought: bool) -> Update:
    content = _object(update, "content")
    message_id = _text(update, "messageId")
    match content:
        case {"type": "text", "text": str(text)}:
            # Not cleaned: half of a surrogate pair may come in the next chunk.
            return TextChunk(message_id, text, thought)
        case {"type": "resource_link", "uri": str(uri)}:
            return TextChunk(message_id, clean(f"[{content.get('name') or uri}]({uri})"), thought)
        case {"type": "resource", "resource": {"text": str(text)}}:
            return TextChunk(message_id, clean(text), thought)
    name = f"{update['sessionUpdate']}/{content.get('type')}"
    return OtherUpdate(clean(name), to_json(content))


def _tool(update: Json, *, started: bool) -> ToolUpdate:
    return ToolUpdate(
        tool_call_id=short_id(_text(update, "toolCallId")),
        started=started,
        title=_text(update, "title"),
        kind=_text(update, "kind"),
        status=_text(update, "status"),
        input_json=_input(update),
        output=_output(update),
        more_output=_terminal_output(update),
        raw_output=_raw_output(update),
    )


def _input(call: Json) -> str:
    raw = call.get("rawInput")
    return "" if raw is None else to_json(raw)


def _terminal_output(update: Json) -> str:
    """What a command wrote since the last update, where an agent tells it so: beside the content, which then only names
    the terminal."""
    return _text(_object(_object(update, "_meta"), "terminal_output"), "data")


def _output(update: Json) -> str | None:
    content = update.get("content")
    if "terminal_info" in _object(update, "_meta"):
        return None
    if isinstance(content, list) and content:
        # One message holds any number of edits.
        steps = MAX_STEPS // len(content)
        return "\n".join(text for part in content if (text := _content_text(part, steps)))
    return None


def _raw_output(update: Json) -> str | None:
    raw = update.get("rawOutput")
    if raw is None or "terminal_info" in _object(update, "_meta"):
        return None
    if isinstance(raw, str):
        return clean(raw)
    if isinstance(raw, dict) and isinstance(raw.get("output"), str):
        return clean(raw["output"])
    return to_json(raw)


def _content_text(part: object, steps: int) -> str:
    match part:
        case {"type": "content", "content": {"type": str(kind)} as content}:
            return clean(_block_text(kind, content))
        case {"type": "diff", "path": str(path), **rest}:
            before, after = (text if isinstance(text, str) else "" for text in map(rest.get, ("oldText", "newText")))
            return clean(difference(path, before, after, steps=steps))
        case {"type": "terminal", "terminalId": str(terminal)}:
            return clean(f"[terminal {terminal}]")
    return ""


def _block_text(kind: str, content: Json) -> str:
    match content:
        case {"text": str(text)}:
            return text
        case {"uri": str(uri)}:
            return uri
        case {"resource": {"text": str(text)}}:
            return text
    return f"[{kind}]"


def _step(entry: Json) -> tuple[str, str, str]:
    return _text(entry, "content"), _text(entry, "status"), _text(entry, "priority")


def _context_usage(update: Json) -> content_pb2.Usage:
    usage = content_pb2.Usage(
        context_tokens=_count(update, "used"),
        context_window_tokens=_count(update, "size"),
    )
    match update.get("cost"):
        case {"amount": int() | float() as amount, "currency": "USD"} if 0 <= amount < 1e9:
            usage.cost_micro_usd = round(amount * 1_000_000)
    return usage


def _turn_usage(usage: Json) -> content_pb2.Usage:
    return content_pb2.Usage(
        input_tokens=_count(usage, "inputTokens"),
        output_tokens=_count(usage, "outputTokens"),
        cached_tokens=_count(usage, "cachedReadTokens"),
    )


def _block(part: content_pb2.ContentPart, workspace: str, capabilities: Json) -> dict[str, Any] | None:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text.text}
        case "resource_link":
            link = part.resource_link
            return _link(link.uri, link.name or link.uri, link.media_type)
        case "attachment":
            file = part.attachment
            uri = PurePosixPath(attachment_path(file, workspace)).as_uri()
            return _link(uri, file.name, file.media_type) | {"size": file.size_bytes}
        case "inline_media":
            return _media(part.inline_media, capabilities)
    return None


def _media(media: content_pb2.InlineMediaPart, capabilities: Json) -> dict[str, Any]:
    kind = media.media_type.partition("/")[0]
    if kind == "text":
        text = clean(media.data.decode("utf-8", "replace"))
        if capabilities.get("embeddedContext") is not True:
            return {"type": "text", "text": set_apart(text)}
        return {"type": "resource", "resource": {"uri": CONTEXT_URI, "mimeType": media.media_type, "text": text}}
    kind = "audio" if kind == "audio" else "image"
    if capabilities.get(kind) is not True:
        return {"type": "text", "text": f"[{media.media_type}, {len(media.data)} bytes, which this agent cannot take]"}
    return {"type": kind, "mimeType": media.media_type, "data": base64.b64encode(media.data).decode()}


def _link(uri: str, name: str, media_type: str) -> dict[str, Any]:
    block = {"type": "resource_link", "uri": uri, "name": name}
    return block | {"mimeType": media_type} if media_type else block


def _text(value: Json, name: str) -> str:
    found = value.get(name)
    return clean(found) if isinstance(found, str) else ""


def _object(value: Json, name: str) -> Json:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _list(value: Json, name: str) -> list[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else []


def _count(value: Json, name: str) -> int:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int):
        return 0
    return found if 0 <= found < 2**63 else 0
