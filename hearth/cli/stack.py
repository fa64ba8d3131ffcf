"""`hearth up`, `down` and `status`: the stack on this machine."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hearth.cli.output import Exit, fail, out, print_json, run, say
from hearth.embedded.records import StackRecord
from hearth.embedded.stack import DEFAULT_PORTS, Component, Stack, StackError, StackOptions

Root = Annotated[Path, typer.Option(envvar="HEARTH_ROOT", help="directory of the stack")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of text")]
DEFAULT_ROOT = Path(".hearth")
AGENT_NAME = "custom"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def _port(service: str) -> Any:
    return typer.Option(envvar=f"HEARTH_UP_{service.upper()}_PORT", help="0 takes a free port")


def up(
    root: Root = DEFAULT_ROOT,
    pool_port: Annotated[int, _port("pool")] = DEFAULT_PORTS["pool"],
    history_port: Annotated[int, _port("history")] = DEFAULT_PORTS["history"],
    relay_port: Annotated[int, _port("relay")] = DEFAULT_PORTS["relay"],
    sandbox_port: Annotated[int, _port("sandbox")] = DEFAULT_PORTS["sandbox"],
    pools: Annotated[int, typer.Option(min=1, help="replicas of the pool; those after the first take free ports")] = 1,
    agent: Annotated[str, typer.Option(help=f"command of an ACP agent, known as `{AGENT_NAME}` from then on")] = "",
    json: Json = False,
) -> None:
    """Start Postgres, Valkey and the four services, and wait until they serve.

    HEARTH_POSTGRES_DSN and HEARTH_VALKEY_URL make it use those servers instead of its own.
    """
    options = StackOptions(
        root=root,
        ports={"pool": pool_port, "history": history_port, "relay": relay_port, "sandbox": sandbox_port},
        postgres_dsn=os.environ.get("HEARTH_POSTGRES_DSN", ""),
        valkey_url=os.environ.get("HEARTH_VALKEY_URL", ""),
        agents={AGENT_NAME: shlex.split(agent)} if agent else {},
        pools=pools,
    )
    stack = Stack(options)
    try:
        started = run(stack.up(say))
    except StackError as error:
        fail(str(error))
    components = run(stack.status())
    if json:
        print_json({"started": started, "components": [dataclasses.asdict(part) for part in components]})
        return
    out.print("[green]Hearth runs.[/green]" if started else "Hearth [green]runs already[/green].")
    _print_components(components)
    _print_first_steps(stack.record() or StackRecord())


def down(root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Stop the stack and everything that it started. The data stays."""
    try:
        stopped = run(Stack(StackOptions(root=root)).down(say))
    except StackError as error:
        fail(str(error))
    if json:
        print_json({"stopped": stopped})
    else:
        out.print("Hearth is stopped." if stopped else "Nothing was running.")


def status(root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Show what runs. Exit code 0 when all four services serve, else 3."""
    components = run(Stack(StackOptions(root=root)).status())
    if json:
        print_json({"components": [dataclasses.asdict(part) for part in components]})
    else:
        _print_components(components)
    if any(part.state in ("stopped", "not serving") for part in components):
        raise typer.Exit(Exit.UNREACHABLE)


def _print_components(components: list[Component]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("part", "state", "address", "pid", "metrics"):
        table.add_column(column)
    for part in components:
        colour = {"stopped": "red", "not serving": "yellow"}.get(part.state, "green")
        table.add_row(part.name, f"[{colour}]{part.state}[/{colour}]", part.address, str(part.pid or ""), part.metrics)
    out.print(table)


def _print_first_steps(record: StackRecord) -> None:
    pool, relay = record.address("pool"), record.address("relay")
    session = '"session": {"project": "demo", "session": "first"}'
    send = f'{{{session}, "request_id": "r1", "content": [{{"text": {{"text": "hello"}}}}]}}'
    out.print("\nTry it with grpcurl:")
    for line in (
        f"grpcurl -plaintext {pool} list",
        f"grpcurl -plaintext -d '{send}' {pool} hearth.session.v1.SessionService/SendInput",
        f"grpcurl -plaintext -d '{{{session}}}' {relay} hearth.relay.v1.RelayService/Subscribe",
    ):
        out.print(f"  {line}", soft_wrap=True, markup=False)
    out.print("or talk to the agent: [bold]hearth chat[/bold]")
