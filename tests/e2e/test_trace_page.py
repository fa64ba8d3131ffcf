"""`hearth trace` as people see it: the waterfall in the terminal, and its page in a browser, against the trace file."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from hearth.tracing.layout import duration
from hearth.tracing.terminal import short
from tests.support.browser import page_in_browser, picture
from tests.support.caller import SERVICE, Caller, calling
from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORK = 'think 5\ntool search {"for": "hearths"}\nrun sleep 0.2\nstream 40 words at 200/s'


@pytest_asyncio.fixture(loop_scope="session")
async def caller(hearth: Hearth) -> AsyncIterator[Caller]:
    """A backend with spans of its own."""
    async with calling(hearth) as found:
        yield found


def in_files(hearth: Hearth, trace_id: str) -> dict[str, dict[str, Any]]:
    """The spans of a trace by id, read from the files without the code under test."""
    lines = [line for path in (hearth.root / "traces").iterdir() for line in path.read_text().splitlines()]
    spans = [json.loads(line) for line in lines if trace_id in line]
    return {span["span_id"]: span for span in spans if span["trace_id"] == trace_id}


async def drawn(page: Page) -> list[dict[str, Any]]:
    """What the page shows of each row, from top to bottom: its data, and the boxes of bar and lane in pixels."""
    found: list[dict[str, Any]] = await page.evaluate(
        """() => [...document.querySelectorAll(".row")].map((row) => {
          const bar = row.querySelector(".bar"), box = bar.getBoundingClientRect();
          const lane = row.querySelector(".lane").getBoundingClientRect(), own = row.getBoundingClientRect();
          return {
            ...row.dataset, bars: row.querySelectorAll(".bar").length, failed: row.classList.contains("failed"),
            label: bar.getAttribute("aria-label"), name: row.querySelector(".name").textContent,
            colour: getComputedStyle(bar).backgroundColor, pattern: getComputedStyle(bar).backgroundImage,
            left: box.left - lane.left, width: box.width, lane: lane.width,
            within: box.top >= own.top && box.bottom <= own.bottom, top: own.top,
          };
        })"""
    )
    return found


async def opened(page: Page, hearth: Hearth, execution: str, directory: Path) -> None:
    """Have the program write the page, and open it."""
    target = directory / "trace.html"
    done = await hearth.run("trace", execution, "--html", str(target))
    assert done.code == 0, done.stderr
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(target.as_uri())
    # It is all in one file.
    assert [url for url in asked if not url.startswith("data:")] == [target.as_uri()]


async def test_every_span_of_the_trace_file_is_a_bar_in_its_row(hearth: Hearth, caller: Caller, tmp_path: Path) -> None:
    session = f"page-{uuid.uuid4().hex[:8]}"
    async with hearth.watching(session, "--tail") as reader:
        await reader.until(lambda items: any("ready" in item for item in items))
        execution = await caller.send(session, WORK)
        trace = await caller.traced(execution, "turn.park", "process hearth:live", "execute_tool execute")
    async with page_in_browser(width=1360, height=1720) as page:
        await opened(page, hearth, execution, tmp_path)
        spans = in_files(hearth, trace.trace_id)
        rows = await drawn(page)
        assert sorted(row["spanId"] for row in rows) == sorted(spans)
        assert {row["bars"] for row in rows} == {1}
        assert all(row["within"] for row in rows)
        assert [row["top"] for row in rows] == sorted({row["top"] for row in rows})

        began = min(span["start_ns"] for span in spans.values())
        whole = max(span["end_ns"] for span in spans.values()) - began
        above: list[str] = []
        for row in rows:
            span = spans[row["spanId"]]
            took = span["end_ns"] - span["start_ns"]
            assert short(span["name"]) in row["name"]
            assert row["service"] == span["service"].removeprefix("hearth-")
            # Below its parent, and not below anything else.
            del above[int(row["depth"]) :]
            assert (above[-1] if above else None) == span["parent_id"]
            above.append(row["spanId"])
            # As long as it took, and where it began; the shortest are widened so that they can be seen.
            assert row["left"] == pytest.approx((span["start_ns"] - began) / whole * row["lane"], abs=1.5)
            assert row["width"] == pytest.approx(max(3, took / whole * row["lane"]), abs=1.5)
            assert duration(took) in row["label"]
        colours = {row["service"]: row["colour"] for row in rows}
        assert set(colours) == {SERVICE, "pool", "sandbox", "history", "relay"}
        assert len(set(colours.values())) == len(colours)
        assert not any(row["failed"] for row in rows)
        assert await page.locator(".legend button").all_text_contents() == trace.services

        # Times are told where the pointer is.
        tip = page.locator("#tip")
        await expect(tip).to_be_hidden()
        (turn,) = (span for span in spans.values() if span["name"] == "turn")
        await page.hover(f'.row[data-span-id="{turn["span_id"]}"] .bar')
        await expect(tip).to_be_visible()
        await expect(tip).to_contain_text(f"took{duration(turn['end_ns'] - turn['start_ns'])}")
        await expect(tip).to_contain_text(f"began{duration(turn['start_ns'] - began)} after the start")
        await expect(tip).to_contain_text(f"hearth.execution{execution}")
        assert (await picture(page, "trace.png")).startswith(b"\x89PNG")
        await page.mouse.move(0, 0)
        await expect(tip).to_be_hidden()

        # What is below a row can be put away, and so can a service.
        acquire = page.locator(".row", has_text="turn.acquire")
        below = page.locator(".row:visible", has_text="SandboxService/Acquire")
        await expect(below).to_have_count(2)
        await acquire.locator("button").click()
        await expect(below).to_have_count(0)
        await expect(page.locator(".row:visible", has_text="turn.park")).to_have_count(1)
        await acquire.locator("button").click()
        await expect(below).to_have_count(2)
        await page.locator(".legend button", has_text="pool").click()
        await expect(page.locator('.row[data-service="pool"]:visible')).to_have_count(0)


async def test_what_failed_is_marked(hearth: Hearth, caller: Caller, tmp_path: Path) -> None:
    execution = await caller.send(f"page-{uuid.uuid4().hex[:8]}", "stream 5 words\nerror the model is away")
    trace = await caller.traced(execution, "turn.settle")
    async with page_in_browser(dark=True) as page:
        await opened(page, hearth, execution, tmp_path)
        spans = in_files(hearth, trace.trace_id)
        failed = {span["span_id"]: span["status_message"] for span in spans.values() if span["status"] == "ERROR"}
        assert {spans[span]["name"] for span in failed} >= {"turn", "session/prompt"}
        rows = await drawn(page)
        assert {row["spanId"] for row in rows if row["failed"]} == set(failed)
        for row in rows:
            code = failed.get(row["spanId"])
            # In words, for who sees no colour, and by another pattern.
            assert (code is not None) == ("✗" in row["name"]) == ("failed" in row["label"])
            assert (code is not None) == (row["pattern"] != "none")
            assert code is None or code in row["name"]
        await expect(page.locator(".facts .failed")).to_have_text(f"{len(failed)} failed")
        await page.hover(f'.row[data-span-id="{next(iter(failed))}"] .bar')
        await expect(page.locator("#tip")).to_contain_text("failed")


async def test_the_terminal_shows_the_same(hearth: Hearth, caller: Caller) -> None:
    execution = await caller.send(f"page-{uuid.uuid4().hex[:8]}", "hello")
    trace = await caller.traced(execution, "turn.park")
    shown = await hearth.run("trace", execution[:13])
    assert shown.code == 0, shown.stderr
    head, *_ = shown.stdout.splitlines()
    assert head.startswith(f"trace {trace.trace_id}")
    lines = [line for line in shown.stdout.splitlines() if any(part in line for part in "█▉▊▋▌▍▎▏")]
    told = (await hearth.run("trace", execution, "--json")).json()
    assert told["executions"] == [execution]
    assert len(lines) == len(told["spans"]) > 10
    for line, span in zip(lines, told["spans"], strict=True):
        assert line.startswith("  " * span["depth"] + short(span["name"])[:20])
        assert f" {span['service']} " in line
    # The last turn of all, and one that there never was.
    assert (await hearth.run("trace", "--json")).json()["trace_id"] == trace.trace_id
    unknown = await hearth.run("trace", str(uuid.uuid4()))
    assert (unknown.code, unknown.stdout) == (1, "")
    assert "no execution or trace with the id" in unknown.stderr
