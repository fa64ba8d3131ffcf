"""`hearth trace`: where the time of a turn went, from the spans that the services of the stack have written."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hearth.cli.output import WIDTH, fail, out, print_json
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.tracing.layout import Trace, lay_out
from hearth.tracing.page import page
from hearth.tracing.store import LATEST, NotFound, TraceStore
from hearth.tracing.terminal import draw

# A service writes a finished span within 200 ms. A turn that ended just now is read again until nothing new comes.
_QUIET_SECONDS = 0.6
_PATIENCE_SECONDS = 4.0
_POLL_SECONDS = 0.2
# Of output that goes to no terminal: names and times beside a bar that says something.
_PIPE_WIDTH = 140


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(trace)


def trace(
    which: Annotated[
        str, typer.Argument(metavar="[EXECUTION|latest]", help="id of an execution or a trace, or its beginning")
    ] = LATEST,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the waterfall to this file, as one page")
    ] = None,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Draw one turn as a waterfall: every span of every service, from the call that sent the message on."""
    try:
        found = _read(TraceStore(root / "traces"), which)
    except NotFound as error:
        fail(str(error))
    if html is not None:
        html.write_text(page(found), "utf-8")
    if json:
        print_json(_as_dict(found))
    elif html is not None:
        out.print(f"{html}: {len(found.rows)} spans", soft_wrap=True, markup=False)
    else:
        draw(found, out if WIDTH is None else Console(highlight=False, width=_PIPE_WIDTH))


def _read(store: TraceStore, which: str) -> Trace:
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        spans = store.find(which)
        quiet = time.time() - max(span.end_ns for span in spans) / 1e9
        if quiet > _QUIET_SECONDS or time.monotonic() > patience:
            return lay_out(spans, store.linked(spans))
        time.sleep(_POLL_SECONDS)


def _as_dict(found: Trace) -> dict[str, object]:
    return {
        "trace_id": found.trace_id,
        "executions": found.executions,
        "services": found.services,
        "nanoseconds": found.nanoseconds,
        "errors": found.errors,
        "spans": [{**dataclasses.asdict(row.span), "depth": row.depth} for row in found.rows],
        "linked": [dataclasses.asdict(span) for span in found.linked.values()],
    }
