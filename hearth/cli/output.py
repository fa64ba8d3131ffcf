"""How commands speak: colours on a terminal, one JSON object with `--json`, and exit codes that mean something."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape

from hearth.cli.words import tls_hint
from hearth.errors import FAILED_CALLS, CallError, DeadlineExceeded, Unavailable, read_error

T = TypeVar("T")

# Progress and errors go to stderr, results to stdout, so that `--json` output can be piped. A pipe has no width.
WIDTH = None if sys.stdout.isatty() else 120
err = Console(stderr=True, highlight=False)
out = Console(highlight=False, width=WIDTH)


class Exit(enum.IntEnum):
    """What the exit code of a command says."""

    OK = 0
    FAILED = 1  # the work was done, and its outcome is bad: a failed turn, a broken promise
    USAGE = 2  # the command itself is wrong
    UNREACHABLE = 3  # no service answers, or one is not ready; trying again may help
    REFUSED = 4  # a service answered and refused; its reason says what to change


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end; what a service answered becomes a message and an exit code."""
    try:
        return asyncio.run(work)
    except FAILED_CALLS as error:
        fail_call(read_error(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail_call(error: CallError) -> NoReturn:
    """End the command with the error of a call."""
    reason = f" [dim]({escape(error.reason)})[/dim]" if error.reason else ""
    err.print(f"[red]{escape(error.code.name)}[/red]{reason} {escape(error.message)}", soft_wrap=True)
    for field, description in error.field_violations:
        err.print(f"  [yellow]{escape(field)}[/yellow] {escape(description)}", soft_wrap=True)
    unreachable = isinstance(error, Unavailable | DeadlineExceeded)
    if unreachable and not error.reason:
        hint = tls_hint(error.message) or "is a stack running? `hearth status` tells, `hearth up` starts one"
        err.print(f"  {escape(hint)}", soft_wrap=True)
    raise typer.Exit(Exit.UNREACHABLE if unreachable else Exit.REFUSED)


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """End the command with a message of its own."""
    err.print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(code)


def print_json(content: object) -> None:
    """One JSON object on one line of stdout, flushed. Ends the program when nobody reads them any more."""
    try:
        sys.stdout.write(json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is buffered still would be written at the end, and told of there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.FAILED)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON in the field names of the protos. 64-bit numbers are strings, as in all Protobuf JSON."""
    content: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return content


def say(message: str) -> None:
    """Progress for a person."""
    err.print(f"[dim]{escape(message)}[/dim]")
