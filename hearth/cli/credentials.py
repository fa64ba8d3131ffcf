"""`hearth credentials`: what agents are given without anybody seeing it: stored sealed, listed by name only."""

from __future__ import annotations

import base64
import os
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli.output import as_dict, fail, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.paging import CALL_SECONDS, pages
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2 as calls

KEY_BYTES = 32
PAGE = 500

Project = Annotated[str, typer.Option(envvar="HEARTH_PROJECT", help="project whose agents may be given it")]
Name = Annotated[str, typer.Argument(help="name of the credential")]
DEFAULT_PROJECT = "demo"

group = typer.Typer(help=__doc__, no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(group, name="credentials")


@group.command()
def put(
    name: Name,
    file: Annotated[Path | None, typer.Option(help="file with the value; without it stdin is read")] = None,
    expires_in: Annotated[float, typer.Option(help="hours until it ends; 0: never")] = 0.0,
    project: Project = DEFAULT_PROJECT,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Store a value, or replace it. One line break at its end does not count. It is never taken from the command line,
    which others on this machine can read."""
    if file is None and sys.stdin.isatty():
        text = typer.prompt("value", hide_input=True)
    else:
        text = file.read_text() if file is not None else sys.stdin.read()
    request = calls.PutCredentialRequest(
        project=project, request_id=str(uuid.uuid4()), name=name, value=text.removesuffix("\n").removesuffix("\r")
    )
    if expires_in:
        request.expires_at.FromDatetime(datetime.now(UTC) + timedelta(hours=expires_in))

    async def work() -> control_pb2.Credential:
        async with connected(root) as client:
            return (await client.sessions.PutCredential(request, timeout=CALL_SECONDS)).credential

    stored = run(work())
    if json:
        print_json(as_dict(stored))
    else:
        out.print(_line(stored))


@group.command("list")
def list_(project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """List the credentials of a project."""

    async def work() -> list[control_pb2.Credential]:
        request = calls.ListCredentialsRequest(project=project, page_size=PAGE)
        async with connected(root) as client:
            return [
                found async for page in pages(client.sessions.ListCredentials, request) for found in page.credentials
            ]

    found = run(work())
    if json:
        print_json({"credentials": [as_dict(one) for one in found]})
        return
    for one in found:
        out.print(_line(one))
    if not found:
        out.print("no credentials")


@group.command()
def delete(name: Name, project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Forget a credential. Sessions whose spec names it are refused until it is stored again."""
    request = calls.DeleteCredentialRequest(project=project, request_id=str(uuid.uuid4()), name=name)

    async def work() -> None:
        async with connected(root) as client:
            await client.sessions.DeleteCredential(request, timeout=CALL_SECONDS)

    run(work())
    if json:
        print_json({"deleted": name})
    else:
        out.print(f"{escape(name)} is forgotten")


@group.command()
def key() -> None:
    """Print a new key for HEARTH_SECRET_KEY of the pool. To change the key put the new one in front of the old one,
    separated by a comma, and drop the old one after the next start."""
    sys.stdout.write(new_key() + "\n")


def new_key() -> str:
    """A key that nobody has."""
    return base64.urlsafe_b64encode(os.urandom(KEY_BYTES)).decode()


def bindings(pairs: list[str]) -> list[control_pb2.CredentialBinding]:
    """Credentials of a spec from `NAME=VARIABLE` options."""
    found = []
    for pair in pairs:
        name, separator, target = pair.partition("=")
        if not (name and separator and target):
            fail(f"{pair!r} is not NAME=VARIABLE")
        found.append(control_pb2.CredentialBinding(credential=name, target=target))
    return found


def _line(credential: control_pb2.Credential) -> str:
    ends = ""
    if credential.HasField("expires_at"):
        ends = f", ends {credential.expires_at.ToDatetime(tzinfo=UTC):%Y-%m-%d %H:%M} UTC"
    return f"[bold]{escape(credential.name)}[/bold] generation {credential.generation}{ends}"
