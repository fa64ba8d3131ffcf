"""`hearth chat`: talk to an agent in the terminal, and see its answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli.credentials import bindings
from hearth.cli.output import addresses, as_dict, err, out, print_json, run, spec_of, token
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.client import Client, session_key, text_content
from hearth.reducer import Entry, Transcript, ending_summary, is_ending
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2

Attach = Annotated[
    list[Path], typer.Option(exists=True, dir_okay=False, help="file for the (first) message; may be repeated")
]
Credential = Annotated[
    list[str], typer.Option(help="NAME=VARIABLE: a stored credential that the agent gets; may be repeated")
]
HOW_COLOURS = {"warm": "green", "restarted": "yellow", "cold": "blue"}


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(chat)


def chat(
    session: Annotated[str, typer.Argument(help="id of the session; empty: a new one")] = "",
    project: Annotated[str, typer.Option(envvar="HEARTH_PROJECT", help="project of the session")] = "demo",
    agent: Annotated[str, typer.Option(help="agent of the session; empty: the one it has")] = "",
    permissions: Annotated[str, typer.Option(help="allow or deny what the agent asks for; empty: as it is")] = "",
    attach: Attach = [],  # noqa: B006 - typer reads it
    credential: Credential = [],  # noqa: B006
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Talk to an agent. Ctrl-C while it works stops it; an empty line or Ctrl-D leaves.

    With --json a line of stdin is a message, and every item of its execution is a line of stdout, as received.
    """
    name = session or f"chat-{uuid.uuid4().hex[:8]}"
    spec = spec_of(agent, permissions, bindings(credential))
    run(_chat(session_key(project, name), spec, attach, root, json=json))


async def _chat(
    key: session_pb2.SessionKey,
    spec: control_pb2.SessionSpec | None,
    files: Sequence[Path],
    root: Root,
    *,
    json: bool,
) -> None:
    if not json:
        out.print(f"session [bold]{escape(key.session)}[/bold] of project {escape(key.project)}; an empty line leaves")
    async with Client(addresses(root), token=token()) as client:
        cursor = (await client.head(key)).head
        while True:
            if not json:
                out.print("[bold cyan]you[/bold cyan]   ", end="")
            line = (await asyncio.to_thread(sys.stdin.readline)).strip()
            if not line:
                return
            content = [*text_content(line), *await attached(client, key, files)]
            answer = await client.send(key, content, spec=spec)
            spec, files = None, ()
            execution_id = answer.started.execution.execution_id
            if json:
                print_json(as_dict(answer))
            if not execution_id:
                if not json:
                    out.print("[yellow]it waits behind what runs in this session[/yellow]")
                continue
            with _stopped_by_interrupt(client, key, execution_id):
                await follow_turn(client, key, execution_id, after=cursor, json=json)
            cursor = (await client.head(key)).head


async def attached(client: Client, key: session_pb2.SessionKey, files: Sequence[Path]) -> list[content_pb2.ContentPart]:
    """Files of this machine as parts of a message."""
    parts = []
    for file in files:
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        data = await asyncio.to_thread(file.read_bytes)
        parts.append(
            content_pb2.ContentPart(attachment=await client.attach(key, data, name=file.name, media_type=kind))
        )
    return parts


@contextlib.contextmanager
def _stopped_by_interrupt(client: Client, key: session_pb2.SessionKey, execution_id: str) -> Iterator[None]:
    """Inside, Ctrl-C asks the agent to stop instead of ending the program."""
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[control_pb2.Command]] = []

    def stop() -> None:
        if not stops:
            err.print("\n[yellow]stopping ...[/yellow]")
            stops.append(asyncio.create_task(client.stop(key, execution_id=execution_id)))

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def follow_turn(
    client: Client,
    key: session_pb2.SessionKey,
    execution_id: str,
    *,
    after: session_pb2.Cursor | None,
    quiet: bool = False,
    json: bool = False,
) -> str:
    """Show one execution until it ends, `json`: each item as received; gives its outcome, as `completed`."""
    view = Transcript()
    printer = _Printer(quiet or json)
    async for item in client.watch(key, after=after):
        if json:
            print_json(as_dict(item))
        changed = view.apply(item)
        if changed is not None:
            printer.show(changed)
        event = item.event.event
        if is_ending(event.type) and event.execution_id == execution_id:
            printer.end(event)
            return event.type.removeprefix("execution.")
    raise AssertionError("a watch ends only when it is left")


class _Printer:
    """Prints what is new of each entry, so that text appears as it streams and only once."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._printed: dict[str, int] = {}
        self._current = ""

    def show(self, entry: Entry) -> None:
        if self._quiet or entry.kind == "user":
            return
        if entry.kind == "tool":
            # At once when it begins; again only when it did not do what it should.
            begun = entry.entity_id in self._printed
            if begun and not (entry.final and entry.status != "succeeded"):
                return
            self._printed[entry.entity_id] = 0
            self._begin(entry.entity_id, "")
            self._current = ""
            shown = f" [red]{escape(entry.status)}[/red]" if entry.final and entry.status != "succeeded" else ""
            out.print(f"[magenta]tool[/magenta]  {escape(entry.title)}{shown}")
            return
        done = self._printed.get(entry.entity_id, 0)
        fresh = entry.text[done:]
        if not fresh or entry.broken:
            return
        label = "[bold green]agent[/bold green] " if entry.kind == "agent" else "[dim]think[/dim] "
        self._begin(entry.entity_id, label)
        style = "dim" if entry.kind == "thought" else ""
        out.print(escape(fresh), end="", style=style, soft_wrap=True)
        self._printed[entry.entity_id] = len(entry.text)

    def end(self, event: event_pb2.Event) -> None:
        if self._quiet:
            return
        self._begin("", "")
        summary = ending_summary(event)
        assert summary is not None
        how = summary.how or "never reached the agent"
        outcome = event.type.removeprefix("execution.")
        timings = ", ".join(
            f"{stage.stage}{f' ({stage.how})' if stage.how else ''} {stage.duration_us / 1000:.0f} ms"
            for stage in summary.stages
        )
        failed = f" [red]{event.execution_failed.code}: {escape(event.execution_failed.message)}[/red]"
        out.print(
            f"[dim]{outcome}[/dim], [{HOW_COLOURS.get(how, 'red')}]{how}[/] [dim]{timings}[/dim]"
            f"{failed if event.HasField('execution_failed') else ''}",
            soft_wrap=True,
        )

    def _begin(self, entity_id: str, label: str) -> None:
        if self._current == entity_id:
            return
        if self._current:
            out.print()
        self._current = entity_id
        if label:
            out.print(label, end="")
