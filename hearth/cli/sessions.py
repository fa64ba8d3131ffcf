"""`hearth send`, `watch` and `history`: one session, one call each."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli import tracing
from hearth.cli.chat import Attach, Credential, attached
from hearth.cli.credentials import bindings
from hearth.cli.output import Exit, as_dict, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.spec import POLICY_HELP, spec_in_place, spec_of
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.cli.turns import asking, follow_turn
from hearth.client import session_key, text_content
from hearth.history.v1 import history_pb2  # noqa: F401 - registers the messages that JSON output needs
from hearth.reducer import is_ending, text_of
from hearth.relay.v1 import relay_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2, session_pb2

Session = Annotated[str, typer.Argument(help="id of the session")]
Project = Annotated[str, typer.Option(envvar="HEARTH_PROJECT", help="project of the session")]
DEFAULT_PROJECT = "demo"
ON_BUSY = {"queue": control_pb2.ON_BUSY_QUEUE, "reject": control_pb2.ON_BUSY_REJECT, "steer": control_pb2.ON_BUSY_STEER}


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (send, watch, history):
        app.command()(command)


def send(
    session: Session,
    text: Annotated[str, typer.Argument(help="the message")],
    project: Project = DEFAULT_PROJECT,
    agent: Annotated[str, typer.Option(help="agent of the session; empty: the one it has")] = "",
    permissions: Annotated[str, typer.Option(help=POLICY_HELP)] = "",
    on_busy: Annotated[str, typer.Option(help="queue, reject or steer, when the agent works already")] = "queue",
    attach: Attach = [],  # noqa: B006 - typer reads it
    credential: Credential = [],  # noqa: B006
    request_id: Annotated[str, typer.Option(help="key of idempotency; empty: a new one")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="show the answer and wait until it has ended")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Give the agent a message. Exit code 1 when `--wait` saw the turn fail."""
    if on_busy not in ON_BUSY:
        raise typer.BadParameter(f"{on_busy!r} is none of {', '.join(ON_BUSY)}", param_hint="--on-busy")
    asked = spec_of(agent, permissions, bindings(credential))

    async def work() -> int:
        key = session_key(project, session)
        async with connected(root) as client:
            head = await client.head(key) if wait else None
            content = [*text_content(text), *await attached(client, key, attach, request_id)]
            with tracing.sending(root, "send"):
                answer = await client.send(
                    key,
                    content,
                    request_id=request_id or str(uuid.uuid4()),
                    spec=await spec_in_place(client, key, asked),
                    on_busy=ON_BUSY[on_busy],
                )
            if json:
                print_json(as_dict(answer))
            else:
                _print_answer(answer.WhichOneof("result") or "", as_dict(answer))
            if head is None:
                return Exit.OK
            if answer.HasField("removed"):
                return Exit.FAILED
            result = getattr(answer, answer.WhichOneof("result") or "started")
            outcome = await follow_turn(
                client,
                key,
                answer.started.execution.execution_id,
                # What is sent again may have begun long ago.
                after=session_pb2.Cursor(sequence=max(0, head.oldest - 1)) if request_id else head.head,
                input_id=result.input_id,
                over=_outcome(answer.started.execution),
                quiet=json,
            )
            return Exit.OK if outcome in ("completed", "paused") else Exit.FAILED

    raise typer.Exit(run(work()))


def _outcome(execution: control_pb2.Execution) -> str:
    """How it ended, as `completed`; empty when it has not."""
    if execution.state != control_pb2.EXECUTION_STATE_TERMINAL:
        return ""
    return control_pb2.ExecutionOutcome.Name(execution.outcome).removeprefix("EXECUTION_OUTCOME_").lower()


def watch(
    session: Session,
    project: Project = DEFAULT_PROJECT,
    after: Annotated[int, typer.Option(help="start after this sequence")] = 0,
    tail: Annotated[bool, typer.Option("--tail", help="only what comes from now on")] = False,
    events_only: Annotated[bool, typer.Option("--events-only", help="no frames")] = False,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="leave after the next ending of an execution, as seen from --after")
    ] = False,
    until: Annotated[str, typer.Option(help="leave after the ending of this execution")] = "",
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Follow a session: everything after a sequence, then live. With --json one item a line, as received."""

    async def work() -> None:
        cursor = session_pb2.Cursor(sequence=after) if after else None
        async with connected(root) as client:
            items = client.watch(session_key(project, session), after=cursor, tail=tail, events_only=events_only)
            # Of a session that is read from its beginning the endings of before are no next ones.
            live = bool(after)
            async for item in items:
                if json:
                    print_json(as_dict(item))
                else:
                    _print_item(item)
                live = live or item.HasField("ready")
                event = item.event.event
                if is_ending(event.type) and (event.execution_id == until or (until_end and live)):
                    return

    run(work())


def history(
    session: Session,
    project: Project = DEFAULT_PROJECT,
    after: Annotated[int, typer.Option(help="start after this sequence")] = 0,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Print the log of a session. With --json one event a line."""

    async def work() -> None:
        cursor = session_pb2.Cursor(sequence=after) if after else None
        async with connected(root) as client:
            async for item in client.history(session_key(project, session), after=cursor):
                if json:
                    print_json(as_dict(item))
                else:
                    _print_event(item)

    run(work())


def _print_answer(result: str, answer: dict[str, object]) -> None:
    content = answer[result]
    assert isinstance(content, dict)
    match result:
        case "started":
            out.print(f"[green]started[/green] execution {content['execution']['execution_id']}")
        case "queued":
            out.print(f"[yellow]queued[/yellow] at {content['rank']}: input {content['input_id']}")
        case _:
            out.print(f"[yellow]{result}[/yellow] input {content['input_id']}")


def _print_item(item: relay_pb2.Item) -> None:
    match item.WhichOneof("item"):
        case "event":
            _print_event(item.event)
        case "frame":
            frame = item.frame.frame
            body = frame.WhichOneof("body") or "frame"
            text = frame.text_delta.text or frame.thought_delta.text or frame.tool_output.text
            out.print(f"[dim]     ~ {frame.frame_index} {body} {escape(text)}[/dim]", soft_wrap=True)
        case "heartbeat":
            pass
        case other:
            out.print(f"[magenta]     {other}[/magenta] {escape(str(getattr(item, str(other))).replace(chr(10), ' '))}")


def _print_event(item: event_pb2.EventItem) -> None:
    event = item.event
    match event.WhichOneof("body"):
        case "message_completed":
            detail = text_of(event.message_completed.content)
        case "tool_completed":
            detail = f"{event.tool_completed.name}: {event.tool_completed.output or event.tool_completed.error}"
        case "interaction_requested":
            detail = f"{event.entity_id} {asking(event.interaction_requested)}"
        case "input_queued":
            detail = f"{event.entity_id} {text_of(event.input_queued.content)}"
        case "execution_failed":
            detail = f"{event.execution_failed.code}: {event.execution_failed.message}"
        case _:
            detail = event.entity_id
    colour = "cyan" if event.type.startswith("execution.") else "white"
    out.print(
        f"[bold]{item.cursor.sequence:>4}[/bold] [{colour}]{event.type}[/{colour}] {escape(detail)}", soft_wrap=True
    )
