"""The scripted agent as a process, spoken to by the official ACP client library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import acp
from acp import schema
from acp.client.connection import ClientSideConnection

from tests.support import processes
from tests.support.harness import ROOT, SCRIPTED_AGENT

Options = list[schema.PermissionOption]
Update = Any


class Client:
    """The client's side: keeps what comes, answers permissions with the option of the kind in `choice`."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.choice = "allow_once"
        self.asked: list[schema.ToolCallUpdate] = []
        self.offered: Options = []
        self.together = 1  # how many questions must be there before the first is answered
        self.extensions: list[tuple[str, dict[str, Any]]] = []
        self.answer: dict[str, Any] = {}
        self.changed = asyncio.Event()

    async def session_update(self, session_id: str, update: Update, **_: Any) -> None:
        assert session_id
        self.updates.append(update)
        self.changed.set()

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: Options, **_: Any
    ) -> schema.RequestPermissionResponse:
        assert session_id
        self.asked.append(tool_call)
        self.offered = options
        self.changed.set()
        await self.until(lambda: self.choice != "wait" and len(self.asked) >= self.together)
        if self.choice == "cancelled":
            return schema.RequestPermissionResponse(outcome=schema.DeniedOutcome(outcome="cancelled"))
        chosen = next(option for option in options if option.kind == self.choice)
        outcome = schema.AllowedOutcome(outcome="selected", option_id=chosen.option_id)
        return schema.RequestPermissionResponse(outcome=outcome)

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.extensions.append((method, params))
        if "error" in self.answer:
            raise acp.RequestError(-32000, str(self.answer["error"]))
        return self.answer

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def choose(self, kind: str) -> None:
        """Let the waiting questions be answered."""
        self.choice = kind
        self.changed.set()

    def of(self, kind: str) -> list[Update]:
        """The updates of one kind."""
        return [update for update in self.updates if update.session_update == kind]

    @property
    def text(self) -> str:
        """All words of the agent."""
        return "".join(update.content.text for update in self.of("agent_message_chunk"))


class Agent:
    """A scripted agent with one session."""

    def __init__(self, client: Client, connection: ClientSideConnection, pid: int, session: str) -> None:
        self.client = client
        self.connection = connection
        self.pid = pid
        self.session = session

    async def prompt(self, text: str, **meta: Any) -> schema.PromptResponse:
        """One turn."""
        blocks = [schema.TextContentBlock(type="text", text=text)]
        return await self.connection.prompt(self.session, cast(Any, blocks), **meta)

    def begin(self, text: str) -> asyncio.Task[schema.PromptResponse]:
        """A turn that is not waited for."""
        return asyncio.create_task(self.prompt(text))


@asynccontextmanager
async def connected(tmp_path: Path, **env: str) -> AsyncIterator[tuple[Client, ClientSideConnection, int]]:
    """An agent process, spoken to by the official library."""
    client = Client()
    own = {"HEARTH_AGENT_STATE": str(tmp_path / "state"), processes.MARKER: processes.marker(), "PYTHONPATH": str(ROOT)}
    command, *arguments = SCRIPTED_AGENT
    limit = {"limit": 64 * 1024 * 1024, "stderr": None}
    async with acp.spawn_agent_process(
        cast(acp.Client, client), command, *arguments, env={**own, **env}, cwd=tmp_path, transport_kwargs=limit
    ) as (connection, process):
        hello = await connection.initialize(protocol_version=acp.PROTOCOL_VERSION)
        assert hello.protocol_version == acp.PROTOCOL_VERSION
        yield client, connection, process.pid


@asynccontextmanager
async def scripted(tmp_path: Path, load: str | None = None, **env: str) -> AsyncIterator[Agent]:
    """The same with a session, a new one or the one to load."""
    async with connected(tmp_path, **env) as (client, connection, pid):
        session = load or (await connection.new_session(cwd=str(tmp_path))).session_id
        if load:
            await connection.load_session(cwd=str(tmp_path), session_id=load)
        yield Agent(client, connection, pid, session)


def about(response: schema.PromptResponse) -> dict[str, Any]:
    """What the agent reports of itself."""
    assert response.field_meta is not None
    report: dict[str, Any] = response.field_meta["hearth.dev/agent"]
    return report


def output(update: Update) -> str:
    """The text of a finished tool call."""
    return str(update.content[0].content.text)


def log_of(path: Path, event: str) -> list[dict[str, Any]]:
    """The entries of the fsync log."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == event]
