"""Opening a session of the Agent Client Protocol: start the agent, load its session or make one, log it in, choose the
model."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from hearth.types.v1 import content_pb2
from services.pool.harness.answers import error_of, meta, object_of, result_of
from services.pool.harness.choices import (
    INSTRUCTIONS_META,
    Login,
    check_servers,
    logins,
    model_calls,
    takes_instructions,
)
from services.pool.harness.daemon import Refused
from services.pool.harness.port import HarnessError, McpServer, OpenRequest
from services.pool.harness.rpc import Message, RpcConnection, RpcLimits
from services.pool.harness.updates import set_apart

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
METHOD_NOT_FOUND = -32601
AUTH_REQUIRED = -32000


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A session of an agent. `loaded`: it remembers what it did before; `takes` is what it says that prompts may hold;
    `untold` are instructions that go with the first prompt."""

    session_id: str = ""
    loaded: bool = False
    takes: Message = dataclasses.field(default_factory=dict)
    untold: content_pb2.ContentPart | None = None


class Opening:
    """Opens one session over `rpc`. What it began when it fails is for its owner to end, once `start_ended` says so."""

    def __init__(self, rpc: RpcConnection, request: OpenRequest, limits: RpcLimits) -> None:
        self._rpc = rpc
        self._request = request
        self._limits = limits
        self._starting: asyncio.Task[Message] | None = None
        self._logins: Sequence[Login] = ()

    async def open(self) -> Opened:
        """Start the agent and open its session."""
        self._rpc.stream.starting = True
        self._rpc.start()
        # Not cancelled with this call: only the daemon's answer tells that there is a server to end.
        self._starting = asyncio.create_task(self._initialize(), name="initialize agent")
        initialized = result_of(await asyncio.shield(self._starting))
        capabilities = object_of(initialized, "agentCapabilities")
        self._logins = logins(initialized)
        self._rpc.stream.starting = False
        check_servers(self._request.mcp_servers, capabilities)
        loaded = session = None
        if self._request.load_session_id and capabilities.get("loadSession") is True:
            loaded = session = await self._load(self._request.load_session_id)
        if session is None:
            session = await self._new()
        session_id, told = session
        await self._set_model(session_id, told)
        untold = None
        if self._request.instructions and not takes_instructions(capabilities):
            # Also to one that loaded a session: nobody knows whether that was told the same ones.
            data = set_apart(self._request.instructions).encode()
            untold = content_pb2.ContentPart(
                inline_media=content_pb2.InlineMediaPart(media_type="text/markdown", data=data)
            )
        takes = object_of(capabilities, "promptCapabilities")
        # The agent has them now: what is kept between turns holds no credentials, and nothing large.
        self._request = dataclasses.replace(self._request, mcp_servers=(), instructions="")
        return Opened(session_id, loaded is not None, takes, untold)

    async def start_ended(self, seconds: float | None = None) -> bool:
        """Wait until the start of the agent has ended, well or not, for at most so long; whether it has."""
        if self._starting is None:
            return True
        await asyncio.wait((self._starting,), timeout=seconds)
        if self._starting.done() and not self._starting.cancelled():
            # Whoever opened was told.
            self._starting.exception()
        return self._starting.done()

    def timed_out(self) -> HarnessError:
        """What it means that the agent did not open in time."""
        if self._rpc.garbage and not self._rpc.messages:
            return HarnessError("AGENT_PROTOCOL", "the agent writes what is not its protocol")
        return HarnessError("AGENT_OPEN_TIMEOUT", f"the agent opened no session in {self._request.timeout:g} s")

    async def _initialize(self) -> Message:
        answer = await self._rpc.call(
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
                "clientInfo": {"name": "hearth", "title": "Hearth", "version": "1"},
                **meta(self._request.trace_context),
            },
            # Longer than the opening itself: while it is open, the daemon's answer tells that a start is over.
            timeout=self._request.timeout + self._limits.call,
            agent=self._request.agent,
            headers=self._request.trace_context,
            explain=self._why_not_started,
            again=True,
        )
        version = result_of(answer).get("protocolVersion")
        if version != PROTOCOL_VERSION:
            raise HarnessError("AGENT_PROTOCOL", f"the agent speaks version {version!r} of its protocol")
        return answer

    def _why_not_started(self, refused: Refused) -> HarnessError:
        if refused.status == 401:
            return refused.as_error()
        if refused.status == 504:
            return self.timed_out()
        if refused.agent_gone and "start" not in refused.detail:
            return HarnessError("AGENT_EXITED", f"the agent ended at once: {refused.detail}")
        if refused.slug:
            return HarnessError("AGENT_START_FAILED", f"the agent cannot be started: {refused.detail}")
        return HarnessError("DAEMON_UNREACHABLE", f"the daemon answered {refused}")

    async def _load(self, asked: str) -> tuple[str, Message] | None:
        """Load a session, and what the agent told of it; None when it does not have it."""
        # The agent first repeats the conversation, which the log has: of no use here, whether all of it comes or not.
        self._rpc.stream.holes_allowed = True
        # Asked twice, it would repeat the conversation twice, the second time perhaps into a turn: one that seems lost
        # is given up, while there is time for a new session.
        patience = min(self._limits.lost, self._request.timeout / 2)
        params = {"sessionId": asked, **self._session_params()}
        answer = await self._open_call("session/load", params, in_order=True, patience=patience)
        self._rpc.stream.holes_allowed = False
        loaded = object_of(answer, "result")
        if "error" in answer or loaded.get("sessionId", asked) != asked:
            logger.info("session not loaded", extra={"server": self._request.server_id, "code": error_of(answer)[0]})
            return None
        return asked, loaded

    async def _new(self) -> tuple[str, Message]:
        opened = result_of(
            await self._open_call("session/new", self._session_params(), again=True), "AGENT_START_FAILED"
        )
        session_id = opened.get("sessionId")
        if not isinstance(session_id, str) or not session_id:
            raise HarnessError("AGENT_PROTOCOL", "the agent opened a session without an id")
        return session_id, opened

    async def _set_model(self, session_id: str, opened: Message) -> None:
        """Choose the model, where the agent lets its client choose."""
        for method, choice in model_calls(opened, self._request.model):
            answer = await self._open_call(method, {"sessionId": session_id, **choice}, again=True)
            if error_of(answer)[0] != METHOD_NOT_FOUND:
                break
        else:
            return
        result_of(answer, "AGENT_START_FAILED")

    async def _open_call(
        self,
        method: str,
        params: Message,
        *,
        in_order: bool = False,
        again: bool = False,
        patience: float | None = None,
    ) -> Message:
        async def call(method: str, params: Message, **how: Any) -> Message:
            timeout, headers = self._request.timeout, self._request.trace_context
            return await self._rpc.call(method, params, timeout=timeout, headers=headers, **how)

        answer = await call(method, params, in_order=in_order, again=again, patience=patience)
        if error_of(answer)[0] != AUTH_REQUIRED:
            return answer
        # Some agents have their key in a variable and take it only when they are told to.
        offered, self._logins = self._logins, ()
        for login in offered:
            if "error" not in await call("authenticate", {"methodId": login.method}, again=True):
                return await call(method, params, in_order=in_order, again=again, patience=patience)
        if offered:
            names = ", ".join(name for login in offered for name in login.variables)
            raise HarnessError("AGENT_START_FAILED", f"the agent is not logged in; it takes a key from one of {names}")
        return answer

    def _session_params(self) -> Message:
        request = self._request
        more: Message = dict(request.trace_context)
        if request.instructions:
            more[INSTRUCTIONS_META] = request.instructions
            # The name under which the adapter of Claude Code takes it.
            more["systemPrompt"] = {"append": request.instructions}
        if request.model:
            more["hearth.dev/model"] = request.model
        servers = [_server(server) for server in request.mcp_servers]
        return {"cwd": request.workspace, "mcpServers": servers, **meta(more)}


def _server(server: McpServer) -> Message:
    """A server in the form of ACP, with its secrets."""
    values = [{"name": name, "value": value.reveal()} for name, value in sorted(server.values.items())]
    if server.url:
        return {"type": "http", "name": server.name, "url": server.url, "headers": values}
    command, *args = server.command
    return {"name": server.name, "command": command, "args": args, "env": values}
