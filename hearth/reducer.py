"""Turn the items of a session into what a person sees: pure, one item at a time.

Frames build a preview; the completed message replaces it. A gap marks the preview as broken until then, a reset throws
it away. Events alone give the same transcript as events with frames. What waits for a person, and what waits in the
queue, is kept beside the entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2

# Of which no frame is the next one.
_NONE = -2


@dataclasses.dataclass(slots=True)
class Entry:
    """One visible thing. `kind` is `user`, `agent`, `thought` or `tool`; `final` once its event came; `broken` while a
    gap makes its preview incomplete. Agents use an `entity_id` again in another execution, for something else."""

    entity_id: str
    kind: str
    text: str = ""
    title: str = ""
    status: str = ""
    final: bool = False
    broken: bool = False
    execution_id: str = ""


@dataclasses.dataclass(slots=True)
class Transcript:
    """What is visible of a session.

    `running` is the execution under way, empty between executions. `asked` are the interactions that nobody has
    answered, `waiting` the texts of the inputs in the queue, both by id and in the order in which they came; the order
    in which the queue runs is the pool's to tell (ListInputs). One that reads from the middle of a log puts in what it
    was told before: events that tell it again change nothing.
    """

    entries: list[Entry] = dataclasses.field(default_factory=list)
    asked: dict[str, event_pb2.InteractionRequested] = dataclasses.field(default_factory=dict)
    waiting: dict[str, str] = dataclasses.field(default_factory=dict)
    running: str = ""
    outcome: str = ""
    ready: bool = False
    incomplete: bool = False
    _by_entity: dict[tuple[str, str], Entry] = dataclasses.field(default_factory=dict)
    # Index of the last frame before which some are missing of what is shown here.
    _lost: int = _NONE

    def apply(self, item: relay_pb2.Item) -> Entry | None:
        """Take one item in order; gives the entry that changed, if one did."""
        match item.WhichOneof("item"):
            case "event":
                return self._event(item.event.event)
            case "frame":
                return self._frame(item.frame.execution_id, item.frame.frame)
            case "gap":
                self._lost = item.gap.to
                for entry in self.entries:
                    if not entry.final:
                        entry.broken = True
            case "reset":
                self._drop_previews()
            case "ready":
                self.ready = True
        return None

    def _event(self, event: event_pb2.Event) -> Entry | None:
        match event.WhichOneof("body"):
            case "execution_started":
                self.running = event.execution_id
                self.outcome = ""
                self._lost = _NONE
            case "message_completed":
                message = event.message_completed
                kind = {content_pb2.ROLE_USER: "user", content_pb2.ROLE_THOUGHT: "thought"}.get(message.role, "agent")
                entry = self._entry(event.execution_id, message.message_id, kind)
                entry.kind, entry.text = kind, text_of(message.content)
                entry.status, entry.final, entry.broken = message.finish_reason, True, False
                return entry
            case "tool_completed":
                tool = event.tool_completed
                entry = self._entry(event.execution_id, tool.tool_call_id, "tool")
                entry.title, entry.text = tool.name, tool.output or tool.error
                entry.status = event_pb2.ToolStatus.Name(tool.status).removeprefix("TOOL_STATUS_").lower()
                entry.final, entry.broken = True, False
                return entry
            case "history_incomplete":
                self.incomplete = True
            case _ if is_ending(event.type):
                if event.execution_id == self.running:
                    self.running = ""
                self.outcome = event.type.removeprefix("execution.")
                self._drop_previews()
            case _:
                self._control(event)
        return None

    def _control(self, event: event_pb2.Event) -> None:
        """What is asked, and what waits."""
        match event.WhichOneof("body"):
            case "interaction_requested":
                self.asked[event.interaction_requested.interaction_id] = event.interaction_requested
            case "interaction_answered":
                self.asked.pop(event.interaction_answered.interaction_id, None)
            case "interaction_resolved":
                self.asked.pop(event.interaction_resolved.interaction_id, None)
            case "input_queued":
                self.waiting[event.input_queued.input_id] = text_of(event.input_queued.content)
            case "input_updated" if event.input_updated.input_id in self.waiting:
                self.waiting[event.input_updated.input_id] = text_of(event.input_updated.content)
            case "input_promoted":
                self.waiting.pop(event.input_promoted.input_id, None)
            case "input_removed":
                self.waiting.pop(event.input_removed.input_id, None)

    def _frame(self, execution_id: str, frame: frame_pb2.Frame) -> Entry | None:
        known = (execution_id, frame.entity_id) in self._by_entity
        entry = self._piece(execution_id, frame)
        if frame.frame_index == self._lost + 1:
            if entry is None:
                self._lost = frame.frame_index
            elif not known and not frame.HasField("tool_started"):
                # What it began with may be in the gap.
                entry.broken = True
        return entry

    def _piece(self, execution_id: str, frame: frame_pb2.Frame) -> Entry | None:
        body = frame.WhichOneof("body")
        if body in ("text_delta", "thought_delta"):
            entry = self._entry(execution_id, frame.entity_id, "agent" if body == "text_delta" else "thought")
            if not entry.final:
                entry.text += frame.text_delta.text if body == "text_delta" else frame.thought_delta.text
            return entry
        if body in ("tool_started", "tool_delta", "tool_output"):
            entry = self._entry(execution_id, frame.entity_id, "tool")
            if entry.final:
                return entry
            if body == "tool_started":
                entry.title, entry.status = frame.tool_started.name, "pending"
            elif body == "tool_delta":
                entry.title = frame.tool_delta.title or entry.title
                entry.status = frame.tool_delta.status or entry.status
            elif frame.tool_output.replace:
                entry.text = frame.tool_output.text
            else:
                entry.text += frame.tool_output.text
            return entry
        return None

    def _entry(self, execution_id: str, entity_id: str, kind: str) -> Entry:
        key = execution_id, entity_id
        entry = self._by_entity.get(key)
        if entry is None:
            entry = self._by_entity[key] = Entry(entity_id, kind, execution_id=execution_id)
            self.entries.append(entry)
        return entry

    def _drop_previews(self) -> None:
        self._lost = _NONE
        self.entries = [entry for entry in self.entries if entry.final]
        self._by_entity = {(entry.execution_id, entry.entity_id): entry for entry in self.entries}


ENDINGS = frozenset(
    {"execution.completed", "execution.paused", "execution.stopped", "execution.failed", "execution.lost"}
)


def is_ending(event_type: str) -> bool:
    """Whether an event of this type closes its execution."""
    return event_type in ENDINGS


def ending_summary(event: event_pb2.Event) -> event_pb2.EndingSummary | None:
    """What an ending says of its run; None for other events."""
    body = event.WhichOneof("body")
    if body is None or not is_ending(event.type) or body == "custom":
        return None
    summary: event_pb2.EndingSummary = getattr(event, body).summary
    return summary


def text_of(content: Iterable[content_pb2.ContentPart]) -> str:
    """The text of message parts, other parts named in brackets."""
    pieces = []
    for part in content:
        match part.WhichOneof("part"):
            case "text":
                pieces.append(part.text.text)
            case "resource_link":
                pieces.append(f"[{part.resource_link.name or part.resource_link.uri}]")
            case "attachment":
                pieces.append(f"[{part.attachment.name}]")
            case "inline_media":
                pieces.append(f"[{part.inline_media.media_type}]")
    return "".join(pieces)
