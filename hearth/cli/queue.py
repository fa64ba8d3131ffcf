"""`hearth queue`: the inputs of a session that wait until the agent has done what came before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli import words
from hearth.cli.output import as_dict, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.sessions import DEFAULT_PROJECT, Project, Session
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.client import Client, session_key
from hearth.reducer import text_of
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2
from hearth.types.v1 import session_pb2

SHOWN_CHARACTERS = 60

group = typer.Typer(help=__doc__, no_args_is_help=True)
InputId = Annotated[str, typer.Argument(metavar="INPUT", help="id of the input, or how it begins")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(group, name="queue")


@group.command(name="list")
def list_(session: Session, project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """List what waits, in the order in which it will run, and what begins just now."""

    async def work() -> tuple[control_pb2.Session, list[control_pb2.Input]]:
        key = session_key(project, session)
        async with connected(root) as client:
            return await client.get_session(key), [found async for found in client.inputs(key)]

    shown, found = run(work())
    if json:
        print_json({"paused": shown.queue_paused, "inputs": [as_dict(one) for one in found]})
        return
    if not found:
        out.print("nothing waits")
        return
    at = datetime.now(UTC)
    out.print(
        words.table(
            ("place", "input", "since", "steer", "text"), (_row(one, at) for one in found), whole=("place", "input")
        )
    )
    if shown.queue_paused:
        out.print("[yellow]paused[/yellow] until `hearth queue resume` or the next message")


@group.command()
def remove(
    session: Session,
    input_id: InputId,
    project: Project = DEFAULT_PROJECT,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Take an input out of the queue."""

    async def work() -> control_pb2.Input:
        key = session_key(project, session)
        async with connected(root) as client:
            return await client.remove_input(key, await _meant(client, key, input_id))

    found = run(work())
    if json:
        print_json(as_dict(found))
    else:
        out.print(f"[green]removed[/green] {escape(_text(found))}", soft_wrap=True)


@group.command()
def edit(
    session: Session,
    input_id: InputId,
    text: Annotated[str, typer.Argument(help="what it says from now on")],
    project: Project = DEFAULT_PROJECT,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Replace what a waiting input says; its place stays, attachments of it go."""

    async def work() -> control_pb2.Input:
        key = session_key(project, session)
        async with connected(root) as client:
            return await client.update_input(key, await _meant(client, key, input_id), text)

    found = run(work())
    if json:
        print_json(as_dict(found))
    else:
        out.print(f"[green]changed[/green] place {found.rank}: {escape(_text(found))}", soft_wrap=True)


@group.command()
def now(
    session: Session,
    input_id: InputId,
    project: Project = DEFAULT_PROJECT,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Run a waiting input before all others; what runs is stopped for it."""

    async def work() -> session_service_pb2.SendInputNowResponse:
        key = session_key(project, session)
        async with connected(root) as client:
            return await client.send_now(key, await _meant(client, key, input_id))

    answer = run(work())
    if json:
        print_json(as_dict(answer))
    elif answer.HasField("started"):
        out.print(f"[green]started[/green] execution {answer.started.execution.execution_id}")
    elif answer.HasField("steered"):
        out.print(f"[yellow]next[/yellow], once {answer.steered.command.execution_id} has stopped")
    else:
        out.print(f"[yellow]{answer.WhichOneof('result')}[/yellow] since")


@group.command()
def resume(session: Session, project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Let a queue go on that a Stop or a failed turn has paused."""

    async def work() -> session_service_pb2.ResumeQueueResponse:
        async with connected(root) as client:
            return await client.resume_queue(session_key(project, session))

    answer = run(work())
    if json:
        print_json(as_dict(answer))
    elif answer.HasField("started"):
        out.print(f"[green]started[/green] execution {answer.started.execution.execution_id}")
    else:
        out.print("nothing had to be started")


async def _meant(client: Client, key: session_pb2.SessionKey, input_id: str) -> str:
    """The whole id of what is meant."""
    if words.is_whole(input_id):
        return input_id
    return words.begun_by(input_id, [found.input_id async for found in client.inputs(key)])


def _row(found: control_pb2.Input, at: datetime) -> Sequence[str]:
    return (
        str(found.rank) if found.rank else "begins",
        found.input_id,
        words.since(found.created_at.ToDatetime(UTC), at),
        "yes" if found.steer else "",
        _text(found),
    )


def _text(found: control_pb2.Input) -> str:
    text = text_of(found.content).replace("\n", " ")
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
