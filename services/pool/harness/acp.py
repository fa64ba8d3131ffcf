"""The Agent Client Protocol over HTTP, in the dialect of sandbox-agent 0.4.2, as the harness of the pool."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Collection, Mapping, Sequence

import aiohttp

from hearth.types.v1 import content_pb2
from services.chassis.clock import Clock
from services.pool.harness.answers import meta, result_of
from services.pool.harness.daemon import Daemon, Refused, Unreached, new_http
from services.pool.harness.opening import METHOD_NOT_FOUND, Opened, Opening
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
    UsageChanged,
)
from services.pool.harness.rpc import Message, RpcConnection, RpcLimits, request_key
from services.pool.harness.runs import AcpRun
from services.pool.harness.spending import Spending
from services.pool.harness.updates import (
    is_usage,
    prompt_blocks,
    read_permission,
    read_question,
    read_result,
    read_update,
)

logger = logging.getLogger(__name__)

EXECUTION_META = "hearth.dev/execution"
INVALID_PARAMS = -32602
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
        self._opening = Opening(self._rpc, request, limits.rpc)
        self._opened = Opened()
        self._server_id = request.server_id
        self._workspace = request.workspace
        self._clock = clock
        self._limits = limits
        self._run: AcpRun | None = None
        self._spending = Spending(None)
        # A prompt is on its way to become the run; and what the agent told while none ran.
        self._beginning = False
        self._unasked = 0
        self._prompting: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        # Requests of the agent that wait for their answer, by request key, with their JSON-RPC id.
        self._asked: dict[str, tuple[object, PermissionAsked | QuestionAsked]] = {}
        self._closing: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        """See `HarnessSession.session_id`."""
        return self._opened.session_id

    @property
    def loaded(self) -> bool:
        """See `HarnessSession.loaded`."""
        return self._opened.loaded

    # Opening

    async def open(self) -> None:
        """Start the agent and open its session. What it began when it fails is ended by `close`."""
        self._opened = await self._opening.open()
        # Of one that was loaded nobody knows what it had cost.
        self._spending = Spending(None if self._opened.loaded else 0)

    def open_timeout(self) -> HarnessError:
        """What it means that the agent did not open in time."""
        return self._opening.timed_out()

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
        opened = self._opened
        told = [opened.untold, *content] if opened.untold is not None else content
        params = {
            "sessionId": opened.session_id,
            "prompt": prompt_blocks(told, self._workspace, opened.takes),
            **meta({EXECUTION_META: execution_id, **trace_context}),
        }
        self._beginning = True
        try:
            await self.resume()
        finally:
            self._beginning = False
        self._opened = dataclasses.replace(opened, untold=None)
        self._spending.begin()
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
            about = {"server": self._server_id, "messages": self._unasked - before}
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
        await self._rpc.notify("session/cancel", {"sessionId": self._opened.session_id})
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
        if method != "session/update" or not isinstance(params, dict):
            return
        if params.get("sessionId") != self._opened.session_id:
            return
        if run is None and not is_usage(params.get("update")):
            return
        update = read_update(params.get("update"))
        if isinstance(update, UsageChanged) and update.usage.cost_micro_usd:
            update.usage.cost_micro_usd = self._spending.told(update.usage.cost_micro_usd)
        if run is not None and update is not None:
            await run.put(update, size)

    async def requested(self, number: object, method: str, params: object, size: int) -> None:
        """See `Listener.requested`."""
        key = f"{self._server_id}:{request_key(number)}"
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
            logger.warning("agent not answered", extra={"server": self._server_id, "reason": error.reason})

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
        await self._opening.start_ended()

    async def _wait_for_start(self) -> None:
        """End a server whose start was still under way: the daemon knows of it only when it answers."""
        if not await self._opening.start_ended(0) and not await self._opening.start_ended(self._limits.rpc.last_words):
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
        result = read_result(result_of(answer, "AGENT_ERROR"))
    except HarnessError as error:
        return error
    return result or HarnessError("AGENT_PROTOCOL", "the agent ended the turn without a stop reason")


def _cancelled(asked: PermissionAsked | QuestionAsked) -> Message:
    return {"result": {"outcome": CANCELLED} if isinstance(asked, PermissionAsked) else CANCELLED}
