"""`hearth stop`, `kill`, `gates`, `answer` and `sessions`: what runs, what waits for a person, and how to end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli import words
from hearth.cli.lines import answer_json
from hearth.cli.output import Exit, as_dict, fail, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.sessions import DEFAULT_PROJECT, Project, Session
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.client import Client, decided, session_key, told
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2
from hearth.types.v1 import event_pb2, session_pb2

LOOK_SECONDS = 0.1
# Outcomes of a Stop after which nobody can say what the agent did last.
BAD_OUTCOMES = (control_pb2.COMMAND_OUTCOME_FAILED, control_pb2.COMMAND_OUTCOME_LOST)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (stop, kill, gates, answer, sessions):
        app.command()(command)


def stop(
    session: Session,
    project: Project = DEFAULT_PROJECT,
    execution: Annotated[str, typer.Option(help="the execution that is meant; empty: the one that runs now")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="until it is known what came of it")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Ask the agent to stop. The session stays usable, what waits in its queue waits on. With --wait the exit code is 1
    when the Stop was lost with the process that had it."""

    async def work() -> control_pb2.Command:
        key = session_key(project, session)
        async with connected(root) as client:
            meant = execution or (await client.get_session(key)).execution.execution_id
            epoch = 0 if meant else (await client.get_session(key)).epoch
            command = await client.stop(key, execution_id=meant, seen_epoch=epoch)
            while wait and not command.outcome:
                await asyncio.sleep(LOOK_SECONDS)
                command = await client.get_command(key, command.command_id)
            return command

    command = run(work())
    if json:
        print_json(as_dict(command))
    else:
        state = words.word(control_pb2.CommandState.Name, command.state, "COMMAND_STATE_")
        outcome = words.word(control_pb2.CommandOutcome.Name, command.outcome, "COMMAND_OUTCOME_")
        out.print(
            f"stop of {command.execution_id or 'nothing'}: {state}{f', {outcome}' if outcome else ''}",
            soft_wrap=True,
        )
    if wait and command.outcome in BAD_OUTCOMES:
        raise typer.Exit(Exit.FAILED)


def kill(session: Session, project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """End whatever runs, close what is asked, empty the queue, delete the sandbox. The log stays, and the session may
    be used again; its next turn is a cold one."""

    async def work() -> control_pb2.Session:
        async with connected(root) as client:
            return await client.kill(session_key(project, session))

    found = run(work())
    if json:
        print_json(as_dict(found))
    else:
        out.print(f"[green]killed[/green] {escape(words.session(found.session))}, epoch {found.epoch}")


def gates(
    session: Annotated[str, typer.Argument(help="id of a session; empty: all of the project")] = "",
    project: Project = DEFAULT_PROJECT,
    everything: Annotated[bool, typer.Option("--all", help="also those that were answered or closed")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """List what agents ask: permissions, questions, and tools whose result you give."""

    async def work() -> list[tuple[session_pb2.SessionKey, control_pb2.Interaction]]:
        async with connected(root) as client:
            keys = [session_key(project, session)] if session else [key async for key in _asking(client, project)]
            return [
                (key, found) for key in keys async for found in client.interactions(key, pending_only=not everything)
            ]

    asked = run(work())
    if json:
        listed = [{"session": as_dict(key), **as_dict(found)} for key, found in asked]
        print_json({"interactions": listed})
        return
    if not asked:
        out.print("nobody is asked anything")
        return
    now = datetime.now(UTC)
    columns = ("interaction", "session", "asks for", "tool", "with", "state", "by", "since", "closes in")
    rows = (_gate(key, found, now) for key, found in asked)
    out.print(words.table(columns, rows, whole=("interaction", "state", "since", "closes in")))


def answer(
    session: Session,
    interaction: Annotated[
        list[str], typer.Argument(help="ids, or how they begin; none: the one that is open, of several none")
    ] = [],  # noqa: B006 - typer reads it
    project: Project = DEFAULT_PROJECT,
    allow: Annotated[bool, typer.Option("--allow", help="it may run, once, with these arguments")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="it must not run")] = False,
    text: Annotated[str, typer.Option(help="answer to a question, or the result of your tool; JSON or words")] = "",
    everything: Annotated[bool, typer.Option("--all", help="all that are open, in one call")] = False,
    by: Annotated[str, typer.Option(help="who answers, for the log; empty: the name of the token")] = "",
    request_id: Annotated[str, typer.Option(help="key of idempotency; empty: a new one")] = "",
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Answer what an agent asks: one, several, or all at once. All of the answers are taken, or none."""
    if [allow, deny, bool(text)].count(True) != 1:
        raise typer.BadParameter("give one of --allow, --deny and --text")
    if everything and interaction:
        raise typer.BadParameter("goes without ids", param_hint="--all")

    async def work() -> session_service_pb2.AnswerInteractionsResponse:
        key = session_key(project, session)
        async with connected(root) as client:
            asked = {found.interaction_id: found.request async for found in client.interactions(key)}
            chosen = list(asked) if everything else chosen_of(interaction, list(asked))
            if not chosen:
                fail("nobody is asked anything", Exit.REFUSED)
            answers = [
                told(one, answer_json(text, asked.get(one, event_pb2.InteractionRequested())))
                if text
                else decided(one, allowed=allow)
                for one in chosen
            ]
            return await client.answer(key, answers, answered_by=by, request_id=request_id)

    answered = run(work())
    if json:
        print_json(as_dict(answered))
        return
    for found in answered.interactions:
        decision = words.word(event_pb2.Decision.Name, found.decision, "DECISION_") or "answered"
        about = escape(found.request.tool_name or found.request.prompt)
        out.print(f"[green]{decision}[/green] {about}", soft_wrap=True)
    if answered.still_open:
        out.print(f"{answered.still_open} more to be answered")
    elif answered.HasField("execution"):
        out.print(f"execution {answered.execution.execution_id} goes on", soft_wrap=True)


def sessions(
    session: Annotated[str, typer.Argument(help="id of a session; empty: all of the project")] = "",
    project: Project = DEFAULT_PROJECT,
    most: Annotated[int, typer.Option(min=1, help="how many, those that changed last")] = 100,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """List sessions, or show one: what runs, what waits, who holds it."""

    async def work() -> list[control_pb2.Session]:
        async with connected(root) as client:
            if session:
                return [await client.get_session(session_key(project, session))]
            found: list[control_pb2.Session] = []
            async for one in client.sessions_of(project):
                if len(found) == most:
                    break
                found.append(one)
            return found

    found = run(work())
    if json:
        print_json(as_dict(found[0]) if session else {"sessions": [as_dict(one) for one in found]})
    elif session:
        out.print(words.table(("", ""), _session(found[0])))
    elif not found:
        out.print("no sessions")
    else:
        now = datetime.now(UTC)
        columns = ("session", "state", "waiting", "asked", "epoch", "changed", "holder")
        rows = (_line(one, now) for one in found)
        out.print(words.table(columns, rows, whole=("state", "waiting", "epoch", "changed")))


def chosen_of(wanted: Sequence[str], open_ones: Sequence[str]) -> list[str]:
    """The ids that are meant: each as it is, or the one open id that begins so; without any, the one that is open.

    Raises `typer.BadParameter` where that is none or more than one. An id that is not open is left to the service,
    which says what became of it.
    """
    if not wanted:
        if len(open_ones) > 1:
            raise typer.BadParameter(f"{len(open_ones)} are open, name one or give --all: {', '.join(open_ones)}")
        return list(open_ones)
    return [words.begun_by(one, open_ones) for one in wanted]


async def _asking(client: Client, project: str) -> AsyncIterator[session_pb2.SessionKey]:
    async for found in client.sessions_of(project):
        if found.open_interactions:
            yield found.session


def _gate(key: session_pb2.SessionKey, found: control_pb2.Interaction, now: datetime) -> tuple[str, ...]:
    request = found.request
    is_open = found.state == control_pb2.INTERACTION_STATE_PENDING
    expires = request.expires_at.ToDatetime(UTC) if request.HasField("expires_at") and is_open else None
    return (
        found.interaction_id,
        words.session(key),
        words.word(event_pb2.InteractionKind.Name, request.kind, "INTERACTION_KIND_"),
        request.tool_name or request.prompt,
        request.input_json,
        words.gate(found),
        found.answered_by,
        words.since(found.created_at.ToDatetime(UTC), now),
        words.span(max(0.0, (expires - now).total_seconds())) if expires is not None else "",
    )


def _line(found: control_pb2.Session, now: datetime) -> tuple[str, ...]:
    waiting = f"{found.queued_inputs}{' paused' if found.queue_paused else ''}" if found.queued_inputs else ""
    return (
        words.session(found.session),
        words.execution(found.execution),
        waiting,
        str(found.open_interactions or ""),
        str(found.epoch),
        words.since(found.updated_at.ToDatetime(UTC), now),
        found.holder,
    )


def _session(found: control_pb2.Session) -> list[tuple[str, str]]:
    execution = found.execution
    rows = [
        ("session", words.session(found.session)),
        ("epoch", str(found.epoch)),
        ("held by", found.holder or "nobody"),
        ("execution", execution.execution_id or "none yet"),
        ("state", words.execution(execution)),
        ("waiting", f"{found.queued_inputs}{', paused' if found.queue_paused else ''}"),
        ("asked", str(found.open_interactions)),
        ("log", f"told up to sequence {found.history_sequence}"),
        ("agent", found.spec.agent or "the default"),
        ("made", found.created_at.ToDatetime(UTC).isoformat(timespec="seconds")),
    ]
    if execution.source_execution_id:
        rows.insert(5, ("goes on from", execution.source_execution_id))
    return rows
