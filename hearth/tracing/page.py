"""The waterfall of a trace as one page that needs nothing else: no server, no network, no other file.

Every span is a bar in a row of its own (`.row[data-span-id] .bar`), coloured by its service. What a span tells is shown
when the pointer is over its bar, or the keyboard on it. The words of a span are never read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from importlib import resources
from string import Template

from hearth.tracing.layout import Row, Trace, duration, ticks
from hearth.tracing.terminal import short

# Told apart also by those who do not see all colours, and readable on a light and a dark ground.
COLOURS = {"pool": "#3f7fd6", "sandbox": "#d98a1f", "history": "#2f9e6e", "relay": "#a95fc9", "cli": "#1aa3b0"}
_OTHERS = ("#7a869a", "#b07d56", "#6c74d6", "#93a33a")


def page(trace: Trace) -> str:
    """The page, as HTML."""
    colours = _colours(trace)
    parts = {
        "title": escape(f"Trace {trace.trace_id[:8]}"),
        "style": _file("page.css"),
        "heading": escape(_heading(trace)),
        "facts": _facts(trace),
        "legend": "".join(_service(service, colours[service]) for service in trace.services),
        "ticks": "".join(_tick(at, trace.nanoseconds) for at in ticks(trace.nanoseconds)),
        "rows": "\n".join(_row(row, colours[row.span.service]) for row in trace.rows),
        # Within a script nothing but an end tag is read as markup.
        "details": json.dumps({row.span.span_id: _details(row, trace) for row in trace.rows}).replace("<", "\\u003c"),
        "script": _file("page.js"),
    }
    return Template(_file("page.html")).substitute(parts)


def _colours(trace: Trace) -> Mapping[str, str]:
    others = iter(_OTHERS * (1 + len(trace.services) // len(_OTHERS)))
    return {service: COLOURS.get(service.partition("-")[0]) or next(others) for service in trace.services}


def _heading(trace: Trace) -> str:
    executions = trace.executions
    if len(executions) == 1:
        return f"Turn {executions[0]}"
    return f"{len(executions)} turns" if executions else short(trace.rows[0].span.name)


def _facts(trace: Trace) -> str:
    began = datetime.fromtimestamp(trace.began_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    facts = [f"trace {trace.trace_id}", f"{began} UTC", duration(trace.nanoseconds), f"{len(trace.rows)} spans"]
    told = " · ".join(map(escape, facts))
    return told + (f' · <span class="failed">{trace.errors} failed</span>' if trace.errors else "")


def _service(service: str, colour: str) -> str:
    name = escape(service)
    return f'<button type="button" aria-pressed="true" data-service="{name}" style="--service:{colour}">{name}</button>'


def _tick(at: int, whole: int) -> str:
    return f'<span style="left:{100 * at / max(whole, 1):.4f}%">{escape(duration(at) if at else "0")}</span>'


def _row(row: Row, colour: str) -> str:
    span = row.span
    name = escape(short(span.name))
    label = f"{span.name}, {span.service}, at {duration(row.after_ns)}, took {duration(span.nanoseconds)}"
    error = elsewhere = expanded = ""
    if span.error:
        label += f", failed: {span.error}"
        error = f' <span class="error">✗ {escape(span.error)}</span>'
    if row.elsewhere:
        elsewhere = '<span class="elsewhere" title="its caller is not in this store">↳ </span>'
    toggle = '<span class="leaf"></span>'
    if row.children:
        expanded = ' aria-expanded="true"'
        toggle = f'<button type="button" aria-label="children of {name}">▾</button>'
    left, width, end = (f"{100 * part:.4f}%" for part in (row.begins, row.takes, row.begins + row.takes))
    return (
        f'<div class="row{" failed" if span.error else ""}" role="row" aria-level="{row.depth + 1}"{expanded}'
        f' data-span-id="{escape(span.span_id)}" data-parent-id="{escape(span.parent_id)}"'
        f' data-service="{escape(span.service)}" data-depth="{row.depth}"'
        f' style="--service:{colour};--depth:{row.depth}">'
        f'<div class="name" role="gridcell">{toggle}{elsewhere}{name}{error}</div>'
        f'<div class="lane" role="gridcell"><div class="bar" role="img" tabindex="0" aria-label="{escape(label)}"'
        f' style="left:{left};width:{width}"></div>'
        f'<span class="took" style="left:{end}">{escape(duration(span.nanoseconds))}</span></div></div>'
    )


def _details(row: Row, trace: Trace) -> Mapping[str, object]:
    span = row.span
    lines = [
        ("service", span.service),
        ("began", f"{duration(row.after_ns)} after the start"),
        ("took", duration(span.nanoseconds)),
        ("kind", span.kind.lower()),
    ]
    if span.error:
        lines.append(("failed", span.error))
    lines += [(key, _text(value)) for key, value in sorted(span.attributes.items())]
    for trace_id, span_id in span.links:
        other = trace.linked.get(span_id)
        what = f"{short(other.name)} of {other.service}" if other is not None else f"span {span_id}"
        lines.append(("linked to", f"{what}, trace {trace_id[:8]}"))
    return {"name": span.name, "lines": lines}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file(name: str) -> str:
    return resources.files("hearth.tracing").joinpath(name).read_text("utf-8")
