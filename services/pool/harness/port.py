"""What the pool needs of an agent program, whatever protocol it speaks.

A `HarnessClient` opens sessions in an agent that runs behind the daemon of a sandbox; a `HarnessSession` is one live
agent session, kept between turns. One prompt runs at a time in a session. Implementations raise `HarnessError` and
nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from hearth.secret import Secret
from hearth.types.v1 import content_pb2


class HarnessError(Exception):
    """The agent or its daemon failed.

    `reason` is a name of `hearth.types.v1.Reason` without prefix, as `AGENT_EXITED`, `HARNESS_STREAM_LOST` or
    `DAEMON_UNREACHABLE`. `fenced` means that the daemon refused our token or forgot our server: another holder has the
    sandbox, nothing more may be called on it.
    """

    def __init__(self, reason: str, message: str, *, fenced: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.fenced = fenced


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonEndpoint:
    """Where the daemon of a sandbox answers."""

    url: str
    token: Secret
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server for the agent to reach: at `url`, or a program that it starts, `command`. `values` are the headers
    or the variables, by name; credentials are among them."""

    name: str
    url: str = ""
    command: Sequence[str] = ()
    values: Mapping[str, Secret] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRequest:
    """How to open an agent session. Times are seconds."""

    server_id: str
    agent: str
    workspace: str
    load_session_id: str | None = None
    mcp_servers: Sequence[McpServer] = ()
    instructions: str = ""
    model: str = ""
    timeout: float = 60.0
    trace_context: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class TextChunk:
    """More text of the message `message_id`; `thought` for reasoning."""

    message_id: str
    text: str
    thought: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUpdate:
    """A tool call appeared or changed. Empty and None fields say nothing new. `status` is that of ACP:
    `pending`, `in_progress`, `completed` or `failed`. `output` is all of its output so far, `more_output` what follows
    that; `raw_output` stands in for it as long as there is none."""

    tool_call_id: str
    started: bool = False
    title: str = ""
    kind: str = ""
    status: str = ""
    input_json: str = ""
    output: str | None = None
    more_output: str = ""
    raw_output: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PermissionOption:
    """`kind` is that of ACP: `allow_once`, `allow_always`, `reject_once` or `reject_always`."""

    option_id: str
    name: str
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class PermissionAsked:
    """The agent waits for leave to run a tool call. Answer it with `HarnessSession.answer(request_key, ...)`.

    Comes once for each request, also when the stream was resumed.
    """

    request_key: str
    tool_call_id: str
    title: str
    kind: str
    input_json: str
    options: Sequence[PermissionOption]


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionAsked:
    """The agent asks by an extension request: `_hearth/ask` (`client_tool` false) or `_hearth/client_tool`."""

    request_key: str
    tool_call_id: str
    client_tool: bool
    prompt: str
    input_json: str
    schema_json: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlanChanged:
    """The whole plan: (content, status, priority) of each step."""

    steps: Sequence[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class UsageChanged:
    """Usage as far as the agent reports it."""

    usage: content_pb2.Usage


@dataclasses.dataclass(frozen=True, slots=True)
class OtherUpdate:
    """Something of the protocol that has no word here; `type` names it, `data` is its JSON text."""

    type: str
    data: str


Update = TextChunk | ToolUpdate | PermissionAsked | QuestionAsked | PlanChanged | UsageChanged | OtherUpdate


@dataclasses.dataclass(frozen=True, slots=True)
class PromptResult:
    """How the agent ended the turn. `report_json` is what it says of itself in `_meta`; empty when nothing."""

    stop_reason: str
    usage: content_pb2.Usage | None
    report_json: str


class Answer(enum.Enum):
    """What to tell an agent that asked for permission."""

    ALLOW = "allow"
    DENY = "deny"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """How long nothing was heard, in seconds of a reader that listened: no byte at all, and no message of the agent.
    `connected`: the stream is open."""

    connected: bool
    bytes: float
    messages: float


class Pulse(enum.Enum):
    """What asking a daemon for its health has shown."""

    ALIVE = "alive"
    FENCED = "fenced"  # it does not know our token: another one runs there
    REFUSED = "refused"  # nothing listens there
    SILENT = "silent"  # no answer, or one that says nothing


class PromptRun(Protocol):
    """One prompt on its way."""

    def updates(self) -> AsyncIterator[Update]:
        """What the agent does, in order, until it ended the turn. Raises `HarnessError` when the turn cannot go on."""
        ...

    async def result(self) -> PromptResult:
        """The end of the turn; call it once `updates` is exhausted."""
        ...


class HarnessSession(Protocol):
    """One live agent session."""

    @property
    def session_id(self) -> str:
        """The agent's own id of the session: what a later `load_session_id` names."""
        ...

    @property
    def loaded(self) -> bool:
        """True when the agent loaded the session that was asked for; false when it is a new one."""
        ...

    def reach(self, endpoint: DaemonEndpoint) -> None:
        """From now on the same daemon is reached there: addresses and headers of a provider change."""
        ...

    async def resume(self) -> None:
        """Follow the stream again after `park`, and drop what came meanwhile: it belongs to no prompt. `prompt` does it
        where this was not called. Raises when the agent, its daemon or the stream is lost."""
        ...

    async def prompt(
        self,
        content: Sequence[content_pb2.ContentPart],
        *,
        execution_id: str,
        trace_context: Mapping[str, str],
    ) -> PromptRun:
        """Send a prompt. Never wait for the whole turn here: it returns once the prompt was handed over."""
        ...

    @property
    def silence(self) -> Silence:
        """How long the agent and its daemon have been silent."""
        ...

    async def pulse(self) -> Pulse:
        """Ask the daemon for its health. Raises nothing."""
        ...

    async def answer(self, request_key: str, answer: Answer) -> None:
        """Answer a `PermissionAsked`. Options are chosen by their kind; never an `always` one."""
        ...

    async def answer_question(self, request_key: str, answer_json: str | None) -> None:
        """Answer a `QuestionAsked`; None says that nobody will."""
        ...

    async def cancel(self) -> None:
        """Ask the agent to end the running prompt; the end comes as its result. Harmless when none runs."""
        ...

    async def run_process(self, command: str, args: Sequence[str], *, timeout: float) -> tuple[int, str]:
        """Run a program beside the agent and give (exit code, stdout), through the daemon."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox, making its directories."""
        ...

    async def park(self) -> None:
        """Let go of the stream between turns; the next `prompt` resumes it where it was. Raises when it is lost."""
        ...

    async def close(self) -> None:
        """End the agent session and its process. Bounded in time; safe to call twice, and when the daemon is gone."""
        ...


class HarnessClient(Protocol):
    """Opens agent sessions."""

    async def open(self, endpoint: DaemonEndpoint, request: OpenRequest) -> HarnessSession:
        """Start the agent and open a session: load `load_session_id` if given and possible, else a new one.

        Raises `HarnessError`: `AGENT_START_FAILED`, `AGENT_EXITED`, `AGENT_OPEN_TIMEOUT`, `AGENT_PROTOCOL`,
        `DAEMON_UNREACHABLE`. When it raises, or is cancelled, nothing of the agent is left running.
        """
        ...
