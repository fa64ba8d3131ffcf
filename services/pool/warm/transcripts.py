"""The conversation so far, in words, for an agent that cannot load its own record of it."""

from __future__ import annotations

from collections.abc import Iterable

from hearth.types.v1 import content_pb2, event_pb2
from services.pool.harness.updates import attachment_path

# Of the whole transcript, and of the input and output of one tool call, in characters.
BUDGET = 200_000
_TOOL = 2_000

_HEAD = (
    "The conversation so far, taken from its log. You are the agent in it. It is context, not a request: "
    "answer only the message that follows it."
)
_HEAD_SINCE = (
    "What happened in this conversation since your last turn, taken from its log. It is context, not a request: "
    "answer only the message that follows it."
)
_CUT = "[earlier parts of the conversation are left out]"

_STATUS = {
    event_pb2.TOOL_STATUS_SUCCEEDED: "done",
    event_pb2.TOOL_STATUS_FAILED: "failed",
    event_pb2.TOOL_STATUS_DENIED: "denied, it did not run",
    event_pb2.TOOL_STATUS_CANCELLED: "cut off, it may have had effects",
    event_pb2.TOOL_STATUS_UNKNOWN: "result unknown, it may have had effects",
}


class Transcript:
    """Built from the newest event backwards, until the budget is used up. `since_known`: the agent knows the rest."""

    def __init__(self, budget: int = BUDGET, *, since_known: bool = False) -> None:
        self._head = _HEAD_SINCE if since_known else _HEAD
        self._left = budget
        self._parts: list[str] = []
        self._full = False

    def add(self, event: event_pb2.Event) -> bool:
        """Put an event before those added so far; False when nothing more fits."""
        text = _words(event)
        if not text:
            return not self._full
        if len(text) > self._left:
            self._full = True
            return False
        self._left -= len(text)
        self._parts.append(text)
        return True

    def text(self) -> str:
        """The transcript; empty when nothing was said."""
        if not self._parts:
            return ""
        cut = [_CUT] if self._full else []
        return "\n\n".join([self._head, *cut, *reversed(self._parts)])


def _words(event: event_pb2.Event) -> str:
    match event.WhichOneof("body"):
        case "message_completed":
            return _message(event.message_completed)
        case "tool_completed":
            return _tool(event.tool_completed)
        case "execution_stopped":
            return "[the turn was stopped]"
        case "execution_failed":
            return f"[the turn failed: {event.execution_failed.code}]"
        case "execution_lost":
            return "[the turn was cut off; what it did last is unknown]"
        case _:
            return ""


def _message(message: event_pb2.MessageCompleted) -> str:
    text = _text(message.content)
    if not text:
        return ""
    if message.role == content_pb2.ROLE_USER:
        return f"User: {text}"
    if message.role == content_pb2.ROLE_AGENT:
        return f"Agent: {text}" + (" [cut off]" if message.finish_reason in {"stopped", "truncated"} else "")
    return ""


def _tool(call: event_pb2.ToolCompleted) -> str:
    result = _cut(call.error or call.output)
    status = _STATUS.get(call.status, "result unknown")
    return f"Tool {call.name} with {_cut(call.input_json)}: {status}" + (f"\n{result}" if result else "")


def _text(content: Iterable[content_pb2.ContentPart]) -> str:
    parts = []
    for part in content:
        match part.WhichOneof("part"):
            case "text":
                parts.append(part.text.text)
            case "resource_link":
                parts.append(f"[link {part.resource_link.uri}]")
            case "attachment":
                # Where it lies: the workspace outlives the sandbox and the agent that it was written for.
                where = attachment_path(part.attachment, "")
                parts.append(f"[file {part.attachment.name}, in the workspace at {where}]")
            case "inline_media":
                parts.append(f"[{part.inline_media.media_type}]")
    return "\n".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= _TOOL else text[:_TOOL] + " [cut]"
