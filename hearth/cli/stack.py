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
from hearth.embedded.records import StackRecord, TlsFiles
from hearth.embedded.stack import DEFAULT_PORTS, Component, Stack, StackError, StackOptions
from hearth.secret import Secret
from hearth.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE

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
    tls: Annotated[
        bool, typer.Option("--tls", help="the services speak TLS, with certificates of an authority of the stack")
    ] = False,
    mtls: Annotated[
        bool, typer.Option("--mtls", help="the same, and callers must show a certificate of that authority")
    ] = False,
    json: Json = False,
) -> None:
    """Start Postgres, Valkey and the four services, and wait until they serve.

    HEARTH_POSTGRES_DSN and HEARTH_VALKEY_URL make it use those servers instead of its own,
    HEARTH_TLS_CERTIFICATE_FILE, HEARTH_TLS_KEY_FILE and HEARTH_TLS_CA_FILE certificates that are there.
    """
    options = StackOptions(
        root=root,
        ports={"pool": pool_port, "history": history_port, "relay": relay_port, "sandbox": sandbox_port},
        postgres_dsn=Secret(os.environ.get("HEARTH_POSTGRES_DSN", "")),
        valkey_url=Secret(os.environ.get("HEARTH_VALKEY_URL", "")),
        agents={AGENT_NAME: shlex.split(agent)} if agent else {},
        pools=pools,
        tls="mutual" if mtls else "own" if tls else _tls_given(),
    )
    stack = Stack(options)
    try:
        started = run(stack.up(say))
        components = run(stack.status())
    except StackError as error:
        fail(str(error))
    record = stack.record() or StackRecord()
    if json:
        parts = [dataclasses.asdict(part) for part in components]
        files = dataclasses.asdict(record.tls) if record.tls is not None else None
        print_json({"started": started, "components": parts, "tls": files})
        return
    out.print("[green]Hearth runs.[/green]" if started else "Hearth [green]runs already[/green].")
    _print_components(components)
    _print_first_steps(record)


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
    try:
        components = run(Stack(StackOptions(root=root)).status())
    except StackError as error:
        fail(str(error))
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
    how = _grpcurl_options(record.tls)
    out.print("\nTry it with grpcurl:")
    for line in (
        f"grpcurl {how} {pool} list",
        f"grpcurl {how} -d '{send}' {pool} hearth.session.v1.SessionService/SendInput",
        f"grpcurl {how} -d '{{{session}}}' {relay} hearth.relay.v1.RelayService/Subscribe",
    ):
        out.print(f"  {line}", soft_wrap=True, markup=False)
    if record.tls is not None:
        out.print("and with programs of yours:")
        for name, value in record.tls.caller_environment().items():
            out.print(f"  export {name}={shlex.quote(value)}", soft_wrap=True, markup=False)
    out.print("or talk to the agent: [bold]hearth chat[/bold]")


def _grpcurl_options(tls: TlsFiles | None) -> str:
    if tls is None:
        return "-plaintext"
    options = ["-cacert", tls.ca]
    if tls.client_ca:
        options += ["-cert", tls.certificate, "-key", tls.key]
    if tls.server_name:
        options += ["-servername", tls.server_name]
    return shlex.join(options)


def _tls_given() -> TlsFiles | None:
    found = TlsFiles.of_environment(os.environ)
    if found is not None and not (found.ca and found.key):
        fail(f"{CERTIFICATE_FILE} needs {KEY_FILE} and {CA_FILE}, for what calls the services", Exit.USAGE)
    return found
