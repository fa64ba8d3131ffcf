"""One turn: the steps of a prompt carried out, told to the client as session updates."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

from hearth.agents.scripted import script
from hearth.agents.scripted.connection import Connection, Object, RpcError
from hearth.agents.scripted.journal import Journal
from hearth.agents.scripted.sessions import TEXT_CHARACTERS, Session

OUTPUT_BYTES = 64 * 1024
OPTIONS: list[Object] = [
    {"optionId": "go-ahead", "name": "Allow once", "kind": "allow_once"},
    {"optionId": "trust-it", "name": "Always allow", "kind": "allow_always"},
    {"optionId": "leave-it", "name": "Reject", "kind": "reject_once"},
]
GARBAGE = b'this is not JSON\n{"jsonrpc":"2.0","method":\n"a string"\n[1,2]\n\n'


# What was put off lives longer than its turn.
_LATER: set[asyncio.Task[None]] = set()


class Ended(Exception):
    """The turn is over, with this stop reason."""

    def __init__(self, stop_reason: str) -> None:
        super().__init__(stop_reason)
        self.stop_reason = stop_reason


class Processes:
    """The shell commands that run, so that the end of the agent can end them."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        # On their way: the shell of one may run already.
        self._spawning: set[asyncio.Future[asyncio.subprocess.Process]] = set()

    async def run(self, command: str, cwd: str) -> tuple[int, str]:
        """Run a shell command → exit code, output. When it is cancelled the command is killed with its group."""
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        self._spawning.add(spawning)
        spawning.add_done_callback(self._spawned)
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            group = (await spawning).pid
            self._groups.discard(group)
            _kill_group(group)
            raise
        output = bytearray()
        try:
            assert process.stdout is not None
            while chunk := await process.stdout.read(64 * 1024):
                output += chunk[: OUTPUT_BYTES - len(output)]
            return await process.wait(), output.decode("utf-8", "replace")
        finally:
            self._groups.discard(process.pid)
            if process.returncode is None:
                _kill_group(process.pid)

    async def kill(self) -> None:
        """Kill all that run, also those that are only being started."""
        while self._spawning:
            await asyncio.wait(self._spawning)
        for group in self._groups:
            _kill_group(group)

    def _spawned(self, spawning: asyncio.Future[asyncio.subprocess.Process]) -> None:
        self._spawning.discard(spawning)
        if not spawning.cancelled() and spawning.exception() is None:
            self._groups.add(spawning.result().pid)


class TurnRun:
    """Carries out the steps of one prompt. `deaf` turns ignore a cancel."""

    def __init__(
        self, session: Session, number: int, connection: Connection, journal: Journal, processes: Processes
    ) -> None:
        self.deaf = False
        self.stubborn = False  # the end of the input does not end the process
        self.characters = 0
        self._session = session
        self._number = number
        self._connection = connection
        self._journal = journal
        self._processes = processes
        self._text: list[str] = []
        self._silent = False
        self._fresh = False  # the step has said nothing yet
        self._messages = 0
        self._talking: str | None = None  # kind of the message that the next delta may belong to
        self._calls = 0

    @property
    def text(self) -> str:
        """What was said so far, as far as it is kept."""
        return "".join(self._text)

    async def play(self, steps: list[script.Step]) -> str:
        """Carry out all steps and return the stop reason. Raises RpcError when a step says so."""
        try:
            for step in steps:
                self._fresh = True
                await self._perform(step)
        except Ended as ended:
            return ended.stop_reason
        if not self.characters and not self._silent:
            await self._say("Done.")
        if not self._silent:
            await self._count()
        return "end_turn"

    async def _count(self) -> None:
        # The protocol has the cost of the whole session.
        cost = {"amount": 0.25 * self._number, "currency": "USD"}
        await self._update("usage_update", used=100 * self._number, size=200_000, cost=cost)

    async def _perform(self, step: script.Step) -> None:  # noqa: PLR0912 - one case a directive
        match step:
            case script.Say(text):
                await self._say_slowly(script.reply(text, self._session.state["facts"], identity(self._session)))
            case script.Stream(words, rate):
                await self._stream(words, rate)
            case script.Think(words):
                for index in range(words):
                    await self._chunk("agent_thought_chunk", f"thought-{index + 1} ")
            case script.ToolUse():
                await self._use_tools([step])
            case script.AskTogether(uses):
                await self._use_tools(list(uses))
            case script.Told(text):
                self._journal.write("told", session=self._session.id, text=text)
                await self._say(f"I was told: {text}")
            case script.Run(command):
                await self._run(command)
            case script.LeaveChild(seconds):
                await self._leave_child(seconds)
            case script.Sleep(seconds):
                await asyncio.sleep(seconds)
            case script.Flood(deltas, size):
                for _ in range(deltas):
                    await self._say("x" * size)
            case script.WriteFile(path, text):
                await self._write_file(path, text)
            case script.ReadFile(path):
                await self._read_file(path)
            case script.Extension(method, params):
                await self._extension(method, params)
            case script.Later():
                task = asyncio.create_task(self._say_later(step))
                _LATER.add(task)
                task.add_done_callback(_LATER.discard)
            case script.Fail(message):
                raise RpcError(-32603, message)
            case script.Crash(code):
                await self._crash(code)
            case script.Plain(word):
                await self._plain(word)

    async def _plain(self, word: str) -> None:
        match word:
            case "plan":
                await self._plan()
            case "commands":
                await self._update("available_commands_update", availableCommands=[])
            case "usage":
                await self._count()
            case "empty":
                self._silent = True
                raise Ended("end_turn")
            case "cancelled-unasked":
                raise Ended("cancelled")
            case "garbage":
                await self._connection.write_raw(GARBAGE)
            case "ignore-eof":
                self.stubborn = True
            case "hang" | "hang-hard":
                self.deaf = word == "hang-hard"
                self.stubborn = self.stubborn or self.deaf
                await asyncio.Event().wait()

    async def _stream(self, words: int, rate: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for index in range(words):
            # Against the start, not the last word: pauses must not add up to a slower stream.
            if rate and (pause := start + index / rate - loop.time()) > 0:
                await asyncio.sleep(pause)
            await self._say(f"word-{index + 1}" + (" " if index + 1 < words else ""))

    async def _use_tools(self, uses: list[script.ToolUse | script.Extension | script.Run]) -> None:
        begun: list[Coroutine[object, object, str]] = []
        for use in uses:
            if isinstance(use, script.ToolUse):
                begun.append(self._use_tool(await self._open_call(use.name, "other", use.arguments), use))
            elif isinstance(use, script.Extension):
                begun.append(self._extension(use.method, use.params))
            else:
                begun.append(self._run(use.command))
        if "cancelled" in await asyncio.gather(*begun):
            raise Ended("cancelled")

    async def _use_tool(self, call: str, use: script.ToolUse) -> str:
        answer = await self._may(call, use)
        if answer == "allowed":
            self._journal.write(
                "tool", session=self._session.id, tool_call_id=call, tool=use.name, input=dict(use.arguments)
            )
            await self._update("tool_call_update", toolCallId=call, status="in_progress")
            await self._close_call(call, "completed", f"{use.name} {json.dumps(use.arguments)} done")
        elif answer != "cancelled":
            await self._close_call(call, "failed", f"{use.name} was {answer}.")
            await self._say(f"{use.name} was {answer}.")
        return answer

    async def _may(self, call: str, use: script.ToolUse) -> str:
        """allowed, rejected, cancelled, or what went wrong with the question."""
        always = self._session.state["always"]
        if not use.ask or use.name in always:
            return "allowed"
        tool_call = {"toolCallId": call, "title": use.name, "kind": "other", "status": "pending"}
        params: Object = {
            "sessionId": self._session.id,
            "toolCall": {**tool_call, "rawInput": dict(use.arguments)},
            "options": OPTIONS,
        }
        try:
            choice = _choice(await self._connection.request("session/request_permission", params))
        except RpcError as error:
            choice = f"not answered ({error})"
        self._journal.write("permission", session=self._session.id, tool_call_id=call, tool=use.name, outcome=choice)
        if choice == "allow_always":
            always.append(use.name)
            self._session.save()
        return {"allow_once": "allowed", "allow_always": "allowed", "reject_once": "rejected"}.get(choice, choice)

    async def _run(self, command: str) -> str:
        call = await self._open_call("run", "execute", {"command": command})
        await self._update("tool_call_update", toolCallId=call, status="in_progress")
        try:
            code, output = await self._processes.run(command, self._session.state["cwd"])
        except OSError as error:
            await self._close_call(call, "failed", str(error))
            return "failed"
        await self._close_call(call, "completed" if code == 0 else "failed", output, exitCode=code)
        await self._say(f"The command ended with {code}: {output.strip()}")
        return "done"

    async def _leave_child(self, seconds: float) -> None:
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(  # noqa: ASYNC220 - nobody waits for it
            ["sleep", str(seconds)], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        await self._say(f"Left child {child.pid}.")

    async def _write_file(self, name: str, text: str) -> None:
        path = Path(self._session.state["cwd"], name)
        call = await self._open_call("write", "edit", {"path": name}, locations=[{"path": str(path)}])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            await self._close_call(call, "failed", str(error))
            await self._say(f"{name} could not be written: {error.strerror}")
            return
        await self._close_call(call, "completed", f"{len(text)} characters")
        await self._say(f"Wrote {name}.")

    async def _read_file(self, name: str) -> None:
        path = Path(self._session.state["cwd"], name)
        call = await self._open_call("read", "read", {"path": name}, locations=[{"path": str(path)}])
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            await self._close_call(call, "failed", str(error))
            await self._say(f"{name} could not be read: {error.strerror}")
            return
        await self._close_call(call, "completed", text[:OUTPUT_BYTES])
        await self._say(f"{name}: {text.strip()[:OUTPUT_BYTES]}")

    async def _extension(self, method: str, params: script.Json) -> str:
        self._calls += 1
        call = f"call-{self._number}-{self._calls}"
        try:
            result = await self._connection.request(
                method, {"sessionId": self._session.id, "toolCallId": call, **params}
            )
        except RpcError as error:
            await self._say(f"{method} was refused: {error}")
            return "refused"
        self._journal.write("answer", session=self._session.id, method=method, tool_call_id=call, answer=result)
        await self._say(f"Answer: {json.dumps(result, ensure_ascii=False)}")
        return "answered"

    async def _say_later(self, step: script.Later) -> None:
        await asyncio.sleep(step.seconds)
        if step.ask:
            outcome = await self._may(f"later-{self._number}", script.ToolUse(step.text, {}, ask=True))
            self._journal.write("later", session=self._session.id, outcome=outcome)
            return
        update: Object = {"sessionUpdate": "agent_message_chunk", "content": _text(step.text)}
        await self._connection.notify("session/update", {"sessionId": self._session.id, "update": update})
        self._journal.write("later", session=self._session.id, text=step.text)

    async def _plan(self) -> None:
        names = ["Read the question", "Think", "Answer"]
        for done in range(len(names) + 1):
            entries = [
                {"content": name, "priority": "medium", "status": _status(index, done)}
                for index, name in enumerate(names)
            ]
            await self._update("plan", entries=entries)

    async def _crash(self, code: int | None) -> None:
        # What was written before must arrive, or a crash could not be told from a crash earlier.
        await self._connection.write_raw(b"")
        if code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            print(f"the scripted agent crashes with {code}, as the prompt says", file=sys.stderr, flush=True)
            os._exit(code)

    async def _open_call(self, name: str, kind: str, arguments: script.Json, **fields: object) -> str:
        self._calls += 1
        call = f"call-{self._number}-{self._calls}"
        await self._update(
            "tool_call",
            toolCallId=call,
            title=name,
            kind=kind,
            status="pending",
            rawInput=dict(arguments),
            **fields,
        )
        return call

    async def _close_call(self, call: str, status: str, output: str, **fields: object) -> None:
        await self._update(
            "tool_call_update",
            toolCallId=call,
            status=status,
            content=[{"type": "content", "content": {"type": "text", "text": output}}],
            rawOutput={"output": output, **fields},
        )

    async def _say_slowly(self, text: str) -> None:
        """In a few deltas, cut between words."""
        words = text.split(" ")
        size = max(1, -(-len(words) // 4))
        pieces = [" ".join(words[at : at + size]) for at in range(0, len(words), size)]
        for index, piece in enumerate(pieces):
            await self._say(piece + (" " if index + 1 < len(pieces) else ""))

    async def _say(self, text: str) -> None:
        same_message = self._talking == "agent_message_chunk"
        if self._fresh and same_message:
            text = f"\n{text}"
        self._fresh = False
        if self.characters < TEXT_CHARACTERS:
            self._text += [text] if same_message or not self._text else ["\n", text]
        self.characters += len(text)
        await self._chunk("agent_message_chunk", text)

    async def _chunk(self, kind: str, text: str) -> None:
        if self._talking != kind:
            self._messages += 1
        await self._update(kind, messageId=f"msg-{self._number}-{self._messages}", content=_text(text))
        self._talking = kind

    async def _update(self, kind: str, /, **fields: object) -> None:
        self._talking = None
        update: Object = {"sessionUpdate": kind, **fields}
        await self._connection.notify("session/update", {"sessionId": self._session.id, "update": update})


def identity(session: Session) -> str:
    """Who answers, for a person."""
    return (
        f"I am the scripted agent, pid {os.getpid()}. "
        f"Turns in memory: {session.turns_in_memory}. Turns loaded: {session.turns_loaded}."
    )


def _text(text: str) -> Object:
    return {"type": "text", "text": text}


def _status(index: int, done: int) -> str:
    if index < done:
        return "completed"
    return "in_progress" if index == done else "pending"


def _choice(result: Object) -> str:
    """The kind of the chosen option, or cancelled. Raises RpcError when the answer is neither."""
    outcome = result.get("outcome")
    if isinstance(outcome, dict) and outcome.get("outcome") == "cancelled":
        return "cancelled"
    if isinstance(outcome, dict) and outcome.get("outcome") == "selected":
        for option in OPTIONS:
            if option["optionId"] == outcome.get("optionId"):
                return str(option["kind"])
    raise RpcError(-32603, "the answer chooses none of the options")


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
