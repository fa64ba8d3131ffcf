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
    """The spans of the trace of one turn, once the last of them is written."""
    sent = (await hearth.run("send", session, text, "--wait", "--json")).lines()[0]
    execution = sent["started"]["execution"]["execution_id"]
    async with asyncio.timeout(30):
        while True:
            spans = spans_below(hearth.root)
            of_turn = [span for span in spans if span["attributes"].get("hearth.execution") == execution]
            traces = {span["trace_id"] for span in of_turn if span["name"] == "turn"}
            own = [span for span in spans if span["trace_id"] in traces]
            # Processes write their spans when they like: a parent may come later than its children.
            ids = {span["span_id"] for span in own} | {None}
            whole = all(span["parent_id"] in ids for span in own)
            if whole and {"turn", "turn.park", "history.commit", "process hearth:live"} <= {span["name"] for span in own}:
                assert len(traces) == 1
                return own
            await asyncio.sleep(0.2)


async def test_a_turn_is_one_trace_with_one_root_and_no_orphans(hearth: Hearth) -> None:
    session = f"trace-{uuid.uuid4().hex[:8]}"
    for text in ("hello", "hello again"):
        # Somebody has to read along, else the relay has no reason to take part.
        async with hearth.watching(session, "--tail") as reader:
            await reader.until(lambda items: any("ready" in item for item in items))
            spans = await trace_of_turn(hearth, session, text)
        by_id = {span["span_id"]: span for span in spans}
        roots = [span["name"] for span in spans if not span["parent_id"]]
        assert len(roots) == 1
        assert roots[0].endswith("SessionService/SendInput")
        assert [span["name"] for span in spans if span["parent_id"] and span["parent_id"] not in by_id] == []
        assert {span["service"] for span in spans} == {
            "hearth-pool",
            "hearth-sandbox",
            "hearth-history",
            "hearth-relay",
        }
        names = {span["name"] for span in spans}
        assert {"turn.acquire", "turn.settle", "turn.park", "history.commit", "process hearth:live"} <= names
        # Over the bus: what the relay did is a child of the commit that it was told of.
        for span in spans:
            if span["name"] == "process hearth:live":
                assert by_id[span["parent_id"]]["service"] == "hearth-history"
        failed = [(span["name"], span["attributes"]) for span in spans if span["status"] == "ERROR"]
        assert failed == []
