"""The waterfall of a trace for a terminal: a row for each span, indented below its parent, with its bar."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hearth.tracing.layout import Row, Trace, duration

# Of services that have a colour of their own; others share one.
COLOURS = {"pool": "blue", "sandbox": "yellow", "history": "green", "relay": "magenta", "cli": "cyan"}
_OTHER = "white"
_MIN_BAR = 16
_NAMES_SHARE = 0.45
# Eighths of a cell, for what is shorter than one.
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def draw(trace: Trace, console: Console) -> None:
    """Print a trace, as wide as the console is."""
    console.print(_head(trace))
    console.print()
    console.print(_waterfall(trace, console.width))
    told = _links(trace)
    if told is not None:
        console.print()
        console.print(told)


def _head(trace: Trace) -> Text:
    began = datetime.fromtimestamp(trace.began_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    head = Text()
    head.append(f"trace {trace.trace_id}", style="bold")
    head.append(f"  {began} UTC  {duration(trace.nanoseconds)}  {len(trace.rows)} spans")
    if trace.errors:
        head.append(f"  {trace.errors} failed", style="bold red")
    for execution in trace.executions:
        head.append(f"\nexecution {execution}")
    return head


def _waterfall(trace: Trace, width: int) -> RenderableType:
    names = [_name(row) for row in trace.rows]
    times = [(duration(row.after_ns), duration(row.span.nanoseconds)) for row in trace.rows]
    of_services = max(len("service"), *map(len, trace.services))
    of_times = of_services + sum(max(len(pair[place]) for pair in times) for place in (0, 1)) + 8
    of_names = min(max(name.cell_len for name in names), round((width - of_times) * _NAMES_SHARE))
    of_bars = max(_MIN_BAR, width - of_names - of_times)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("span", width=of_names, no_wrap=True, overflow="ellipsis")
    table.add_column("service", width=of_services, no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    for name, (after, took), row in zip(names, times, trace.rows, strict=True):
        table.add_row(
            name,
            Text(row.span.service, style=_colour(row.span.service)),
            Text(after, style="dim"),
            took,
            _bar(row, of_bars),
        )
    return table


def _name(row: Row) -> Text:
    text = Text("  " * row.depth)
    if row.elsewhere:
        text.append("↳ ", style="dim")
    style = "bold red" if row.span.error else ("" if row.children or row.depth == 0 else "dim")
    text.append(short(row.span.name), style=style)
    if row.span.error:
        text.append(f" ✗ {row.span.error}", style="red")
    return text


def _bar(row: Row, width: int) -> Text:
    # Rounded to eighths of a cell; a moment is a thin line, and not nothing.
    begins = round(row.begins * width * 8)
    length = max(1, round(row.takes * width * 8))
    begins = min(begins, width * 8 - 1)
    cells, rest = divmod(begins, 8)
    text = Text(" " * cells)
    if rest and length <= 8 - rest:
        # It begins and ends within one cell, which cannot be shown nearer than that.
        rest = 0
    if rest:
        cells, length = cells + 1, max(1, length - (8 - rest))
        text.append(" ")
    full, part = divmod(length, 8)
    bar = "█" * full + (_EIGHTHS[part] if part else "")
    text.append(bar, style="red" if row.span.error else _colour(row.span.service))
    return text


def _links(trace: Trace) -> RenderableType | None:
    lines = []
    for row in trace.rows:
        for trace_id, span_id in row.span.links:
            other = trace.linked.get(span_id)
            if other is None or trace_id == trace.trace_id:
                continue
            what = f"{short(other.name)} of {other.service}, {duration(other.nanoseconds)}"
            lines.append(f"{short(row.span.name)} → {what}, in trace {trace_id[:8]}")
    if not lines:
        return None
    # One line for many that say the same, as when a reader was told of many events.
    return Text("\n").join(
        [Text("linked to", style="bold"), *(Text(line, style="dim") for line in dict.fromkeys(lines))]
    )


def short(name: str) -> str:
    """`SessionService/SendInput` of an RPC's whole name; any other name as it is."""
    service, slash, method = name.partition("/")
    return f"{service.rpartition('.')[2]}/{method}" if slash and service.count(".") > 1 else name


def _colour(service: str) -> str:
    return COLOURS.get(service.partition("-")[0], _OTHER)
