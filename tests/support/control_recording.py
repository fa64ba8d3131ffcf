"""What happened to sessions, as plain values: what was asked of the pool and answered, what it shows in the end, what
is stored of each session, and what agents wrote down that reached them.

Whoever drives a pool fills a `ControlRecording`; the checkers C1 to C5, P1 and H6 of `tests/checkers` say what is wrong
with one. Nothing here does IO. Ticks are as in `recording`; times are in seconds since 1970, by one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis.errors import HearthError
from tests.support.recording import ENDINGS, Key, Log

_M = TypeVar("_M", bound=Message)

# Errors after which nobody knows whether the call had its effect.
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})


@dataclass
class Call:
    """One request to the pool. `answered` is 0 where no answer came; `error` is what it was refused with, or how the
    connection ended. `began_at` and `answered_at` are the times of these ticks."""

    session: Key
    request: Message
    began: int
    answered: int = 0
    response: Message | None = None
    error: HearthError | None = None
    began_at: float = 0.0
    answered_at: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether it was answered that it is done."""
        return self.response is not None

    @property
    def may_have_happened(self) -> bool:
        """Whether it had, or may have had, its effect."""
        return self.accepted or self.error is None or self.error.code in _PASSING


@dataclass(frozen=True)
class Opened:
    """What an agent says that it was started with, when a session was opened in it.

    `process` names it: its id, and when it began. `values` are those of the variables it may tell; `servers` are the
    MCP servers, of each its `name`, `where` it is, the `names` of its variables or headers, and the `values` of some.
    """

    process: tuple[int, float]
    instructions: str = ""
    model: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    servers: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the agent that got it wrote it down. `context` is what it was to read first, `record` the agent's own
    name for the conversation; `opened` is None where the agent does not tell."""

    execution_id: str
    text: str
    context: str = ""
    record: str = ""
    opened: Opened | None = None
    at: float = 0.0


@dataclass(frozen=True)
class Told:
    """An answer that an agent got to its question whether it may run a tool, and during which execution. `choice` is
    the kind of the option chosen, or `cancelled`."""

    execution_id: str
    tool: str
    choice: str

    @property
    def allowed(self) -> bool:
        """Whether the agent may run the tool."""
        return self.choice.startswith("allow")


@dataclass(frozen=True)
class Ran:
    """A tool that an agent ran after it was allowed to."""

    execution_id: str
    tool_call_id: str
    tool: str


@dataclass
class Rows:
    """What the pool shows of a session in the end. `waiting` is the queue, by rank."""

    session: sessions.Session | None = None
    waiting: list[sessions.Input] = field(default_factory=list)
    executions: dict[str, sessions.Execution] = field(default_factory=dict)
    commands: dict[str, sessions.Command] = field(default_factory=dict)
    interactions: dict[str, sessions.Interaction] = field(default_factory=dict)


@dataclass
class ControlRecording:
    """A whole run. `settled`: nothing was under way any more when `logs` and `rows` were read; without it only what
    must hold at any time is checked. `shutdowns` counts pools that were told to end in an orderly way. `prompts`,
    `told` and `ran` are of the executions of this run; `turns` are all prompts of agents that tell what they were
    started with, whosever they are, in their order."""

    calls: list[Call] = field(default_factory=list)
    logs: dict[Key, Log] = field(default_factory=dict)
    rows: dict[Key, Rows] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    turns: list[Prompt] = field(default_factory=list)
    settled: bool = False
    shutdowns: int = 0
    policy_allows: bool = False

    def events(self, key: Key) -> list[event_pb2.Event]:
        """The log of a session."""
        log = self.logs.get(key)
        return [item.event for item in log.items] if log is not None else []

    def accepted(self, kind: type[_M]) -> Iterator[tuple[Call, _M]]:
        """Calls of a kind that were answered without an error, with their requests."""
        return ((call, call.request) for call in self.calls if isinstance(call.request, kind) and call.accepted)

    def possible(self, key: Key, kind: type[_M]) -> Iterator[tuple[Call, _M]]:
        """Calls of a kind about a session that had, or may have had, their effect."""
        return (
            (call, call.request)
            for call in self.calls
            if call.session == key and isinstance(call.request, kind) and call.may_have_happened
        )

    def read_journal(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take what agents wrote down: one of them has one prompt at a time in each of its sessions."""
        running: dict[tuple[Any, Any], str] = {}
        opened: dict[tuple[Any, Any], Opened] = {}
        for line in lines:
            who = (line["pid"], line.get("session"))
            match line["event"]:
                case "open":
                    told = {name: line[name] for name in ("instructions", "model", "values", "servers")}
                    opened[who] = Opened((line["pid"], line["began"]), **told)
                case "prompt":
                    running[who] = str(line["message_id"])
                    prompt = Prompt(running[who], str(line["text"]))
                    self.prompts.append(prompt)
                    # Those of an older agent tell nothing of what it was started with.
                    if "context" in line:
                        about = {"context": line["context"], "record": line["session"], "at": line["time"]}
                        self.turns.append(replace(prompt, opened=opened.get(who), **about))
                case "permission":
                    self.told.append(Told(running[who], line["tool"], line["outcome"]))
                case "tool":
                    self.ran.append(Ran(running[who], line["tool_call_id"], line["tool"]))


def started(events: Iterable[event_pb2.Event]) -> Iterator[event_pb2.Event]:
    """Those that open an execution."""
    return (event for event in events if event.type == "execution.started")


def endings(events: Iterable[event_pb2.Event]) -> dict[str, event_pb2.Event]:
    """The ending of each execution, the first one where there are several."""
    found: dict[str, event_pb2.Event] = {}
    for event in events:
        if event.type in ENDINGS:
            found.setdefault(event.execution_id, event)
    return found


def answered(events: Iterable[event_pb2.Event]) -> dict[str, list[event_pb2.InteractionAnswered]]:
    """The answers that readers were told of, by interaction."""
    found: dict[str, list[event_pb2.InteractionAnswered]] = {}
    for event in events:
        if event.HasField("interaction_answered"):
            found.setdefault(event.interaction_answered.interaction_id, []).append(event.interaction_answered)
    return found


def text_of(content: Sequence[content_pb2.ContentPart]) -> str:
    """What a message says."""
    return "".join(part.text.text for part in content)


def messages_in(message: Message, kind: type[_M]) -> Iterator[_M]:
    """All messages of a kind in a message, however deep."""
    if isinstance(message, kind):
        yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for one in value if descriptor.is_repeated else [value]:
            yield from messages_in(one, kind)
