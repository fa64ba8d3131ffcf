"""From the updates of one turn to what readers get: frames while it happens, whole messages and tool calls as events.

Pure: updates in, frames and events out, in the order in which they must be written. One assembler for each execution.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from enum import Enum

from hearth.producer import FrameBody
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2
from services.pool.harness.port import (
    OtherUpdate,
    PermissionAsked,
    PlanChanged,
    QuestionAsked,
    TextChunk,
    ToolUpdate,
    Update,
    UsageChanged,
)
from services.pool.harness.updates import clean, to_json

# A frame may have 64 KiB and an event 1 MiB; what is left is for their other fields.
FRAME_TEXT_BYTES = 60 * 1024
MESSAGE_BYTES = 768 * 1024
TOOL_INPUT_BYTES = 256 * 1024
TOOL_OUTPUT_BYTES = 512 * 1024
TOOL_ERROR_BYTES = 16 * 1024
NAME_BYTES = 1024
# Of the output of one tool call: what is shown live, and kept to see by how much it grew. More than its event holds.
LIVE_OUTPUT_BYTES = 1024 * 1024
# Of the tool calls that run: how many, and the characters that are kept of all of them. An agent that begins more does
# not tell of their ends.
OPEN_TOOLS = 128
OPEN_TOOLS_CHARACTERS = 32 * 1024 * 1024
ENTITY_CHARACTERS = 255

_SUCCEEDED = event_pb2.TOOL_STATUS_SUCCEEDED
_FAILED = event_pb2.TOOL_STATUS_FAILED
_DENIED = event_pb2.TOOL_STATUS_DENIED
_CANCELLED = event_pb2.TOOL_STATUS_CANCELLED
_UNKNOWN = event_pb2.TOOL_STATUS_UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True)
class FrameOut:
    """A frame to publish."""

    entity_id: str
    body: FrameBody


@dataclasses.dataclass(frozen=True, slots=True)
class EventOut:
    """An event to append. Execution, epoch, id and time are the writer's business."""

    event: event_pb2.Event


Output = FrameOut | EventOut


class TurnEnd(Enum):
    """How a turn ended, as far as open messages and tool calls are concerned."""

    END = "end"  # by itself
    PAUSED = "paused"  # tool calls that wait for a person are left open
    STOPPED = "stopped"  # somebody cut it
    TRUNCATED = "truncated"  # part of the output was lost


@dataclasses.dataclass(slots=True)
class _Message:
    id: str
    agent_id: str
    thought: bool
    parts: list[str] = dataclasses.field(default_factory=list)
    size: int = 0
    # First half of a character that was cut in two; its other half begins the next chunk.
    half: str = ""


@dataclasses.dataclass(slots=True)
class _Tool:
    id: str
    name: str = ""
    kind: str = ""
    status: str = ""
    input_json: str = ""
    # Its beginning, of at most LIVE_OUTPUT_BYTES; and whether there was more.
    output: io.StringIO = dataclasses.field(default_factory=io.StringIO)
    output_bytes: int = 0
    output_cut: bool = False
    live_bytes: int = 0
    told: bool = False  # the agent told of it, and so will tell of its end
    asked: bool = False  # it waits for a person
    allowed: bool = False
    denied: bool = False
    raw: bool = False  # its output is that of which an agent has no better words
    client: bool = False  # known by the request alone that a client should run it

    @property
    def size(self) -> int:
        """About how many characters are kept of it."""
        return len(self.name) + len(self.kind) + len(self.input_json) + self.output_bytes


class TurnAssembler:
    """The messages and tool calls of one turn.

    Messages get fresh ids: agents number their chunks per session or not at all. A tool call keeps the id that the
    agent gave it, so that permissions and results can be matched; it may come again in another turn, and belongs to
    another execution there. A call that comes again after it was completed in this turn gets a suffix: `call-1#2`.
    """

    def __init__(self, execution_id: str, ids: Callable[[], str]) -> None:
        self._execution_id = execution_id
        self._ids = ids
        self._message: _Message | None = None
        # By the agent's id, in order of appearance; and the events of completed ones, how many and under which id.
        self._tools: dict[str, _Tool] = {}
        self._completed: dict[str, tuple[int, str]] = {}
        self.usage = content_pb2.Usage()
        # False until the agent said, did or asked anything.
        self.produced_anything = False

    @property
    def running_tools(self) -> list[str]:
        """Ids of the tool calls that run, as events name them: the agent tells of them, and they wait for nobody."""
        return [tool.id for tool in self._tools.values() if tool.told and not (tool.asked or tool.denied)]

    @property
    def allowed_tools(self) -> list[str]:
        """Ids of the tool calls that somebody was asked about and has allowed, and that have not ended."""
        return [tool.id for tool in self._tools.values() if tool.allowed and not tool.asked]

    def entity_of(self, tool_call_id: str) -> str:
        """The id under which frames and events name a tool call that the agent names so."""
        tool = self._tools.get(tool_call_id)
        if tool is not None:
            return tool.id
        return self._completed.get(tool_call_id, (0, tool_call_id))[1]

    def take(self, update: Update) -> list[Output]:
        """What to write for an update."""
        return list(self._take(update))

    def _take(self, update: Update) -> Iterator[Output]:
        match update:
            case TextChunk():
                yield from self._text(update)
            case ToolUpdate():
                yield from self._tool(update)
                yield from self._make_room()
            case PermissionAsked():
                yield from self._asked(update)
                yield from self._make_room()
            case QuestionAsked():
                self.produced_anything = True
                yield from self._complete_message("end")
                if update.client_tool and update.tool_call_id:
                    yield from self._client_tool(update)
            case PlanChanged():
                yield FrameOut(self._execution_id, {"plan": _plan(update)})
            case UsageChanged():
                self._merge(update.usage)
                yield FrameOut(self._execution_id, {"usage": frame_pb2.UsageUpdate(usage=self.usage)})
            case OtherUpdate():
                pass

    def decided(self, tool_call_id: str, *, allowed: bool) -> None:
        """Somebody decided about a `PermissionAsked`. A denied call is completed as DENIED, whatever the agent says."""
        tool = self._tools.get(tool_call_id)
        if tool is not None:
            tool.asked = False
            tool.allowed, tool.denied = allowed, not allowed

    def answered(self, tool_call_id: str, output: str | None) -> list[Output]:
        """What to write when a `QuestionAsked` was answered, with None by nobody. The result of a client's tool is its
        output, unless the agent itself tells of the call."""
        tool = self._tools.get(tool_call_id)
        if tool is None:
            return []
        tool.asked = False
        if not tool.client:
            return []
        if output is None:
            return [self._complete_tool(tool, _CANCELLED)]
        return [*self._set_output(tool, clean(output)), self._complete_tool(tool, _SUCCEEDED)]

    def about(self, asked: PermissionAsked) -> PermissionAsked:
        """The same with what was said of its call before, where the request itself is silent."""
        tool = self._tools.get(asked.tool_call_id)
        if tool is None:
            return asked
        return dataclasses.replace(
            asked,
            title=asked.title or tool.name,
            kind=asked.kind or tool.kind,
            input_json=asked.input_json if asked.input_json not in {"", "{}"} else tool.input_json or "{}",
        )

    def finish(self, end: TurnEnd, usage: content_pb2.Usage | None = None) -> list[event_pb2.Event]:
        """The events that complete what is still open. Call it once; `usage` is that of the agent's answer."""
        if usage is not None:
            self._merge(usage)
        reason = end.value if end in (TurnEnd.STOPPED, TurnEnd.TRUNCATED) else "end"
        outputs = [*self._complete_message(reason)]
        for tool in list(self._tools.values()):
            if tool.denied:
                outputs.append(self._complete_tool(tool, _DENIED))
            elif end is TurnEnd.STOPPED or (tool.asked and end is not TurnEnd.PAUSED):
                outputs.append(self._complete_tool(tool, _CANCELLED))
            elif not tool.asked:
                outputs.append(self._complete_tool(tool, _UNKNOWN))
        self._tools.clear()
        return [output.event for output in outputs if isinstance(output, EventOut)]

    # Messages

    def _text(self, chunk: TextChunk) -> Iterator[Output]:
        open_one = self._message
        if open_one is not None:
            other = bool(chunk.message_id and open_one.agent_id and chunk.message_id != open_one.agent_id)
            if other or open_one.thought != chunk.thought:
                yield from self._complete_message("end")
        before = self._message.half if self._message is not None else ""
        text, half = _whole(before + chunk.text)
        if not (text or half):
            return
        message = self._open_message(chunk)
        message.half = ""
        for piece in split(text, FRAME_TEXT_BYTES):
            size = _bytes(piece)
            if message.size + size > MESSAGE_BYTES:
                yield from self._complete_message("end")
                message = self._open_message(chunk)
            message.parts.append(piece)
            message.size += size
            if chunk.thought:
                yield FrameOut(message.id, {"thought_delta": frame_pb2.ThoughtDelta(text=piece)})
            else:
                yield FrameOut(message.id, {"text_delta": frame_pb2.TextDelta(text=piece)})
        message.half = half

    def _open_message(self, chunk: TextChunk) -> _Message:
        if self._message is None:
            self._message = _Message(self._ids(), chunk.message_id, chunk.thought)
            self.produced_anything = True
        return self._message

    def _complete_message(self, reason: str) -> Iterator[Output]:
        message, self._message = self._message, None
        if message is None or not message.parts:
            return
        # Without half a character at its end: readers got none of that, and are to have the same text.
        text = "".join(message.parts)
        yield EventOut(
            event_pb2.Event(
                type="message.completed",
                entity_id=message.id,
                message_completed=event_pb2.MessageCompleted(
                    message_id=message.id,
                    role=content_pb2.ROLE_THOUGHT if message.thought else content_pb2.ROLE_AGENT,
                    content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))],
                    finish_reason=reason,
                ),
            )
        )

    # Tool calls

    def _tool(self, update: ToolUpdate) -> Iterator[Output]:
        tool = self._tools.get(update.tool_call_id)
        if tool is None and not update.started and update.tool_call_id in self._completed:
            return  # an afterthought about a call whose event is written
        if tool is None:
            yield from self._complete_message("end")
            tool = self._open_tool(update.tool_call_id, update.title, update.kind, update.input_json)
            yield _started(tool)
        else:
            yield from self._change(tool, update)
        tool.told = True
        tool.status = cut(update.status, NAME_BYTES) or tool.status
        if update.output is not None:
            tool.raw = False
            yield from self._set_output(tool, update.output)
        elif update.raw_output is not None and (tool.raw or not tool.output_bytes or update.status == "failed"):
            tool.raw = True
            yield from self._set_output(tool, update.raw_output)
        if update.more_output:
            yield from self._add_output(tool, update.more_output)
        if update.status in ("completed", "failed"):
            yield from self._complete_message("end")
            failed = _DENIED if tool.denied else _FAILED
            yield self._complete_tool(tool, _SUCCEEDED if update.status == "completed" else failed)

    def _asked(self, asked: PermissionAsked) -> Iterator[Output]:
        # What was said before the question must be in the log while it waits for an answer, which may take days.
        yield from self._complete_message("end")
        tool = self._tools.get(asked.tool_call_id)
        if tool is None:
            tool = self._open_tool(asked.tool_call_id, asked.title, asked.kind, asked.input_json)
            yield _started(tool)
        elif not tool.input_json and asked.input_json:
            tool.input_json = asked.input_json
        tool.asked = True

    def _client_tool(self, asked: QuestionAsked) -> Iterator[Output]:
        tool = self._tools.get(asked.tool_call_id)
        if tool is None:
            tool = self._open_tool(asked.tool_call_id, asked.prompt, "client", asked.input_json)
            tool.client = True
            yield _started(tool)
        tool.asked = True

    def _open_tool(self, tool_call_id: str, name: str, kind: str, input_json: str) -> _Tool:
        tool = _Tool(self._entity(tool_call_id), name, kind, input_json=input_json)
        self._tools[tool_call_id] = tool
        self.produced_anything = True
        return tool

    def _make_room(self) -> Iterator[Output]:
        """End the oldest calls that wait for nobody when there are too many: nothing tells how they ended."""
        size = sum(tool.size for tool in self._tools.values())
        for tool in list(self._tools.values()):
            if len(self._tools) <= OPEN_TOOLS and size <= OPEN_TOOLS_CHARACTERS:
                return
            if not tool.asked:
                size -= tool.size
                yield self._complete_tool(tool, _DENIED if tool.denied else _UNKNOWN)

    def _entity(self, tool_call_id: str) -> str:
        """A new id for a call: that of the agent, as far as it can be one."""
        if not tool_call_id or len(tool_call_id) > ENTITY_CHARACTERS - 8:
            return self._ids()
        times, _ = self._completed.get(tool_call_id, (0, ""))
        return f"{tool_call_id}#{times + 1}" if times else tool_call_id

    def _change(self, tool: _Tool, update: ToolUpdate) -> Iterator[Output]:
        title = update.title if update.title != tool.name else ""
        input_json = update.input_json if update.input_json != tool.input_json else ""
        status = update.status if update.status != tool.status and update.status in ("pending", "in_progress") else ""
        tool.name = update.title or tool.name
        tool.kind = update.kind or tool.kind
        tool.input_json = update.input_json or tool.input_json
        if title or input_json or status:
            delta = frame_pb2.ToolDelta(
                title=cut(title, NAME_BYTES),
                status=status,
                input_json=input_json if _bytes(input_json) <= FRAME_TEXT_BYTES else "",
            )
            yield FrameOut(tool.id, {"tool_delta": delta})

    def _set_output(self, tool: _Tool, output: str) -> Iterator[Output]:
        """All of a tool's output so far: its end is shown when it grew, else all of it."""
        before, kept = tool.output.getvalue(), cut(output, LIVE_OUTPUT_BYTES)
        tool.output_cut = len(kept) < len(output)
        if kept != before:
            replace = not kept.startswith(before)
            if replace:
                tool.output, tool.output_bytes = io.StringIO(), 0
            yield from self._keep_output(tool, kept if replace else kept[len(before) :], replace=replace)

    def _add_output(self, tool: _Tool, more: str) -> Iterator[Output]:
        """What follows a tool's output so far."""
        if tool.output_cut:
            return
        kept = cut(more, LIVE_OUTPUT_BYTES - tool.output_bytes)
        tool.output_cut = len(kept) < len(more)
        if kept:
            yield from self._keep_output(tool, kept, replace=False)

    @staticmethod
    def _keep_output(tool: _Tool, added: str, *, replace: bool) -> Iterator[Output]:
        tool.output.write(added)
        tool.output_bytes += _bytes(added)
        for piece in split(added, FRAME_TEXT_BYTES) or [""]:
            tool.live_bytes += _bytes(piece)
            if tool.live_bytes > LIVE_OUTPUT_BYTES:
                return
            yield FrameOut(tool.id, {"tool_output": frame_pb2.ToolOutput(text=piece, replace=replace)})
            replace = False

    def _complete_tool(self, tool: _Tool, status: event_pb2.ToolStatus.ValueType) -> EventOut:
        for tool_call_id, found in list(self._tools.items()):
            if found is tool:
                del self._tools[tool_call_id]
                self._completed[tool_call_id] = (self._completed.get(tool_call_id, (0, ""))[0] + 1, tool.id)
        kept = tool.output.getvalue()
        output = cut(kept, TOOL_OUTPUT_BYTES)
        input_json = tool.input_json or "{}"
        if _bytes(input_json) > TOOL_INPUT_BYTES:
            # Still JSON, and plainly not the arguments themselves.
            input_json = to_json({"hearth.dev/truncated": cut(input_json, TOOL_INPUT_BYTES // 4)})
        return EventOut(
            event_pb2.Event(
                type="tool.completed",
                entity_id=tool.id,
                tool_completed=event_pb2.ToolCompleted(
                    tool_call_id=tool.id,
                    name=cut(tool.name, NAME_BYTES) or "tool",
                    kind=cut(tool.kind, NAME_BYTES),
                    input_json=input_json,
                    output=output,
                    error=(cut(output, TOOL_ERROR_BYTES) or "failed") if status == _FAILED else "",
                    status=status,
                    output_truncated=tool.output_cut or len(output) < len(kept),
                ),
            )
        )

    def _merge(self, usage: content_pb2.Usage) -> None:
        """Agents report different numbers at different moments; a number that is not reported stays."""
        self.usage.MergeFrom(usage)


def _started(tool: _Tool) -> FrameOut:
    started = frame_pb2.ToolStarted(
        name=cut(tool.name, NAME_BYTES) or "tool",
        kind=cut(tool.kind, NAME_BYTES),
        input_json=tool.input_json if _bytes(tool.input_json) <= FRAME_TEXT_BYTES - 2 * NAME_BYTES else "",
    )
    return FrameOut(tool.id, {"tool_started": started})


def _plan(update: PlanChanged) -> frame_pb2.PlanUpdate:
    plan = frame_pb2.PlanUpdate()
    room = FRAME_TEXT_BYTES
    for content, status, priority in update.steps:
        step = frame_pb2.PlanStep(content=cut(content, 2048), status=cut(status, 64), priority=cut(priority, 64))
        room -= step.ByteSize() + 8
        if room < 0:
            break
        plan.steps.append(step)
    return plan


def split(text: str, size: int) -> list[str]:
    """Pieces of at most `size` bytes in UTF-8 that together are `text`; none for an empty one."""
    if not text:
        return []
    if len(text) * 4 <= size or _bytes(text) <= size:
        return [text]
    pieces: list[str] = []
    content = text.encode()
    at = 0
    while at < len(content):
        end = min(at + size, len(content))
        # Not in the middle of a character: its following bytes all look like 10xxxxxx.
        while end < len(content) and content[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(content[at:end].decode())
        at = end
    return pieces


def cut(text: str, size: int) -> str:
    """The beginning of a text, of at most `size` bytes in UTF-8."""
    if len(text) * 4 <= size:
        return text
    # Of a long text no more than may fit is looked at; at the end of it may be a part of a character.
    return text[:size].encode()[:size].decode(errors="ignore")


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _whole(text: str) -> tuple[str, str]:
    """The text that can be written now, and the first half of a character at its end."""
    half = text[-1] if text and "\ud800" <= text[-1] <= "\udbff" else ""
    return clean(text[: len(text) - len(half)]), half
