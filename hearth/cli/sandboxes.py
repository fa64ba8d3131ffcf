"""`hearth sandboxes`: what runs or lies parked at the providers, what it costs, and how to get rid of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli import words
from hearth.cli.output import Exit, as_dict, err, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.client import Client
from hearth.paging import CALL_SECONDS, pages
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

SandboxId = Annotated[str, typer.Argument(help="id of the sandbox, as `hearth sandboxes list` shows it")]
Project = Annotated[str, typer.Option(envvar="HEARTH_PROJECT", help="only of this project; empty: of all")]
# A delete at a provider that is slow, or down for a moment, takes its time.
DELETE_SECONDS = 120.0
PAGE = 500

group = typer.Typer(help=__doc__, no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(group, name="sandboxes")


@group.command("list")
def list_(
    project: Project = "",
    session: Annotated[str, typer.Option(help="only of this session of the project")] = "",
    tenure: Annotated[str, typer.Option(help="only active, parked, free or orphan ones")] = "",
    gone: Annotated[bool, typer.Option("--gone", help="also those that are gone")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """List sandboxes, oldest first."""
    if tenure not in words.TENURES:
        known = ", ".join(name for name in words.TENURES if name)
        raise typer.BadParameter(f"{tenure!r} is none of {known}", param_hint="--tenure")
    if session and not project:
        raise typer.BadParameter("a session is named together with its --project", param_hint="--session")
    request = sandbox_service_pb2.ListSandboxesRequest(
        project=project, session=session, tenure=words.TENURES[tenure], include_gone=gone, page_size=PAGE
    )

    async def work() -> list[sandbox_pb2.Sandbox]:
        async with connected(root) as client:
            return [found async for found in sandboxes(client, request)]

    found = run(work())
    if json:
        print_json({"sandboxes": [as_dict(sandbox) for sandbox in found]})
        return
    if not found:
        out.print("no sandboxes")
        return
    now = datetime.now(UTC)
    columns = ("sandbox", "session", "provider", "agent", "tenure", "state", "since", "age", "trouble")
    rows = (_row(sandbox, now) for sandbox in found)
    out.print(words.table(columns, rows, whole=("sandbox", "provider", "tenure", "state", "since", "age")))


@group.command()
def show(sandbox: SandboxId, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Show everything that is known of one sandbox."""

    async def work() -> sandbox_pb2.Sandbox:
        async with connected(root) as client:
            answer = await client.sandboxes.GetSandbox(
                sandbox_service_pb2.GetSandboxRequest(sandbox_id=sandbox), timeout=CALL_SECONDS
            )
            return answer.sandbox

    found = run(work())
    if json:
        print_json(as_dict(found))
        return
    out.print(words.table(("", ""), _facts(found, datetime.now(UTC)), whole=("",)))


@group.command()
def delete(sandbox: SandboxId, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Delete one sandbox, whatever it is used for; a turn in it fails. The workspace of its session stays.

    Exit code 1 when it could not be shown gone; the service goes on trying.
    """

    async def work() -> sandbox_service_pb2.DeleteSandboxResponse:
        async with connected(root) as client:
            return await client.sandboxes.DeleteSandbox(
                sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox), timeout=DELETE_SECONDS
            )

    answer = run(work())
    orphaned = answer.disposition == sandbox_pb2.DISPOSITION_ORPHANED
    if json:
        print_json(as_dict(answer))
    elif orphaned:
        err.print("[red]it could not be shown gone[/red]; it counts as running until the service has seen it gone")
    else:
        done = answer.disposition == sandbox_pb2.DISPOSITION_DELETED
        out.print("[green]deleted[/green]" if done else "there was nothing left to delete")
    if orphaned:
        raise typer.Exit(Exit.FAILED)


@group.command()
def reap(
    yes: Annotated[bool, typer.Option("--yes", help="delete unknown instances however many there are")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Compare all rows with what the providers list, now, and mend the difference.

    Instances that no row knows are deleted. When there are suspiciously many of them something is wrong with the
    database or the deployment's label, so none is touched and the exit code is 1: look at them, then give --yes.
    """

    async def work() -> sandbox_service_pb2.ReconcileResponse:
        async with connected(root) as client:
            return await client.sandboxes.Reconcile(
                sandbox_service_pb2.ReconcileRequest(confirm_unknown=yes), timeout=DELETE_SECONDS
            )

    report = run(work())
    if json:
        print_json(as_dict(report))
    else:
        out.print(
            f"{report.checked} checked, {report.mended} mended, {report.lapsed} that nobody renewed,"
            f" {report.unknown} unknown"
        )
        for name in report.unknown_names:
            out.print(f"  {escape(name)}", soft_wrap=True)
        for provider in report.unanswered:
            err.print(f"[red]{escape(provider)} did not answer[/red]; nothing was compared with it")
        if report.refused_unknown:
            err.print(
                "[red]too many instances are unknown, none was touched[/red]; look at them, then"
                " [bold]hearth sandboxes reap --yes[/bold]"
            )
    if report.refused_unknown or report.unanswered:
        raise typer.Exit(Exit.FAILED)


@group.command()
def usage(project: Project = "", root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Show time and money per provider and tier, what an hour costs now and at worst, warm slots and orphans."""

    async def work() -> sandbox_service_pb2.GetUsageResponse:
        async with connected(root) as client:
            return await client.sandboxes.GetUsage(
                sandbox_service_pb2.GetUsageRequest(project=project), timeout=CALL_SECONDS
            )

    use = run(work())
    if json:
        print_json(as_dict(use))
        return
    rows = (
        (
            tier.provider,
            tier.tier,
            str(tier.count),
            words.span(tier.total.ToSeconds()),
            words.dollars(tier.cost_micro_usd),
            words.dollars(tier.micro_usd_per_hour),
        )
        for tier in use.tiers
    )
    out.print(words.table(("provider", "tier", "now", "time so far", "cost so far", "an hour now"), rows))
    for slot in use.slots:
        worst = words.dollars(slot.worst_micro_usd_per_hour)
        out.print(f"{escape(slot.provider)}: {slot.used} of {slot.cap} warm slots taken; all of them: {worst} an hour")
    out.print(f"orphans: {use.orphans}" if not use.orphans else f"[red]orphans: {use.orphans}[/red]")
    for warning in use.warnings:
        err.print(f"[yellow]{escape(warning)}[/yellow]", soft_wrap=True)


async def sandboxes(
    client: Client, request: sandbox_service_pb2.ListSandboxesRequest
) -> AsyncIterator[sandbox_pb2.Sandbox]:
    """All that a request asks for, page by page."""
    async for page in pages(client.sandboxes.ListSandboxes, request):
        for sandbox in page.sandboxes:
            yield sandbox


def _row(sandbox: sandbox_pb2.Sandbox, now: datetime) -> tuple[str, ...]:
    return (
        sandbox.sandbox_id,
        words.session(sandbox.session),
        sandbox.provider,
        sandbox.agent,
        words.tenure(sandbox.tenure),
        words.state(sandbox.observed),
        words.since(sandbox.changed_at.ToDatetime(UTC), now),
        words.since(sandbox.created_at.ToDatetime(UTC), now),
        sandbox.last_error,
    )


def _facts(sandbox: sandbox_pb2.Sandbox, now: datetime) -> list[tuple[str, str]]:
    claim = f"epoch {sandbox.claim.epoch}, attempt {sandbox.claim.attempt}" if sandbox.HasField("claim") else ""
    created, changed = sandbox.created_at.ToDatetime(UTC), sandbox.changed_at.ToDatetime(UTC)
    facts = [
        ("sandbox", sandbox.sandbox_id),
        ("session", words.session(sandbox.session)),
        ("provider", sandbox.provider),
        ("id there", sandbox.provider_id),
        ("agent", sandbox.agent),
        ("tenure", words.tenure(sandbox.tenure)),
        ("state", words.state(sandbox.observed)),
        ("wanted", words.state(sandbox.desired)),
        ("holder", sandbox.holder),
        ("claim", claim),
        ("fingerprint", sandbox.fingerprint),
        ("created", f"{created:%Y-%m-%d %H:%M:%S} UTC, {words.since(created, now)} ago"),
        ("changed", f"{changed:%Y-%m-%d %H:%M:%S} UTC, {words.since(changed, now)} ago"),
        ("trouble", sandbox.last_error),
    ]
    return [(name, value) for name, value in facts if value]
