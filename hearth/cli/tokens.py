"""`hearth tokens`: the file of tokens that services accept: add one, list them, remove one.

The file holds hashes only. A token is shown once, when it is made. Services read the file again when it changes.
"""

from __future__ import annotations

import fcntl
import json as formats
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from hearth.cli.output import Exit, fail, out, print_json
from hearth.cli.stack import Json
from hearth.files import write_whole
from services.chassis.scopes import SCOPE_NAMES
from services.chassis.settings import StartupError

TOKEN_BYTES = 32
_SHOWN_DIGITS = 12

File = Annotated[Path, typer.Option(envvar="HEARTH_AUTH_FILE", dir_okay=False, help="the file of hashes")]

group = typer.Typer(help=__doc__, no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(group, name="tokens")


@group.command()
def add(
    name: Annotated[str, typer.Argument(help="whose it is; errors and logs say this name")],
    file: File,
    scope: Annotated[list[str], typer.Option(help=f"what it may: {', '.join(SCOPE_NAMES)}; may be repeated")],
    project: Annotated[str, typer.Option(help="the only project that it reaches; * for all of them")],
    rate: Annotated[
        float | None, typer.Option(min=0, help="calls a second of the project, for each scope; 0 = no limit")
    ] = None,
    streams: Annotated[int | None, typer.Option(min=0, help="open streams of the project; 0 = no limit")] = None,
    message_bytes: Annotated[
        int | None, typer.Option(min=0, help="size of a message of the project; 0 = no limit but that of all")
    ] = None,
    json: Json = False,
) -> None:
    """Make a token and add its hash to the file. The token is shown now, and never again.

    A limit stands for all of the project, in place of what the services have as a default. Of several tokens of a
    project the smallest counts.
    """
    # Here and not above: it would double the time that every command of the program takes to start.
    from services.chassis.auth import ANY_PROJECT, check_entry, hash_token
    from services.chassis.errors import HearthError
    from services.chassis.fields import key_part

    if wrong := [one for one in scope if one not in SCOPE_NAMES]:
        fail(f"{wrong[0]!r} is no scope; there are {', '.join(SCOPE_NAMES)}", Exit.USAGE)
    if project != ANY_PROJECT:
        try:
            key_part("project", project)
        except HearthError as error:
            fail(error.message, Exit.USAGE)
    if not name:
        fail("a token needs a name", Exit.USAGE)
    given = {"rate": rate, "streams": streams, "message_bytes": message_bytes}
    limits = {which: number for which, number in given.items() if number is not None}
    entry = {"name": name, "project": project, "scopes": sorted(set(scope)), **({"limits": limits} if limits else {})}
    try:
        check_entry(entry)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with _changing(file) as entries:
        if any(other["name"] == name for other in entries.values()):
            fail(f"there is a token of {name!r}; remove it, or take another name", Exit.USAGE)
        entries[hash_token(token)] = entry
    if json:
        print_json({**entry, "token": token})
    else:
        # Alone on its line, for a shell that takes it.
        print(token)


@group.command("list")
def list_(file: File, json: Json = False) -> None:
    """Whose tokens there are, and what they may; a token is named by the first digits of its hash."""
    rows = [{"hash": key[:_SHOWN_DIGITS], **entry} for key, entry in _read(file).items()]
    if json:
        print_json({"tokens": rows})
        return
    for row in rows:
        limits = "".join(f"  {which}={number:g}" for which, number in row.get("limits", {}).items())
        out.print(escape(f"{row['hash']}  {row['name']}  {row['project']}  {' '.join(row['scopes'])}{limits}"))


@group.command()
def remove(
    name: Annotated[str, typer.Argument(help="name of the token")],
    file: File,
    json: Json = False,
) -> None:
    """Take a token out of the file. Calls with it are refused at once, open streams at their next check."""
    with _changing(file) as entries:
        found = [key for key, entry in entries.items() if entry["name"] == name]
        if not found:
            fail(f"there is no token of {name!r}", Exit.USAGE)
        for key in found:
            del entries[key]
    if json:
        print_json({"removed": name})
    else:
        out.print(escape(f"removed the token of {name}"))


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """What the file holds, checked as a service checks it; nothing when it is not there."""
    from services.chassis.auth import TokenFile

    if not file.exists():
        return {}
    try:
        TokenFile(file)
    except StartupError as error:
        fail(str(error), Exit.USAGE)
    found: dict[str, dict[str, Any]] = formats.loads(file.read_text("utf-8"))
    return found


@contextmanager
def _changing(file: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The entries, to be changed; written whole, so that no service reads half of them, by one program at a time."""
    lock = file.with_name(f".{file.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        entries = _read(file)
        yield entries
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        write_whole(file, (formats.dumps(entries, indent=2) + "\n").encode(), mode)
