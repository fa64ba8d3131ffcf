"""One turn is one trace: one root, no orphan, and the context crosses the bus and the harness."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")


def spans_below(root: Path) -> list[dict[str, Any]]:
    spans = []
    for path in (root / "traces").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                spans.append(json.loads(line))
    return spans


async def trace_of_turn(hearth: Hearth, session: str, text: str) -> list[dict[str, Any]]:
    """The spans of the one trace that a send began, once all of it is exported."""
    sent = (await hearth.run("send", session, text, "--wait", "--json")).lines()[0]
    execution = sent["started"]["execution"]["execution_id"]
    async with asyncio.timeout(30):
        while True:
            spans = spans_below(hearth.root)
            traces = {
                span["trace_id"]
                for span in spans
                if "SendInput" in span["name"] and span["attributes"].get("hearth.execution_id") == execution
            } or {span["trace_id"] for span in spans if span["attributes"].get("hearth.execution_id") == execution}
            if len(traces) == 1:
                own = [span for span in spans if span["trace_id"] in traces]
                roots = [span for span in own if not span["parent_id"]]
                if len(roots) == 1 and "park" in {span["name"].split()[-1].split(".")[-1] for span in own}:
                    return own
            await asyncio.sleep(0.2)


async def test_a_turn_is_one_trace_with_one_root_and_no_orphans(hearth: Hearth) -> None:
    session = f"trace-{uuid.uuid4().hex[:8]}"
    for text in ("hello", "hello again"):
        spans = await trace_of_turn(hearth, session, text)
        by_id = {span["span_id"]: span for span in spans}
        roots = [span for span in spans if not span["parent_id"]]
        assert len(roots) == 1
        assert "SendInput" in roots[0]["name"]
        orphans = [span["name"] for span in spans if span["parent_id"] and span["parent_id"] not in by_id]
        assert orphans == []
        services = {span["service"].removeprefix("hearth-").removeprefix("hearth.") for span in spans}
        assert {"pool", "history", "sandbox", "relay"} <= services
