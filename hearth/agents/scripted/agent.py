"""The ACP methods: initialize, sessions, prompts, cancel."""

import asyncio
import os
import time
from pathlib import PurePath

from hearth.agents.scripted import script
from hearth.agents.scripted.connection import Connection, Object, RpcError
from hearth.agents.scripted.journal import Journal
from hearth.agents.scripted.sessions import Session, Sessions
from hearth.agents.scripted.turn import Processes, TurnRun

PROTOCOL_VERSION = 1
EXECUTION_META = "hearth.dev/execution"
AGENT_META = "hearth.dev/agent"
TIMES_META = "hearth.dev/times"


class ScriptedAgent:
    """All sessions of this process. One prompt at a time in each."""

    def __init__(self, sessions: Sessions, journal: Journal) -> None:
        self.connection = Connection(self._handle, self._listen)
        self.processes = Processes()
        self._sessions = sessions
        self._journal = journal
        self._running: dict[str, tuple[TurnRun, asyncio.Task[str]]] = {}
        self._stubborn = False

    @property
    def stubborn(self) -> bool:
        """True when the end of the input must not end the process."""
        return self._stubborn or any(run.stubborn for run, _ in self._running.values())

    async def _handle(self, method: str, params: Object) -> Object:
        match method:
            case "initialize":
                return self._initialize()
            case "authenticate":
                return {}
            case "session/new":
                return self._new(params)
            case "session/load":
                return await self._load(params)
            case "session/prompt":
                return await self._prompt(params)
        raise RpcError(-32601, "Method not found", {"method": method})

    def _listen(self, method: str, params: Object) -> None:
        if method != "session/cancel":
            return
        session_id = str(params.get("sessionId"))
        self._journal.write("cancel", session=session_id)
        running = self._running.get(session_id)
        if running is not None and not running[0].deaf:
            running[1].cancel()

    def _initialize(self) -> Object:
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": "hearth-scripted", "title": "Hearth scripted agent", "version": "1"},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": False, "audio": False, "embeddedContext": True},
                # It takes servers of any kind, and instructions, and uses none of them.
                "mcpCapabilities": {"http": True, "sse": False},
                "_meta": {"hearth.dev/instructions": True},
            },
            "authMethods": [],
        }

    def _new(self, params: Object) -> Object:
        try:
            session = self._sessions.create(_directory(params))
        except OSError as error:
            raise RpcError(-32603, f"the session cannot be kept: {error}") from None
        self._journal.opened(session.id, params, loaded=False)
        return {"sessionId": session.id}

    async def _load(self, params: Object) -> Object:
        session_id = _string(params, "sessionId")
        if session_id in self._running:
            raise RpcError(-32600, "a prompt of this session is running")
        session = self._sessions.load(session_id, _directory(params))
        if session is None:
            raise RpcError(-32002, "Resource not found", {"sessionId": session_id})
        self._journal.opened(session_id, params, loaded=True)
        for turn in session.state["turns"]:
            for kind, identifier, text in (
                ("user_message_chunk", f"user-{turn['number']}", turn["user"]),
                ("agent_message_chunk", f"msg-{turn['number']}-1", turn["agent"]),
            ):
                if text:
                    content = {"type": "text", "text": text}
                    update = {"sessionUpdate": kind, "messageId": identifier, "content": content}
                    await self.connection.notify("session/update", {"sessionId": session_id, "update": update})
        return {}

    async def _prompt(self, params: Object) -> Object:
        prompted = time.time_ns()
        # No await before the turn is registered: a cancel that follows at once must find it.
        session = self._sessions.get(_string(params, "sessionId"))
        if session is None:
            raise RpcError(-32002, "Resource not found", {"sessionId": params.get("sessionId")})
        if session.id in self._running:
            raise RpcError(-32600, "a prompt of this session is running")
        text, context = read_prompt(params.get("prompt"))
        meta = params.get("_meta")
        message_id = meta.get(EXECUTION_META) if isinstance(meta, dict) else None
        self._journal.write("prompt", message_id=message_id, session=session.id, text=text, context=context)
        turn = session.begin(text, {**script.facts_in(context), **script.facts_in(text)})
        run = TurnRun(session, turn["number"], self.connection, self._journal, self.processes)
        playing = asyncio.create_task(run.play(script.parse(text)))
        self._running[session.id] = (run, playing)
        stop_reason = "error"
        try:
            await asyncio.wait([playing])
            stop_reason = "cancelled" if playing.cancelled() else playing.result()
        finally:
            self._stubborn = self._stubborn or run.stubborn
            del self._running[session.id]
            session.finish(turn, run.text, stop_reason)
        # When it was asked and when it answers, in nanoseconds since 1970: what lies around that is Hearth's own time.
        times = {"prompted_ns": prompted, "answered_ns": time.time_ns()}
        meta = {AGENT_META: report(session), TIMES_META: times}
        return {"stopReason": stop_reason, "usage": _usage(text, run), "_meta": meta}


def report(session: Session) -> Object:
    """What this process knows of a session, for a machine. The turn that runs counts."""
    return {
        "pid": os.getpid(),
        "turns_in_memory": session.turns_in_memory,
        "turns_loaded": session.turns_loaded,
        "session_loaded": session.loaded,
    }


def read_prompt(blocks: object) -> tuple[str, str]:
    """The content blocks of a prompt as text to act on, where other kinds of block are named in brackets; and the text
    of embedded resources, which is only context. Raises RpcError when they are malformed."""
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise RpcError(-32602, "Invalid params", {"field": "prompt"})
    lines: list[str] = []
    context: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                lines.append(text)
            case {"type": "resource_link", "uri": uri}:
                lines.append(f"[resource_link {block.get('name')} {uri}]")
            case {"type": "resource", "resource": {"uri": uri} as resource}:
                lines.append(f"[resource {uri}]")
                context.append(str(resource.get("text", "")))
            case {"type": ("image" | "audio") as kind, "data": str(data)}:
                lines.append(f"[{kind} {block.get('mimeType')} {len(data)} characters]")
            case _:
                raise RpcError(-32602, "Invalid params", {"field": "prompt", "block": block.get("type")})
    return "\n".join(lines), "\n".join(context)


def _usage(prompt: str, run: TurnRun) -> Object:
    given, said = len(prompt) // 4, run.characters // 4
    return {"inputTokens": given, "outputTokens": said, "totalTokens": given + said}


def _string(params: Object, name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise RpcError(-32602, "Invalid params", {"field": name})
    return value


def _directory(params: Object) -> str:
    cwd = _string(params, "cwd")
    if not PurePath(cwd).is_absolute():
        raise RpcError(-32602, "Invalid params", {"field": "cwd", "reason": "must be absolute"})
    return cwd
