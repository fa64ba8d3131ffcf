"""Messages of the contracts in words and numbers that a person reads at a glance. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

import typer
from rich.markup import escape
from rich.table import Table

from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2, session_pb2

_MICRO = 1_000_000
_SMALLEST = 0.0001

_V = TypeVar("_V", bound=int)

# What may be asked for; nothing is any.
TENURES = {
    "": sandbox_pb2.TENURE_UNSPECIFIED,
    "active": sandbox_pb2.TENURE_ACTIVE,
    "parked": sandbox_pb2.TENURE_PARKED,
    "free": sandbox_pb2.TENURE_FREE,
    "orphan": sandbox_pb2.TENURE_ORPHAN,
}


def word(name_of: Callable[[_V], str], value: _V, prefix: str) -> str:
    """`TENURE_PARKED` as `parked`; a value of a later version as its number; nothing for one that is not set.

    `name_of` is `Name` of the enum.
    """
    try:
        name = name_of(value)
    except ValueError:
        return str(value)
    found = name.removeprefix(prefix).lower().replace("_", " ")
    return "" if found == "unspecified" else found


def state(value: sandbox_pb2.SandboxState.ValueType) -> str:
    """The state of a sandbox."""
    return word(sandbox_pb2.SandboxState.Name, value, "SANDBOX_STATE_")


def tenure(value: sandbox_pb2.Tenure.ValueType) -> str:
    """What a sandbox is used for."""
    return word(sandbox_pb2.Tenure.Name, value, "TENURE_")


def execution(found: control_pb2.Execution) -> str:
    """How an execution stands: `running`, or how it ended, with the reason where it failed; nothing for none."""
    if found.state != control_pb2.EXECUTION_STATE_TERMINAL:
        return word(control_pb2.ExecutionState.Name, found.state, "EXECUTION_STATE_")
    outcome = word(control_pb2.ExecutionOutcome.Name, found.outcome, "EXECUTION_OUTCOME_")
    return f"{outcome}, {found.failure_code}" if found.failure_code else outcome


def gate(found: control_pb2.Interaction) -> str:
    """How an interaction stands: `pending`, what was decided and whether the agent knows, or how it was closed."""
    stands = word(control_pb2.InteractionState.Name, found.state, "INTERACTION_STATE_")
    if found.state == control_pb2.INTERACTION_STATE_CLOSED:
        how = word(event_pb2.InteractionResolution.Name, found.resolution, "INTERACTION_RESOLUTION_")
        return f"{stands}, {how}" if how else stands
    decision = word(event_pb2.Decision.Name, found.decision, "DECISION_")
    return f"{decision}, {stands}" if decision else stands


def is_whole(text: str) -> bool:
    """Whether an id is given in full."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def begun_by(text: str, ids: Sequence[str]) -> str:
    """The one id that begins so; one given in full is taken as it is. Raises `typer.BadParameter` where that is none,
    or several."""
    if is_whole(text):
        return text
    found = [one for one in ids if text and one.startswith(text)]
    if len(found) != 1:
        raise typer.BadParameter(f"{len(found) or 'none'} of {len(ids)} begin with {text!r}")
    return found[0]


def session(key: session_pb2.SessionKey) -> str:
    """`project/session`; nothing where there is none."""
    return f"{key.project}/{key.session}" if key.session else ""


def span(seconds: float) -> str:
    """A length of time in its largest two units, as `3 h 20 min`."""
    whole = round(abs(seconds))
    for size, unit, next_size, next_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{whole} s"


def since(moment: datetime, now: datetime) -> str:
    """How long ago; a clock that is a little behind is no time ago."""
    return span(max(0.0, (now - moment).total_seconds()))


def dollars(micro: int) -> str:
    """Millionths of a US dollar as `$1.25`, with the digits that a small amount needs."""
    amount = micro / _MICRO
    if 0 < amount < _SMALLEST:
        return f"under ${_SMALLEST:.4f}"
    return f"${amount:.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, whole: Iterable[str] = ()) -> Table:
    """A table without borders, and without a head where no column has a name. Columns named in `whole` are never cut:
    ids are there to be copied."""
    keep, names = set(whole), list(columns)
    made = Table(box=None, pad_edge=False, show_header=any(names))
    for column in names:
        made.add_column(column, no_wrap=column in keep, overflow="fold")
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    return made


def tls_hint(message: str) -> str:
    """What may be wrong with TLS when a call got no connection, by what gRPC says of it; empty when that is not it."""
    if "WRONG_VERSION_NUMBER" in message:
        return "the service speaks no TLS: unset HEARTH_TLS_CA_FILE, or give it a certificate"
    if "Hostname Verification" in message:
        return "its certificate is for another name: call it by one that it holds, or set HEARTH_TLS_SERVER_NAME"
    if "certificate has expired" in message:
        return "its certificate has ended: put a new one in its place, the service reads it by itself"
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return "its certificate is not signed by the roots in HEARTH_TLS_CA_FILE: set it to the right ones"
    if "Socket closed" in message or "Connection reset" in message or "CERTIFICATE_REQUIRED" in message:
        return (
            "it ended the connection: if it speaks TLS, set HEARTH_TLS_CA_FILE to its roots; if it asks who calls, also"
            " HEARTH_TLS_CERTIFICATE_FILE and HEARTH_TLS_KEY_FILE"
        )
    return ""
