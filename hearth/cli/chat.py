"""`hearth chat`: talk to an agent in the terminal, see its answer as it comes; queue, steer and answer meanwhile."""

from __future__ import annotations

import asyncio
import mimetypes
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.message import Message
from rich.markup import escape

from hearth.cli import lines, tracing, words
from hearth.cli.credentials import bindings
from hearth.cli.output import as_dict, err, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.spec import POLICY_HELP, spec_in_place, spec_of
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.cli.standing import Standing
from hearth.cli.turns import Printer
from hearth.cli.typed import Typed
from hearth.client import Client, session_key, text_content
from hearth.errors import FAILED_CALLS, CallError, read_error
from hearth.history.v1 import history_pb2  # noqa: F401 - registers the messages that JSON output needs
from hearth.reducer import Transcript, is_ending, text_of
from hearth.relay.v1 import relay_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2

Attach = Annotated[
    list[Path], typer.Option(exists=True, dir_okay=False, help="file for the (first) message; may be repeated")
]
Credential = Annotated[
    list[str], typer.Option(help="NAME=VARIABLE: a stored credential that the agent gets; may be repeated")
]
# The namespace of the request ids of files.
_UPLOADS = uuid.UUID("5a1f7b0e-8d0c-4a55-9f43-0b1b6c1f5c7d")
# Between looks at a turn that has ended and is not settled yet.
SETTLE_SECONDS = 0.1
YOU = "[bold cyan]you[/bold cyan]   "


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(chat)


def chat(
    session: Annotated[str, typer.Argument(help="id of the session; empty: a new one")] = "",
    project: Annotated[str, typer.Option(envvar="HEARTH_PROJECT", help="project of the session")] = "demo",
    agent: Annotated[str, typer.Option(help="agent of the session; empty: the one it has")] = "",
    permissions: Annotated[str, typer.Option(help=POLICY_HELP)] = "",
    attach: Attach = [],  # noqa: B006 - typer reads it
    credential: Credential = [],  # noqa: B006
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Talk to an agent. While it works, a line waits in the queue, `/steer TEXT` runs instead, y and n answer what it
    asks, and Ctrl-C stops it; `/help` lists the rest. An empty line or Ctrl-D leaves.

    Of a pipe, a line is taken when the agent is done or asks; one with a slash at once. With --json every item of the
    session from now on, and every answer of a call, is a line of stdout.
    """
    name = session or f"chat-{uuid.uuid4().hex[:8]}"
    asked = spec_of(agent, permissions, bindings(credential))
    run(_chat(session_key(project, name), asked, attach, root, json=json))


async def _chat(
    key: session_pb2.SessionKey,
    asked: control_pb2.SessionSpec | None,
    files: Sequence[Path],
    root: Root,
    *,
    json: bool,
) -> None:
    if not json:
        out.print(
            f"session [bold]{escape(key.session)}[/bold] of project {escape(key.project)}; /help, an empty line leaves"
        )
    async with connected(root) as client:
        spec = await spec_in_place(client, key, asked)
        await _Chat(client, key, spec, files, root, json=json).run()


async def attached(
    client: Client, key: session_pb2.SessionKey, files: Sequence[Path], request_id: str = ""
) -> list[content_pb2.ContentPart]:
    """Files of this machine as parts of a message; one that is sent again under its `request_id` is the same then."""
    parts = []
    for number, file in enumerate(files):
        own = str(uuid.uuid5(_UPLOADS, f"{request_id} {number}")) if request_id else ""
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        data = await asyncio.to_thread(file.read_bytes)
        parts.append(
            content_pb2.ContentPart(
                attachment=await client.attach(key, data, name=file.name, media_type=kind, request_id=own)
            )
        )
    return parts


class _Chat:
    """One person in one session. What somebody else does in it is shown too."""

    def __init__(
        self,
        client: Client,
        key: session_pb2.SessionKey,
        spec: control_pb2.SessionSpec | None,
        files: Sequence[Path],
        root: Path,
        *,
        json: bool,
    ) -> None:
        self._client = client
        self._key = key
        self._spec = spec
        self._files = files
        self._root = root
        self._json = json
        self._printer = Printer(quiet=json)
        self._view = Transcript()
        self._standing = Standing()
        self._typed = Typed()
        self._changed = asyncio.Event()
        # Items are shown in between calls, so that none overtakes the answer that announces it.
        self._calling = asyncio.Lock()
        self._mine: set[str] = set()
        # What is asked is told by the session and by its log; a person is asked once.
        self._asked: set[str] = set()
        self._leaving = False
        self._stopping = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the person leaves."""
        after = await self._look((await self._client.head(self._key)).head)
        for request in self._standing.asked.values():
            self._ask(request)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        self._typed.start(loop, self._changed.set)
        self._begin(self._watch(after))
        try:
            while await self._one_line():
                pass
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one_line(self) -> bool:
        """Wait for a line that may be taken, and do what it means; False: the person leaves."""
        self._prompt()
        await self._until(lambda: self._leaving or self._ready())
        if self._leaving or self._typed.ended:
            return False
        line = self._typed.take()
        if self._typed.by_hand:
            self._printer.typed()
        elif line:
            self._printer.note(f"{YOU}{escape(line)}")
        if not line:
            # While the agent works an empty line is a slip of the finger.
            return self._standing.working and self._typed.by_hand
        try:
            return await self._act(lines.meaning(line, list(self._standing.asked.values())))
        except FAILED_CALLS as error:
            if not self._typed.by_hand:
                raise
            self._refused(read_error(error))
            return True

    def _ready(self) -> bool:
        """Whether the next line may be taken. Its end comes when nothing is left to be shown, unless it was typed."""
        if self._typed.ended:
            return self._typed.by_hand or self._standing.listening
        first = self._typed.first
        if first is None:
            return False
        return self._typed.by_hand or first.startswith("/") or self._standing.listening

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            if condition():
                return
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()
            await self._changed.wait()

    async def _act(self, action: lines.Action) -> bool:
        match action:
            case lines.Send(text, steer):
                await self._send(text, steer=steer)
            case lines.Answer(answers):
                await self._answer(answers)
            case lines.Change(what, place, text):
                await self._change(what, place, text)
            case lines.Do("quit"):
                return False
            case lines.Do(what):
                await self._do(what)
            case lines.Wrong(why):
                err.print(f"[yellow]{escape(why)}[/yellow]", soft_wrap=True)
        return True

    async def _send(self, text: str, *, steer: bool) -> None:
        async with self._calling:
            content = [*text_content(text), *await attached(self._client, self._key, self._files)]
            on_busy = control_pb2.ON_BUSY_STEER if steer else control_pb2.ON_BUSY_QUEUE
            # What is stopped for it is what the person sees run.
            aim = self._standing.running if steer else ""
            with tracing.sending(self._root, "chat"):
                answer = await self._client.send(
                    self._key, content, spec=self._spec, on_busy=on_busy, steer_execution_id=aim
                )
            self._spec, self._files = None, ()
            self._told(answer)
            match answer.WhichOneof("result"):
                case "started":
                    self._mine.add(answer.started.input_id)
                    self._standing.begun(answer.started.execution.execution_id)
                case "queued":
                    self._standing.queued(answer.queued.input_id, text)
                    self._printer.note(f"[yellow]waits at place {answer.queued.rank}[/yellow]")
                case "steered":
                    self._standing.queued(answer.steered.input_id, text)
                    self._printer.note("[yellow]stopping what runs, then this is next[/yellow]")

    async def _answer(self, answers: Sequence[control_pb2.InteractionAnswer]) -> None:
        async with self._calling:
            answer = await self._client.answer(self._key, answers)
            self._told(answer)
            self._standing.answered(given.interaction_id for given in answers)
            self._standing.begun(answer.execution.execution_id)
            if answer.still_open:
                self._printer.note(f"[yellow]{answer.still_open} more to be answered[/yellow]")

    async def _change(self, what: str, place: int, text: str) -> None:
        waiting = [found async for found in self._client.inputs(self._key) if found.rank == place]
        if not waiting:
            err.print(f"[yellow]nothing waits at place {place}[/yellow]")
            return
        (chosen,) = waiting
        async with self._calling:
            match what:
                case "remove":
                    self._told(await self._client.remove_input(self._key, chosen.input_id))
                    self._printer.note(f"[dim]removed: {escape(text_of(chosen.content))}[/dim]")
                case "edit":
                    self._told(await self._client.update_input(self._key, chosen.input_id, text))
                    self._printer.note(f"[dim]place {place} now says: {escape(text)}[/dim]")
                case "now":
                    answer = await self._client.send_now(
                        self._key, chosen.input_id, execution_id=self._standing.running
                    )
                    self._told(answer)
                    self._standing.begun(answer.started.execution.execution_id)

    async def _do(self, what: str) -> None:
        match what:
            case "stop":
                await self._stop()
            case "kill":
                async with self._calling:
                    self._told(await self._client.kill(self._key))
            case "resume":
                async with self._calling:
                    answer = await self._client.resume_queue(self._key)
                    self._told(answer)
                    self._standing.begun(answer.started.execution.execution_id)
                    self._standing.paused = False
            case "queue":
                await self._show_queue()
            case "gates":
                for number, request in enumerate(self._standing.asked.values(), 1):
                    self._printer.note(f"[bold]{number}[/bold]")
                    self._printer.ask(request)
            case "help":
                self._printer.note(escape(lines.HELP))

    async def _show_queue(self) -> None:
        found = [waiting async for waiting in self._client.inputs(self._key)]
        for waiting in found:
            place = str(waiting.rank) if waiting.rank else "begins"
            mark = " [yellow]steer[/yellow]" if waiting.steer else ""
            self._printer.note(f"[bold]{place}[/bold]{mark} {escape(text_of(waiting.content))}")
        if not found:
            self._printer.note("[dim]nothing waits[/dim]")
        elif self._standing.paused:
            self._printer.note("[dim]until /resume or the next message[/dim]")

    async def _stop(self) -> None:
        running = self._standing.running
        if not running and not self._standing.asked:
            err.print("[yellow]nothing runs[/yellow]")
            return
        async with self._calling:
            self._stopping = running
            # Between turns an agent that asked is stopped by what it was last seen doing.
            epoch = 0 if running else (await self._client.get_session(self._key)).epoch
            self._told(await self._client.stop(self._key, execution_id=running, seen_epoch=epoch))

    async def _stop_by_hand(self) -> None:
        try:
            await self._stop()
        except FAILED_CALLS as error:
            self._refused(read_error(error))

    def _interrupted(self) -> None:
        """Ctrl-C: stops the agent; where there is nothing to stop, or it was told already, leaves."""
        running = self._standing.running
        if running and running != self._stopping:
            self._stopping = running
            err.print("\n[yellow]stopping ...[/yellow]")
            self._begin(self._stop_by_hand())
        else:
            self._leaving = True
        self._changed.set()

    async def _watch(self, after: session_pb2.Cursor) -> None:
        async for item in self._client.watch(self._key, after=after):
            async with self._calling:
                self._show(item)
            self._changed.set()

    def _show(self, item: relay_pb2.Item) -> None:
        if self._json:
            print_json(as_dict(item))
        changed = self._view.apply(item)
        if item.HasField("event"):
            self._event(item.event.event)
        if changed is not None:
            if changed.kind == "user" and changed.entity_id not in self._mine:
                self._printer.note(f"{YOU}{escape(changed.text)}")
            self._printer.show(changed)

    def _event(self, event: event_pb2.Event) -> None:
        self._standing.take(event)
        match event.WhichOneof("body"):
            case "interaction_requested":
                self._ask(event.interaction_requested)
            case "interaction_answered":
                decision = words.word(event_pb2.Decision.Name, event.interaction_answered.decision, "DECISION_")
                by = event.interaction_answered.answered_by
                self._printer.note(f"[dim]{decision or 'answered'}{f' by {escape(by)}' if by else ''}[/dim]")
            case "interaction_resolved":
                self._resolved(event.interaction_resolved)
            case _ if is_ending(event.type):
                self._printer.end(event)
                if self._standing.settling:
                    self._begin(self._settled(self._standing.settling))
                self._prompt()

    def _ask(self, request: event_pb2.InteractionRequested) -> None:
        if request.interaction_id not in self._asked:
            self._asked.add(request.interaction_id)
            self._printer.ask(request)

    def _resolved(self, resolved: event_pb2.InteractionResolved) -> None:
        told = (event_pb2.INTERACTION_RESOLUTION_CONSUMED, event_pb2.INTERACTION_RESOLUTION_POLICY)
        if resolved.resolution not in told:
            name = event_pb2.InteractionResolution.Name
            how = words.word(name, resolved.resolution, "INTERACTION_RESOLUTION_")
            self._printer.note(f"[dim]not asked any more: {how}[/dim]")

    async def _settled(self, execution_id: str) -> None:
        """Find out whether the queue goes on: the pool decides that just after the ending."""
        while True:
            session = await self._client.get_session(self._key)
            ended = session.execution.state == control_pb2.EXECUTION_STATE_TERMINAL
            if ended or session.execution.execution_id != execution_id:
                break
            await asyncio.sleep(SETTLE_SECONDS)
        self._standing.settled(session)
        if self._standing.paused and self._standing.waiting:
            self._printer.note(f"[yellow]{len(self._standing.waiting)} waiting; /resume, or say something[/yellow]")

    async def _look(self, head: session_pb2.Cursor) -> session_pb2.Cursor:
        """See how the session stands, and after what to read on; one that nobody has used stands still."""
        try:
            session = await self._client.get_session(self._key)
        except FAILED_CALLS as error:
            if read_error(error).reason != "SESSION_NOT_FOUND":
                raise
            return head
        inputs = [waiting async for waiting in self._client.inputs(self._key)]
        asked = [found async for found in self._client.interactions(self._key)]
        self._standing.shown(session, inputs, asked)
        if not self._standing.running:
            return head
        # The turn that runs is shown from its beginning, and so is its ending, should it have come just now.
        return session_pb2.Cursor(sequence=min(head.sequence, session.history_sequence))

    def _begin(self, work: Awaitable[None]) -> None:
        async def to_its_end() -> None:
            try:
                await work
            finally:
                self._changed.set()

        self._tasks.add(asyncio.create_task(to_its_end()))

    def _prompt(self) -> None:
        if self._typed.by_hand and self._standing.listening:
            self._printer.prompt(YOU)

    def _told(self, answer: Message) -> None:
        if self._json:
            print_json(as_dict(answer))

    def _refused(self, error: CallError) -> None:
        err.print(f"[red]{escape(error.reason or error.code.name)}[/red] {escape(error.message)}", soft_wrap=True)
