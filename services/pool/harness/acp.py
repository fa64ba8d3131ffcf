"""The Agent Client Protocol over HTTP, in the dialect of sandbox-agent 0.4.2, as the harness of the pool."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp

from hearth.types.v1 import content_pb2
from services.chassis.clock import Clock
from services.pool.harness.choices import (
    INSTRUCTIONS_META,
    Login,
    check_servers,
    logins,
    model_calls,
    takes_instructions,
)
from services.pool.harness.daemon import Daemon, Refused, Unreached, new_http
from services.pool.harness.port import (
    Answer,
    DaemonEndpoint,
    HarnessError,
    OpenRequest,
    PermissionAsked,
    PermissionOption,
    PromptResult,
    Pulse,
    QuestionAsked,
    Silence,
)
from services.pool.harness.rpc import Message, RpcConnection, RpcLimits, request_key
from services.pool.harness.runs import AcpRun
from services.pool.harness.updates import (
    prompt_blocks,
    read_permission,
    read_question,
    read_result,
    read_update,
    set_apart,
)

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
EXECUTION_META = "hearth.dev/execution"
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
AUTH_REQUIRED = -32000
ERROR_CHARACTERS = 300
CANCELLED = {"outcome": "cancelled"}


@dataclasses.dataclass(frozen=True, slots=True)
class AcpLimits:
    """Times in seconds."""

    rpc: RpcLimits = dataclasses.field(default_factory=RpcLimits)
    # The connection of a prompt: longer than any turn may be.
    prompt: float = 3 * 3600.0
    file: float = 60.0


class AcpClient:
    """Opens ACP sessions in any number of sandboxes. Close it when done."""

    def __init__(self, *, clock: Clock, limits: AcpLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or AcpLimits()
        self._http: aiohttp.ClientSession | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self, endpoint: DaemonEndpoint, request: OpenRequest) -> AcpSession:
        """See `HarnessClient.open`."""
        if self._http is None:
            self._http = new_http()
        session = AcpSession(self._http, endpoint, request, clock=self._clock, limits=self._limits)
        try:
            async with asyncio.timeout(request.timeout):
                await session.open()
        except TimeoutError:
            await self._discard(session)
            raise session.open_timeout() from None
        except BaseException:
            await self._discard(session)
            raise
        return session

    async def close(self) -> None:
        """Close the connections, once the agents that are being ended have ended."""
        if self._ending:
            await asyncio.wait(self._ending)
        if self._http is not None:
            await self._http.close()

    async def _discard(self, session: AcpSession) -> None:
        """End what was begun; goes on when this call is cancelled."""
        task = asyncio.create_task(session.close(), name="discard agent session")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)


class AcpSession:
    """One session, in an agent server of its own."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoint: DaemonEndpoint,
        request: OpenRequest,
        *,
        clock: Clock,
        limits: AcpLimits,
    ) -> None:
        self._daemon = Daemon(http, endpoint, request.server_id)
        self._rpc = RpcConnection(http, self._daemon, self, clock=clock, limits=limits.rpc)
        self._request = request
        self._clock = clock
        self._limits = limits
        self._run: AcpRun | None = None
        # A prompt is on its way to become the run; and what the agent told while none ran.
        self._beginning = False
        self._unasked = 0
        self._prompting: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Message] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        # Requests of the agent that wait for their answer, by request key, with their JSON-RPC id.
        self._asked: dict[str, tuple[object, PermissionAsked | QuestionAsked]] = {}
        self._closing: asyncio.Task[None] | None = None
        self._prompt_capabilities: Message = {}
        self._logins: Sequence[Login] = ()
        # Instructions that go with the first prompt.
        self._untold: content_pb2.ContentPart | None = None
        self._session_id = ""
        self._loaded = False

    @property
    def session_id(self) -> str:
        """See `HarnessSession.session_id`."""
        return self._session_id

    @property
    def loaded(self) -> bool:
        """See `HarnessSession.loaded`."""
        return self._loaded

    # Opening

    async def open(self) -> None:
        """Start the agent and open its session. What it began when it fails is ended by `close`."""
        self._rpc.stream.starting = True
        self._rpc.start()
        # Not cancelled with this call: only the daemon's answer tells that there is a server to end.
        self._starting = asyncio.create_task(self._initialize(), name="initialize agent")
        initialized = _result(await asyncio.shield(self._starting))
        capabilities = _object(initialized, "agentCapabilities")
        self._logins = logins(initialized)
        self._prompt_capabilities = _object(capabilities, "promptCapabilities")
        self._rpc.stream.starting = False
        check_servers(self._request.mcp_servers, capabilities)
        opened = None
        if self._request.load_session_id and capabilities.get("loadSession") is True:
            opened = await self._load(self._request.load_session_id)
        if opened is None:
            opened = await self._new()
        await self._set_model(opened)
        if self._request.instructions and not takes_instructions(capabilities):
            # Also to one that loaded a session: nobody knows whether that was told the same ones.
            data = set_apart(self._request.instructions).encode()
            self._untold = content_pb2.ContentPart(
                inline_media=content_pb2.InlineMediaPart(media_type="text/markdown", data=data)
            )
        # The agent has them now: what is kept between turns holds no credentials, and nothing large.
        self._request = dataclasses.replace(self._request, mcp_servers=(), instructions="")

    def open_timeout(self) -> HarnessError:
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
                **_meta(self._request.trace_context),
            },
            # Longer than the opening itself: while it is open, the daemon's answer tells that a start is over.
            timeout=self._request.timeout + self._limits.rpc.call,
            agent=self._request.agent,
            headers=self._request.trace_context,
            explain=self._why_not_started,
            again=True,
        )
        version = _result(answer).get("protocolVersion")
        if version != PROTOCOL_VERSION:
            raise HarnessError("AGENT_PROTOCOL", f"the agent speaks version {version!r} of its protocol")
        return answer

    def _why_not_started(self, refused: Refused) -> HarnessError:
        if refused.status == 401:
            return refused.as_error()
        if refused.status == 504:
            return self.open_timeout()
        if refused.agent_gone and "start" not in refused.detail:
            return HarnessError("AGENT_EXITED", f"the agent ended at once: {refused.detail}")
        if refused.slug:
            return HarnessError("AGENT_START_FAILED", f"the agent cannot be started: {refused.detail}")
        return HarnessError("DAEMON_UNREACHABLE", f"the daemon answered {refused}")

    async def _load(self, asked: str) -> Message | None:
        """Load a session; None when the agent does not have it."""
        # The agent first repeats the conversation, which the log has: of no use here, whether all of it comes or not.
        self._rpc.stream.holes_allowed = True
        # Asked twice, it would repeat the conversation twice, the second time perhaps into a turn: one that seems lost
        # is given up, while there is time for a new session.
        patience = min(self._limits.rpc.lost, self._request.timeout / 2)
        params = {"sessionId": asked, **self._session_params()}
        answer = await self._open_call("session/load", params, in_order=True, patience=patience)
        self._rpc.stream.holes_allowed = False
        loaded = _object(answer, "result")
        if "error" in answer or loaded.get("sessionId", asked) != asked:
            logger.info("session not loaded", extra={"server": self._request.server_id, "code": _error(answer)[0]})
            return None
        self._session_id, self._loaded = asked, True
        return loaded

    async def _new(self) -> Message:
        opened = _result(await self._open_call("session/new", self._session_params(), again=True), "AGENT_START_FAILED")
        session_id = opened.get("sessionId")
        if not isinstance(session_id, str) or not session_id:
            raise HarnessError("AGENT_PROTOCOL", "the agent opened a session without an id")
        self._session_id = session_id
        return opened

    async def _set_model(self, opened: Message) -> None:
        """Choose the model, where the agent lets its client choose."""
        for method, choice in model_calls(opened, self._request.model):
            answer = await self._open_call(method, {"sessionId": self._session_id, **choice}, again=True)
            if _error(answer)[0] != METHOD_NOT_FOUND:
                break
        else:
            return
        _result(answer, "AGENT_START_FAILED")

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
        if _error(answer)[0] != AUTH_REQUIRED:
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
        meta: Message = dict(request.trace_context)
        if request.instructions:
            meta[INSTRUCTIONS_META] = request.instructions
            # The name under which the adapter of Claude Code takes it.
            meta["systemPrompt"] = {"append": request.instructions}
        if request.model:
            meta["hearth.dev/model"] = request.model
        return {"cwd": request.workspace, "mcpServers": [dict(server) for server in request.mcp_servers], **_meta(meta)}

    # Prompts

    async def prompt(
        self,
        content: Sequence[content_pb2.ContentPart],
        *,
        execution_id: str,
        trace_context: Mapping[str, str],
    ) -> AcpRun:
        """See `HarnessSession.prompt`."""
        self._rpc.check()
        if self._run is not None or self._beginning:
            # Some agents mix a second prompt into the first one and never answer it.
            raise HarnessError("RUN_DEFECT", "a prompt of this session is running already")
        told = [self._untold, *content] if self._untold is not None else content
        params = {
            "sessionId": self._session_id,
            "prompt": prompt_blocks(told, self._request.workspace, self._prompt_capabilities),
            **_meta({EXECUTION_META: execution_id, **trace_context}),
        }
        self._beginning = True
        try:
            await self.resume()
        finally:
            self._beginning = False
        self._untold = None
        run = self._run = AcpRun()
        sent = asyncio.Event()
        self._prompting = asyncio.create_task(self._prompt(run, params, trace_context, sent), name="agent prompt")
        under_way = asyncio.create_task(sent.wait(), name="prompt sent")
        try:
            await asyncio.wait((under_way, self._prompting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Nobody holds the run, and the agent may be at work: this session takes no other prompt.
            self._rpc.die(HarnessError("RUN_DEFECT", "the prompt was given up while it was handed over"))
            raise
        finally:
            under_way.cancel()
        return run

    async def resume(self) -> None:
        """See `HarnessSession.resume`."""
        before = self._unasked
        await self._rpc.resume()
        if self._unasked > before:
            about = {"server": self._request.server_id, "messages": self._unasked - before}
            logger.info("dropped what the agent told between turns", extra=about)

    def reach(self, endpoint: DaemonEndpoint) -> None:
        """See `HarnessSession.reach`."""
        self._daemon.reach(endpoint)
        self._rpc.reach()

    @property
    def silence(self) -> Silence:
        """See `HarnessSession.silence`."""
        stream = self._rpc.stream
        return Silence(stream.connected, stream.silence, self._clock.monotonic() - self._rpc.said)

    async def pulse(self) -> Pulse:
        """See `HarnessSession.pulse`."""
        return await self._daemon.pulse()

    async def _prompt(self, run: AcpRun, params: Message, trace: Mapping[str, str], sent: asyncio.Event) -> None:
        outcome = HarnessError("RUN_DEFECT", "the session was closed during a prompt")
        try:
            await self._rpc.call(
                "session/prompt",
                params,
                timeout=self._limits.prompt,
                headers=trace,
                sent=sent,
                in_order=True,
                answered=lambda answer: self._end_run(run, _outcome(answer)),
            )
        except HarnessError as error:
            outcome = error
        finally:
            self._end_run(run, outcome)

    def _end_run(self, run: AcpRun, outcome: PromptResult | HarnessError) -> None:
        """From here on nothing that the agent says belongs to this run, and it waits for no answer any more."""
        run.end(outcome)
        if self._run is not run:
            return
        self._run = None
        while self._asked:
            _, (number, asked) = self._asked.popitem()
            if self._rpc.dead is None:
                self._reply(number, _cancelled(asked))

    async def cancel(self) -> None:
        """See `HarnessSession.cancel`."""
        if self._run is None or self._rpc.dead is not None:
            return
        await self._rpc.notify("session/cancel", {"sessionId": self._session_id})
        # The protocol wants open requests answered, and some agents do not end before.
        while self._asked:
            _, (number, asked) = self._asked.popitem()
            await self._rpc.respond(number, _cancelled(asked))

    async def answer(self, request_key: str, answer: Answer) -> None:
        """See `HarnessSession.answer`."""
        number, asked = self._take_asked(request_key)
        options = asked.options if isinstance(asked, PermissionAsked) else ()
        await self._rpc.respond(number, {"result": {"outcome": choose(options, answer)}})

    async def answer_question(self, request_key: str, answer_json: str | None) -> None:
        """See `HarnessSession.answer_question`."""
        number, _ = self._take_asked(request_key)
        if answer_json is None:
            await self._rpc.respond(number, {"result": CANCELLED})
            return
        try:
            answer: object = json.loads(answer_json)
        except ValueError:
            answer = answer_json
        await self._rpc.respond(number, {"result": {"outcome": "answered", "answer": answer}})

    def _take_asked(self, key: str) -> tuple[object, PermissionAsked | QuestionAsked]:
        self._rpc.check()
        found = self._asked.pop(key, None)
        if found is None:
            raise HarnessError("INTERACTION_CLOSED", "the agent does not wait for this answer")
        return found

    # What the agent says by itself

    async def notified(self, method: str, params: object, size: int) -> None:
        """See `Listener.notified`."""
        run = self._run
        if run is None:
            self._unasked += 1
            return
        if method != "session/update" or not isinstance(params, dict):
            return
        if params.get("sessionId") != self._session_id:
            return
        update = read_update(params.get("update"))
        if update is not None:
            await run.put(update, size)

    async def requested(self, number: object, method: str, params: object, size: int) -> None:
        """See `Listener.requested`."""
        key = f"{self._request.server_id}:{request_key(number)}"
        asked: PermissionAsked | QuestionAsked | None = None
        if method == "session/request_permission":
            asked = read_permission(key, params)
            if asked is None:
                self._reply(number, {"error": {"code": INVALID_PARAMS, "message": "toolCall is missing"}})
                return
        elif method in ("_hearth/ask", "_hearth/client_tool"):
            asked = read_question(key, method, params)
        else:
            self._reply(number, {"error": {"code": METHOD_NOT_FOUND, "message": f"{method} is not offered"}})
            return
        if self._run is None:
            self._reply(number, _cancelled(asked))
            return
        self._asked[key] = (number, asked)
        await self._run.put(asked, size)

    def gone(self, error: HarnessError) -> None:
        """See `Listener.gone`."""
        if self._run is not None:
            self._end_run(self._run, error)

    def _reply(self, number: object, body: Message) -> None:
        """Answer without holding up the stream."""
        task = asyncio.create_task(self._respond(number, body), name="answer agent")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _respond(self, number: object, body: Message) -> None:
        try:
            await self._rpc.respond(number, body)
        except HarnessError as error:
            logger.warning("agent not answered", extra={"server": self._request.server_id, "reason": error.reason})

    # Beside the agent

    async def run_process(self, command: str, args: Sequence[str], *, timeout: float) -> tuple[int, str]:
        """See `HarnessSession.run_process`."""
        try:
            return await self._daemon.run(command, list(args), timeout)
        except (Refused, Unreached) as error:
            raise error.as_error_beside() from None

    async def write_file(self, path: str, data: bytes) -> None:
        """See `HarnessSession.write_file`."""
        try:
            await self._daemon.write_file(path, data, self._limits.file)
        except (Refused, Unreached) as error:
            raise error.as_error_beside() from None

    # Between and after turns

    async def park(self) -> None:
        """See `HarnessSession.park`."""
        if self._run is not None:
            raise HarnessError("RUN_DEFECT", "a prompt is running")
        await self._rpc.stop()
        self._rpc.check()

    async def close(self) -> None:
        """See `HarnessSession.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close agent session")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await _end({self._prompting} if self._prompting is not None else set())
        await _end(self._answering)
        await self._rpc.stop()
        fenced = self._rpc.dead is not None and self._rpc.dead.fenced
        if not fenced:
            await self._daemon.delete()
            await self._wait_for_start()
        self._rpc.die(HarnessError("AGENT_EXITED", "the session was closed"))
        if self._starting is not None:
            await asyncio.wait((self._starting,))
            if not self._starting.cancelled():
                self._starting.exception()

    async def _wait_for_start(self) -> None:
        """End a server whose start was still under way: the daemon knows of it only when it answers."""
        if self._starting is not None and not self._starting.done():
            await asyncio.wait((self._starting,), timeout=self._limits.rpc.last_words)
            if not self._starting.done():
                await self._daemon.delete()


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(list(tasks))


def choose(options: Sequence[PermissionOption], answer: Answer) -> Message:
    """The outcome to answer a permission request with.

    By kind, because ids and positions differ from agent to agent, and the one that holds once: what is allowed for
    ever would never be asked again. Only where an agent offers nothing else of the wanted direction, its `always` is
    taken, since otherwise nobody could ever allow or deny there. Without any option of that direction the request is
    cancelled, so that nothing runs that was not allowed.
    """
    wanted = {Answer.ALLOW: ("allow_once", "allow_always"), Answer.DENY: ("reject_once", "reject_always")}
    for kind in wanted.get(answer, ()):
        for option in options:
            if option.kind == kind:
                return {"outcome": "selected", "optionId": option.option_id}
    return CANCELLED


def _outcome(answer: Message) -> PromptResult | HarnessError:
    """What the answer to a prompt says."""
    try:
        result = read_result(_result(answer, "AGENT_ERROR"))
    except HarnessError as error:
        return error
    return result or HarnessError("AGENT_PROTOCOL", "the agent ended the turn without a stop reason")


def _cancelled(asked: PermissionAsked | QuestionAsked) -> Message:
    return {"result": {"outcome": CANCELLED} if isinstance(asked, PermissionAsked) else CANCELLED}


def _meta(meta: Mapping[str, Any]) -> Message:
    return {"_meta": dict(meta)} if meta else {}


def _result(answer: Message, reason: str = "AGENT_PROTOCOL") -> Message:
    """The result of an answer; its error is raised with `reason`."""
    if "error" in answer:
        code, message = _error(answer)
        raise HarnessError(reason, f"the agent answered with error {code}: {message}")
    result = answer.get("result")
    if not isinstance(result, dict):
        raise HarnessError("AGENT_PROTOCOL", "the agent answered without a result")
    return result


def _error(answer: Message) -> tuple[object, str]:
    found = _object(answer, "error")
    return found.get("code"), str(found.get("message", ""))[:ERROR_CHARACTERS]


def _object(value: Message, name: str) -> Message:
    found = value.get(name)
    return found if isinstance(found, dict) else {}
