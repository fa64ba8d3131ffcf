"""What both drawings do with words that could be read as markup, with many services, and with links."""

from __future__ import annotations

import io
import json
import re

from rich.console import Console

from hearth.tracing.layout import Trace, lay_out
from hearth.tracing.page import page
from hearth.tracing.terminal import draw, short
from tests.unit.hearth.tracing.spans import span

HOSTILE = "</script><script>alert('x')</script>[red]$title"


def printed(trace: Trace, width: int = 100) -> str:
    text = io.StringIO()
    draw(trace, Console(file=text, width=width, color_system=None))
    return text.getvalue()


def test_words_of_a_span_are_never_markup() -> None:
    trace = lay_out(
        [span("a", name=HOSTILE, service=HOSTILE, error=HOSTILE, attributes={HOSTILE: HOSTILE, "hearth.n": [1, 2]})]
    )
    made = page(trace)
    assert "<script>alert" not in made
    assert made.count("</script>") == 2
    details = json.loads(re.search(r'id="details">(.*?)</script>', made, re.DOTALL)[1])  # type: ignore[index]
    assert details["a"]["name"] == HOSTILE
    assert [HOSTILE, HOSTILE] in details["a"]["lines"]
    assert ["hearth.n", "[1, 2]"] in details["a"]["lines"]
    assert "<title>Trace 0af76519</title>" in made
    assert "[red]" in printed(trace, 400)


def test_every_service_has_a_colour_of_its_own() -> None:
    names = ["pool", "history", "one", "two", "three", "four"]
    made = page(lay_out([span(name, at=at, service=name) for at, name in enumerate(names)]))
    colours = dict(re.findall(r'data-service="(\w+)" style="--service:(#\w+)"', made))
    assert list(colours) == names
    assert len(set(colours.values())) == len(names)


def test_links_are_told_where_they_lead() -> None:
    commit = span("c", name="history.commit", service="history", took=2, trace_id="f" * 32)
    links = [("f" * 32, "c"), ("e" * 32, "gone")]
    trace = lay_out([span("a", name="history.append", links=links)], {"c": commit})
    assert "history.append → history.commit of history, 2.0 ms, in trace ffffffff" in printed(trace)
    made = page(trace)
    assert "history.commit of history, trace ffffffff" in made
    assert "span gone, trace eeeeeeee" in made


def test_bars_lie_where_their_times_do() -> None:
    trace = lay_out([span("a", took=100), span("b", "a", at=50, took=25), span("c", "a", at=99.99, took=0)])
    lines = printed(trace, 120).splitlines()[-3:]
    columns = [line.split(" s  ")[-1].split("ms  ")[-1].split("µs  ")[-1] for line in lines]
    bars = [(len(text) - len(text.lstrip()), len(text.strip())) for text in columns]
    whole = bars[0][1]
    assert bars[0][0] == 0
    assert abs(bars[1][0] - whole / 2) <= 1
    assert abs(bars[1][1] - whole / 4) <= 1
    assert bars[2][1] == 1


def test_the_service_of_an_rpc_is_named_without_its_package() -> None:
    assert short("hearth.session.v1.SessionService/SendInput") == "SessionService/SendInput"
    for name in ("session/prompt", "POST /chat", "turn.acquire", "invoke_agent my.agent/x"):
        assert short(name) == name
