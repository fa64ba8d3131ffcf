"""Sessions of a toolbox: shells that live on between commands."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from aiohttp import web

from tests.support.daytona.journal import Journal
from tests.support.daytona.problems import DAEMON, Problem
from tests.support.daytona.processes import Base, Child
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import Gate, Handler, body_of, reply
from tests.support.daytona.toolbox import SHELL, Toolboxes, end_tree, lines, localized, running

_POLL_SECONDS = 0.02
_STDOUT, _STDERR = b"\x01\x01\x01", b"\x02\x02\x02"


@dataclass(slots=True)
class _Command:
    id: str
    text: str
    directory: Path
    done: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None

    def end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.done.set()

    def output(self, name: str) -> bytes:
        path = self.directory / name
        return path.read_bytes() if path.exists() else b""

    def shown(self) -> dict[str, object]:
        code = {} if self.code is None else {"exitCode": self.code}
        return {"id": self.id, "command": self.text, **code}


class _Session:
    """A shell that reads commands from a pipe and reports the end of each on another."""

    def __init__(self, base: Base, shell: Child, pid: int, write_to: int, directory: Path) -> None:
        self.base = base
        self.shell = shell
        self.pid = pid
        self.commands: dict[str, _Command] = {}
        self._write_to = write_to
        self._directory = directory
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, found: Sandbox, directory: Path) -> _Session:
        base = running(found)
        directory.mkdir(parents=True)
        commands_out, commands_in = os.pipe()
        done_out, done_in = os.pipe()
        log = os.open(directory / "shell.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            shell = await base.spawn([SHELL], str(found.home), found.environment(), [commands_out, log, log, done_in])
        finally:
            for descriptor in (commands_out, done_in, log):
                os.close(descriptor)
        session = cls(base, shell, await shell.pid, commands_in, directory)
        session._watching = asyncio.get_running_loop().create_task(session._watch(done_out))
        return session

    @property
    def ended(self) -> bool:
        return self.shell.code.done()

    def execute(self, text: str, command: str) -> _Command:
        """Give the shell a command; it runs after those before it."""
        made = _Command(str(uuid4()), text, self._directory / str(len(self.commands)))
        made.directory.mkdir()
        os.mkfifo(made.directory / "stdin")
        (made.directory / "script").write_text(command + "\n")
        self.commands[made.id] = made
        script, stdin, stdout, stderr = (
            shlex.quote(str(made.directory / name)) for name in ("script", "stdin", "stdout", "stderr")
        )
        line = f'. {script} <>{stdin} >{stdout} 2>{stderr} 3>&-; echo "{made.id} $?" >&3\n'
        try:
            os.write(self._write_to, line.encode())
        except OSError:
            raise _ended() from None
        return made

    async def end(self) -> None:
        """Kill the shell and all below it."""
        if not self.ended:
            await end_tree(self.base, self.pid)
        await self.shell.ended()
        if self._watching is not None:
            await self._watching

    async def _watch(self, done_out: int) -> None:
        watching = asyncio.get_running_loop().create_task(lines(done_out, self._done))
        code = await self.shell.ended()
        os.close(self._write_to)
        # What it ran lives on only as somebody else's child, and holds no end of this pipe.
        await watching
        for command in self.commands.values():
            command.end(code if code >= 0 else 128 - code)

    def _done(self, line: str) -> None:
        identifier, _, code = line.partition(" ")
        self.commands[identifier].end(int(code))


class SessionApi:
    """Handlers of sessions."""

    def __init__(self, toolboxes: Toolboxes, journal: Journal) -> None:
        self._toolboxes = toolboxes
        self._journal = journal
        # By the base they run under, because none outlives it.
        self._sessions: dict[tuple[int, str], _Session] = {}

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, below the prefix of a toolbox."""
        one, command = "/process/session/{session}", "/process/session/{session}/command/{command}"

        def guard(call: str, handler: Handler) -> Handler:
            return gate.guard(call, handler, source=DAEMON, classes=())

        return [
            web.get("/process/session", guard("session", self._list)),
            web.post("/process/session", guard("session", self._create)),
            web.get(one, guard("session", self._get)),
            web.delete(one, guard("session", self._delete)),
            web.post(f"{one}/exec", guard("session_command", self._execute)),
            web.get(command, guard("session", self._command)),
            web.get(f"{command}/logs", guard("session_logs", self._logs)),
            web.post(f"{command}/input", guard("session_command", self._input)),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        name = (await body_of(request)).get("sessionId")
        if not isinstance(name, str) or not name or "/" in name:
            raise Problem(400, "sessionId is required", source=DAEMON)
        key = (running(found).pid, name)
        if key in self._sessions:
            raise Problem(409, "session already exists", source=DAEMON)
        directory = found.directory / "sessions" / f"{name}-{uuid4().hex[:8]}"
        session = await _Session.start(found, directory)
        if key in self._sessions:
            await session.end()
            raise Problem(409, "session already exists", source=DAEMON)
        self._sessions[key] = session
        return web.Response(status=201)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        pid = running(self._toolboxes.sandbox(request)).pid
        return reply([_shown(name, session) for (owner, name), session in self._sessions.items() if owner == pid])

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return reply(_shown(request.match_info["session"], self._session(request)))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        del self._sessions[session.base.pid, request.match_info["session"]]
        await session.end()
        return web.Response(status=204)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        found, session = self._toolboxes.sandbox(request), self._session(request)
        body = await body_of(request)
        text = body.get("command")
        if not isinstance(text, str) or not text.strip():
            raise Problem(400, "command cannot be empty", source=DAEMON)
        if session.ended:
            raise _ended()
        self._journal.write("process", sandbox=found.id, session=found.session, command=text)
        command = session.execute(text, localized(found, text))
        if body.get("runAsync") or body.get("async"):
            return reply({"cmdId": command.id}, 202)
        await command.done.wait()
        return reply({"cmdId": command.id, "exitCode": command.code, **_logs(command)})

    async def _command(self, request: web.Request) -> web.StreamResponse:
        return reply(self._one(request).shown())

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        command = self._one(request)
        if request.query.get("follow") != "true":
            return reply(_logs(command))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sent = {"stdout": 0, "stderr": 0}
        last = False
        while not socket.closed:
            for name, prefix in (("stdout", _STDOUT), ("stderr", _STDERR)):
                new = command.output(name)[sent[name] :]
                if new:
                    await socket.send_bytes(prefix + new)
                    sent[name] += len(new)
            if last:
                await socket.close(code=1000)
                break
            # One more look after the end, for what was written just before it.
            last = command.done.is_set()
            if not last:
                await asyncio.sleep(_POLL_SECONDS)
        return socket

    async def _input(self, request: web.Request) -> web.StreamResponse:
        command = self._one(request)
        data = (await body_of(request)).get("data", "")
        if command.code is not None:
            raise Problem(410, "command already completed", code="COMMAND_ALREADY_COMPLETED", source=DAEMON)
        with open(os.open(command.directory / "stdin", os.O_RDWR | os.O_NONBLOCK), "wb", 0) as fifo:
            fifo.write(data.encode())
        return web.Response(status=204)

    def _session(self, request: web.Request) -> _Session:
        key = (running(self._toolboxes.sandbox(request)).pid, request.match_info["session"])
        if key not in self._sessions:
            raise Problem(404, "session not found", code="PROCESS_NOT_FOUND", source=DAEMON)
        return self._sessions[key]

    def _one(self, request: web.Request) -> _Command:
        commands = self._session(request).commands
        if request.match_info["command"] not in commands:
            raise Problem(404, "command not found", code="PROCESS_NOT_FOUND", source=DAEMON)
        return commands[request.match_info["command"]]


def _shown(name: str, session: _Session) -> dict[str, object]:
    return {"sessionId": name, "commands": [command.shown() for command in session.commands.values()]}


def _logs(command: _Command) -> dict[str, str]:
    stdout, stderr = (command.output(name).decode("utf-8", "replace") for name in ("stdout", "stderr"))
    return {"output": stdout + stderr, "stdout": stdout, "stderr": stderr}


def _ended() -> Problem:
    return Problem(410, "session has ended", code="SESSION_ENDED", source=DAEMON)
